// Several models, each wrapped by itself, in one backward; and one model several times.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/nn/activation_checkpoint.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::fsdp_several_test {
namespace {

using testing::random;
using testing::run_ranks;
namespace nn = torch::nn;
namespace optim = torch::optim;
using Options = FullyShardedDataParallelOptions;

constexpr int kSteps = 3;

/// May begin after its first layers, end before its last one, and give that one no gradients.
struct Tower : nn::Module {
  explicit Tower(uint64_t seed) {
    torch::manual_seed(seed);
    for (int i = 0; i < 4; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), nn::Linear(5, 5)));
    }
    to(at::kDouble);
  }
  torch::Tensor forward(torch::Tensor x, size_t begin = 0, size_t end = 4, bool lacks = false) {
    for (size_t i = begin; i < end; ++i) {
      const auto &weight = layers[i]->weight, &bias = layers[i]->bias;
      x = torch::tanh(lacks ? torch::linear(x, weight.detach(), bias.detach())
                            : torch::linear(x, weight, bias));
    }
    return x;
  }
  std::vector<nn::Linear> layers;
};

Options in_small_groups() {
  return {.auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>(), .gradient_buffers = 1};
}

/// Trains two towers by one backward. `loss_of(first, second, x, rank)` takes towers or wrappers of them.
template <class LossOf>
void expect_trains_as_one_process(int ranks, const Options& options, const LossOf& loss_of) {
  run_ranks(ranks, [&](int rank) {
    auto world = init_process_group();
    Tower first_alone(1), second_alone(2);
    std::vector<torch::Tensor> parameters = first_alone.parameters();
    for (const auto& parameter : second_alone.parameters()) parameters.push_back(parameter);
    optim::SGD reference(parameters, optim::SGDOptions(0.1));
    FullyShardedDataParallel first(std::make_shared<Tower>(1), options);
    FullyShardedDataParallel second(std::make_shared<Tower>(2), options);
    const auto of_first = first.template make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
    const auto of_second = second.template make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
    for (int step = 0; step < kSteps; ++step) {
      const auto all = random({ranks, 3, 5}, static_cast<uint64_t>(step));
      of_first->zero_grad();
      of_second->zero_grad();
      loss_of(first, second, all[rank], rank).backward();
      of_first->step();
      of_second->step();

      reference.zero_grad();
      torch::Tensor mean = torch::zeros({}, at::kDouble);
      for (int i = 0; i < ranks; ++i) mean = mean + loss_of(first_alone, second_alone, all[i], i) / ranks;
      mean.backward();
      reference.step();
    }
    const auto of_one = first.full_state_dict(), of_other = second.full_state_dict();
    for (const auto& item : first_alone.named_parameters()) {
      EXPECT_LT(testing::difference(of_one.at(item.key()).toTensor(), item.value()), 1e-10) << item.key();
    }
    for (const auto& item : second_alone.named_parameters()) {
      EXPECT_LT(testing::difference(of_other.at(item.key()).toTensor(), item.value()), 1e-10) << item.key();
    }
  });
}

/// Each rank would wait for the others in the model that is the first one there: for a free buffer, and at the end.
TEST(FsdpSeveral, TrainInOrdersOfTheRanksOwn) {
  expect_trains_as_one_process(3, in_small_groups(),
                               [](auto& first, auto& second, const torch::Tensor& x, int rank) {
                                 // Gradients come in the reverse order.
                                 torch::Tensor one, other;
                                 if (rank != 1) one = first.forward(x);
                                 other = second.forward(x);
                                 if (rank == 1) one = first.forward(x);
                                 return (one * other).sum() + one.square().sum();
                               });
}

/// A rank's first gradient is the second model's, and the others' is the first one's.
TEST(FsdpSeveral, ARankMayLackTheFirstGradients) {
  for (const bool gather : {false, true}) {
    Options options = in_small_groups();
    options.gather = gather;
    expect_trains_as_one_process(2, options, [](auto& first, auto& second, const torch::Tensor& x, int rank) {
      const auto inner =
          second.forward(first.forward(x, size_t{0}, size_t{2}, false), size_t{0}, size_t{4}, false);
      return first.forward(inner, size_t{2}, size_t{4}, rank == 1).square().sum();
    });
  }
}

/// Its last layers have had their gradients before the forward that ends in front of them is computed again.
TEST(FsdpSeveral, AForwardIsComputedAgainAfterGradientsOfItsModel) {
  for (const bool gather : {false, true}) {
    expect_trains_as_one_process(
        2, {.gather = gather}, [](auto& first, auto& second, const torch::Tensor& x, int /*rank*/) {
          const auto part = [&](const torch::Tensor& input, size_t end) {
            return activation_checkpoint(
                {}, [&first, end](const torch::Tensor& y) { return first.forward(y, size_t{0}, end, false); },
                input);
          };
          const auto front = part(x, 2), whole = part(2 * x, 4);
          return (front + whole + second.forward(x)).square().sum();
        });
  }
}

}  // namespace
}  // namespace lockstep::fsdp_several_test
