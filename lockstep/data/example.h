#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::data {

/// A sample, or a batch of samples whose tensors have one more dimension in front.
struct Example {
  at::Tensor data;
  at::Tensor target;
};

/// Makes a batch of samples by stacking their tensors along a new first dimension (Python's default_collate
/// for tensors). Throws c10::Error when shapes differ.
struct DefaultCollate {
  at::Tensor operator()(const std::vector<at::Tensor>& samples) const;
  Example operator()(const std::vector<Example>& samples) const;
};

}  // namespace lockstep::data
