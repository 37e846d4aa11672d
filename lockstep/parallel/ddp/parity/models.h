#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/torch.h>

namespace parity {

/// A model of the comparison. forward() gives the logits first; `branch` says what an iteration uses, where
/// the model has a choice.
struct Net : torch::nn::Module {
  virtual std::vector<torch::Tensor> forward(const torch::Tensor& x, int64_t branch) = 0;
};

/// The models of parity_models.py, with the same names of parameters and buffers.
std::shared_ptr<Net> make_net(const std::string& model);

}  // namespace parity
