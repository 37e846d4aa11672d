#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::data {

/// A sample, or a batch of samples whose tensors have one more dimension in front.
struct Example {
  at::Tensor data;
  at::Tensor target;
  template <class Visitor>
  void visit_tensors(Visitor&& visit) {
    visit(data), visit(target);
  }
};

}  // namespace lockstep::data
