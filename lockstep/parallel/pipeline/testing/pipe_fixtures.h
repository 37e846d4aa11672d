#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/testing/tensors.h>

namespace lockstep::testing {

/// A matrix product's bits depend on how many threads compute it, and a partition has only its share of the
/// caller's. Not set before main(): ranks are forked from a process that has got so far, and torch's thread
/// pool does not survive that in several threads.
struct OneIntraOpThread : ::testing::Environment {
  void SetUp() override { at::set_num_threads(1); }
};
inline ::testing::Environment* const kOneIntraOpThread =
    ::testing::AddGlobalTestEnvironment(new OneIntraOpThread);

/// What a Pipe is to compute: the module on each micro-batch, one after the other.
inline torch::Tensor on_micro_batches(torch::nn::Sequential module, const torch::Tensor& x, int64_t chunks) {
  std::vector<torch::Tensor> outputs;
  for (const auto& part : x.chunk(chunks)) outputs.push_back(module->forward(part));
  return torch::cat(outputs);
}

/// A module of its own with the same layers.
inline torch::nn::Sequential copy_of(const torch::nn::Sequential& module) {
  return torch::nn::Sequential(std::dynamic_pointer_cast<torch::nn::SequentialImpl>(module->clone()));
}

/// All parameters have an entry; those without a gradient an undefined one.
inline std::vector<torch::Tensor> gradients_of(const torch::nn::Module& module) {
  std::vector<torch::Tensor> answer;
  for (const auto& parameter : module.parameters()) answer.push_back(parameter.grad());
  return answer;
}

/// A loss that weighs all elements differently.
inline torch::Tensor loss_of(const torch::Tensor& output) {
  return (output * random(output.sizes(), 17, output.scalar_type()).to(output.device())).sum();
}

/// Gives its input back, after a call with the number of the forwards before.
struct CallsImpl : torch::nn::Cloneable<CallsImpl> {
  explicit CallsImpl(std::function<void(int)> function) : call(std::move(function)) {}
  void reset() override {}
  torch::Tensor forward(const torch::Tensor& x) {
    call(calls++);
    return x;
  }
  std::function<void(int)> call;
  int calls = 0;
};
TORCH_MODULE(Calls);

/// Multiplies by two; its backward calls a function.
struct Doubled : torch::autograd::Function<Doubled> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               const std::function<void()>& call) {
    context->saved_data["call"] = reinterpret_cast<int64_t>(new std::function<void()>(call));
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const std::unique_ptr<std::function<void()>> call(
        reinterpret_cast<std::function<void()>*>(context->saved_data["call"].toInt()));
    (*call)();
    return {gradients[0] * 2, torch::Tensor()};
  }
};

/// Multiplies by two; its backward calls with the number of the micro-batch.
struct CallsBackwardImpl : torch::nn::Module {
  explicit CallsBackwardImpl(std::function<void(int)> function) : call(std::move(function)) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return Doubled::apply(x,
                          std::function<void()>([own = call, micro_batch = calls++] { own(micro_batch); }));
  }
  std::function<void(int)> call;
  int calls = 0;
};
TORCH_MODULE(CallsBackward);

}  // namespace lockstep::testing
