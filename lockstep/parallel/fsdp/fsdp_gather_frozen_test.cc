// Groups with frozen and trained parameters, which backward uses again after the gradients of the trained ones.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::fsdp_gather_frozen_test {
namespace {

using fsdp::BackwardPrefetch;
using fsdp::ShardingStrategy;
using testing::random;
using testing::run_ranks;
namespace nn = torch::nn;
namespace optim = torch::optim;
using Options = FullyShardedDataParallelOptions;

/// A frozen layer below a trained one: the gradient of what goes in needs the frozen one last.
struct AdaptedImpl : nn::Module {
  AdaptedImpl() {
    for (auto& parameter : base->parameters()) parameter.set_requires_grad(false);
  }
  torch::Tensor forward(const torch::Tensor& x, bool lacks) {
    const auto bias = lacks ? adapter->bias.detach() : adapter->bias;
    return torch::linear(torch::tanh(base(x)), adapter->weight, bias);
  }
  nn::Linear base = register_module("base", nn::Linear(6, 6));
  nn::Linear adapter = register_module("adapter", nn::Linear(6, 6));
};
TORCH_MODULE(Adapted);

/// `lacking`: the layer of which a rank lacks a gradient; -1: none.
struct Tower : nn::Module {
  Tower() {
    for (int i = 0; i < 4; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), Adapted()));
    }
    to(at::kDouble);
  }
  torch::Tensor forward(torch::Tensor x, int lacking) {
    for (int i = 0; i < static_cast<int>(layers.size()); ++i) {
      x = torch::tanh(layers[static_cast<size_t>(i)](x, i == lacking));
    }
    return x;
  }
  std::vector<Adapted> layers;
};

std::shared_ptr<Tower> make_tower() {
  torch::manual_seed(9);
  return std::make_shared<Tower>();
}

/// Trains on 3 ranks, where rank 1 lacks a gradient, and beside that in one process.
void expect_trains_as_one_process(const std::function<void(Options&)>& adjust, int lacking) {
  run_ranks(3, [&](int rank) {
    auto world = init_process_group();
    const auto alone = make_tower();
    Options options{.auto_wrap_policy = fsdp::module_wrap_policy<AdaptedImpl>(), .gather = true};
    adjust(options);
    FullyShardedDataParallel model(make_tower(), options);
    const auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
    optim::SGD reference(alone->parameters(), optim::SGDOptions(0.1));
    for (int step = 0; step < 4; ++step) {
      optimizer->zero_grad();
      reference.zero_grad();
      const auto all = random({3, 4, 6}, static_cast<uint64_t>(step));
      // What goes in wants a gradient, too, so that the lowest frozen layer is used in backward as well.
      const auto input = all[rank].clone().requires_grad_();
      model(input, rank == 1 ? lacking : -1).square().sum().backward();
      torch::Tensor mean = torch::zeros({}, at::kDouble);
      std::vector<torch::Tensor> inputs;
      for (int i = 0; i < 3; ++i) {
        inputs.push_back(all[i].clone().requires_grad_());
        mean = mean + alone->forward(inputs.back(), i == 1 ? lacking : -1).square().sum() / 3;
      }
      mean.backward();
      EXPECT_LT(testing::difference(input.grad() / 3, inputs[static_cast<size_t>(rank)].grad()), 1e-10);
      optimizer->step();
      reference.step();
    }
    const auto state = model.full_state_dict();
    for (const auto& item : alone->named_parameters()) {
      EXPECT_LT(testing::difference(state.at(item.key()).toTensor(), item.value()), 1e-10) << item.key();
    }
  });
}

void early(Options& options) {
  options.forward_prefetch = true;
}
void post(Options& options) {
  options.backward_prefetch = BackwardPrefetch::BACKWARD_POST;
}
void until_backward(Options& options) {
  options.sharding_strategy = ShardingStrategy::SHARD_GRAD_OP;
}

TEST(FsdpGatherFrozen, GroupsThatAreUsedAgainTrainAsOneProcess) {
  for (const auto adjust : {early, post, until_backward}) expect_trains_as_one_process(adjust, -1);
}

// The lowest group above all: a rank that gathered it again would wait for ranks whose backward is at its end.
TEST(FsdpGatherFrozen, ARankMayLackTheirGradients) {
  for (const int lacking : {0, 2}) expect_trains_as_one_process(early, lacking);
  expect_trains_as_one_process(post, 0);
}

}  // namespace
}  // namespace lockstep::fsdp_gather_frozen_test
