#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/nn/testing/fixtures.h>

// A model of equal layers, and what its gradients should be.
namespace lockstep::testing {

/// All layers of one size, so that gradients and activations' gradients have equal sizes, too.
struct Square : torch::nn::Module {
  explicit Square(int64_t width, int layers) {
    for (int i = 0; i < layers; ++i) {
      layers_.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(width, width)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers_) x = torch::tanh(layer(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers_;
};

template <class Model>
int64_t number(const Model& model, const char* name) {
  return model.get_ddp_logging_data().ints_map.at(name);
}

/// Gradients of `net` on `x`, computed apart, averaged.
template <class Net>
std::vector<torch::Tensor> expected_gradients(const std::shared_ptr<Net>& net, const torch::Tensor& x) {
  std::vector<torch::Tensor> answer;
  for (const auto& gradient : torch::autograd::grad({net->forward(x).square().sum()}, net->parameters())) {
    answer.push_back(mean_over_ranks(gradient));
  }
  return answer;
}

/// Whether these are the gradients of the parameters, and which one is not.
template <class Net>
::testing::AssertionResult has_gradients(const std::shared_ptr<Net>& net,
                                         const std::vector<torch::Tensor>& expected, double factor = 1,
                                         double tolerance = 1e-12) {
  const auto parameters = net->parameters();
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!close(parameters[i].grad(), factor * expected[i], tolerance)) {
      return ::testing::AssertionFailure() << "parameter " << i;
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace lockstep::testing
