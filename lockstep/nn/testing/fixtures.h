#pragma once

#include <utility>
#include <vector>

#include <torch/torch.h>

#include <lockstep/collectives/functional.h>

/// Models and data that the tests of DistributedDataParallel share.
namespace lockstep::testing {

/// Three layers, with a batch-normalisation's buffers.
struct Net : torch::nn::Module {
  Net() { register_module("first", first), register_module("norm", norm), register_module("last", last); }
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::relu(norm(first(x)))); }
  torch::nn::Linear first{6, 5};
  torch::nn::BatchNorm1d norm{5};
  torch::nn::Linear last{5, 2};
};

/// Branches that an iteration may leave out, and a parameter under two names.
struct Branching : torch::nn::Module {
  Branching() {
    register_module("common", common), register_module("extra", extra);
    tied = register_parameter("tied", common->weight);
    frozen = register_parameter("frozen", torch::ones({3}), /*requires_grad=*/false);
  }
  std::pair<torch::Tensor, torch::Tensor> forward(const torch::Tensor& x, bool with_extra, double scale = 1) {
    const auto y = common(x) * scale + torch::matmul(x, tied.t());
    return {with_extra ? extra(y) : y, y};
  }
  torch::nn::Linear common{4, 4};
  torch::nn::Linear extra{4, 4};
  torch::Tensor tied;
  torch::Tensor frozen;
};

/// Random numbers in float64, the same in every run; different by rank and salt.
inline torch::Tensor data(int rank, at::IntArrayRef sizes, int salt = 0) {
  return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(100 * salt + rank)),
                   at::kDouble);
}

/// The mean over ranks of what each rank passes in.
inline torch::Tensor mean_over_ranks(const torch::Tensor& tensor) {
  auto copy = tensor.detach().clone();
  all_reduce(copy, ReduceOp::AVG);
  return copy;
}

/// Copies of the gradients that are there.
template <class Module>
std::vector<torch::Tensor> gradients(const Module& module) {
  std::vector<torch::Tensor> answer;
  for (const auto& parameter : module.parameters()) {
    if (parameter.grad().defined()) answer.push_back(parameter.grad().clone());
  }
  return answer;
}

/// A module of double precision.
template <class Module, class... Arguments>
std::shared_ptr<Module> make_double(Arguments&&... arguments) {
  auto module = std::make_shared<Module>(std::forward<Arguments>(arguments)...);
  module->to(at::kDouble);
  return module;
}

inline bool close(const torch::Tensor& a, const torch::Tensor& b, double tolerance = 1e-12) {
  return at::allclose(a, b, tolerance, tolerance);
}

}  // namespace lockstep::testing
