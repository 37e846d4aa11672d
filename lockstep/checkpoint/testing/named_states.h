#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <lockstep/serialization/state_dict.h>

/// A model, its training and its states by name, for the tests of what gathers them.
namespace lockstep::testing {

/// With `reversed`, the names are the same and their order is not.
struct NormNetImpl : torch::nn::Cloneable<NormNetImpl> {
  explicit NormNetImpl(bool reversed = false) : reversed(reversed) { reset(); }
  void reset() override {
    torch::nn::Linear one(4, 6), two(6, 2);
    if (!reversed) first = register_module("first", one);
    second = register_module("second", two);
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    if (reversed) first = register_module("first", one);
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(torch::tanh(norm(first(x)))); }
  bool reversed;
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(NormNet);

inline torch::Tensor inputs(int64_t step) {
  return at::randn({5, 4}, at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(step)), at::kFloat);
}

template <class Model>
void train(Model& model, torch::optim::Optimizer& optimizer, int64_t begin, int64_t end) {
  for (int64_t step = begin; step < end; ++step) {
    optimizer.step([&] {
      optimizer.zero_grad();
      at::Tensor loss = model(inputs(step)).square().sum();
      loss.backward();
      return loss;
    });
  }
}

/// A copy that shares no memory, as after a file.
inline StateDict copied(const StateDict& state) {
  return from_object<StateDict>(to_object(state).deepcopy());
}

inline std::vector<std::string> keys_of(const StateDict& state) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : state) keys.push_back(key);
  return keys;
}

}  // namespace lockstep::testing
