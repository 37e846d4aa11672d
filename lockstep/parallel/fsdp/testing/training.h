#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/nn/activation_checkpoint.h>
#include <lockstep/nn/grad_norm.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/testing/expect_equal.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

// A model in shards, trained beside one process that has all ranks' data.
namespace lockstep::fsdp_test {

namespace nn = torch::nn;
namespace optim = torch::optim;

constexpr int kSteps = 20;

/// Layers of sizes that no number of ranks divides, a frozen weight, a tied one, an unused one, and a number. Without an LSTM,
/// which the simulated device lacks, there is a linear layer in its place.
struct NetImpl : nn::Module {
  explicit NetImpl(bool has_lstm = true) {
    if (has_lstm) {
      recurrent = register_module("recurrent", nn::LSTM(nn::LSTMOptions(7, 3).batch_first(true)));
    } else {
      not_recurrent = register_module("not_recurrent", nn::Linear(7, 3));
    }
  }

  nn::Linear first = register_module("first", nn::Linear(5, 7));
  nn::LSTM recurrent{nullptr};
  nn::Linear not_recurrent{nullptr};
  nn::Linear last = register_module("last", nn::Linear(3, 2));
  nn::Linear unused = register_module("unused", nn::Linear(2, 2));
  torch::Tensor scale = register_parameter("scale", torch::ones({}));
  torch::Tensor frozen = register_parameter("frozen", torch::full({3}, 0.5), /*requires_grad=*/false);
  torch::Tensor tied = register_parameter("tied", last->weight);
  bool checkpointed = false;

  torch::Tensor forward(const torch::Tensor& x) {
    const auto front = [this](const torch::Tensor& input) { return torch::tanh(first(input)); };
    const auto hidden = checkpointed ? activation_checkpoint({}, front, x) : front(x);
    const auto y = (recurrent ? std::get<0>(recurrent(hidden)) : torch::tanh(not_recurrent(hidden))) + frozen;
    return scale * (last(y) + torch::matmul(y, tied.t()));
  }
};
TORCH_MODULE(Net);

inline Net make_net(bool has_lstm = true) {
  torch::manual_seed(4);
  Net net(has_lstm);
  net->to(at::kDouble);
  return net;
}

/// What all ranks train on in a step, and rank's part of it.
inline torch::Tensor batch(int step, int ranks, std::optional<int> rank = {}) {
  const auto all = testing::random({2 * ranks, 4, 5}, static_cast<uint64_t>(100 + step));
  return rank ? all.narrow(0, 2 * *rank, 2) : all;
}

inline torch::Tensor loss_of(const torch::Tensor& output) {
  return output.square().mean() + output.mean();
}

/// What a step does between zero_grad() and the optimizer.
enum class Pass { kOnce, kRetained, kTwoForwards, kGradientPenalty };

template <class Model>
void compute_gradients(Model& model, const torch::Tensor& x, Pass pass) {
  switch (pass) {
    case Pass::kOnce:
      loss_of(model(x)).backward();
      break;
    case Pass::kRetained: {
      const auto loss = loss_of(model(x));
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
      break;
    }
    case Pass::kTwoForwards: {
      const auto first = loss_of(model(x)), second = loss_of(model(2 * x));
      first.backward();
      second.backward();
      break;
    }
    case Pass::kGradientPenalty: {
      const auto input = x.detach().clone().requires_grad_();
      const auto output = model(input);
      const auto slope = torch::autograd::grad({output.sum()}, {input}, {}, /*retain_graph=*/true,
                                               /*create_graph=*/true)[0];
      (loss_of(output) + slope.square().mean()).backward();
      break;
    }
  }
}

struct Recipe {
  bool adam = false;
  Pass pass = Pass::kOnce;
  bool accumulate = false;  // two batches a step
  double max_norm = 0;      // 0: none
  bool checkpointed = false;
  bool lstm = true;
  fsdp::AutoWrapPolicy policy = {};
  std::function<void(FullyShardedDataParallelOptions&)> adjust = [](FullyShardedDataParallelOptions&) {};
};

template <class Model, class Optimizer, class Clip>
void train(Model& model, Optimizer& optimizer, const Recipe& recipe, int ranks, std::optional<int> rank,
           const std::function<void(const std::function<void()>&)>& without_sync, const Clip& clip) {
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    if (recipe.accumulate) without_sync([&] { loss_of(model(batch(1000 + step, ranks, rank))).backward(); });
    compute_gradients(model, batch(step, ranks, rank), recipe.pass);
    if (recipe.max_norm > 0) clip(recipe.max_norm);
    optimizer.step();
  }
}

inline StateDict train_alone(const Recipe& recipe, int ranks) {
  Net net = make_net(recipe.lstm);
  std::vector<torch::Tensor> parameters;
  for (const auto& item : net->named_parameters()) {
    if (item.key() != "tied") parameters.push_back(item.value());  // it is there as "last.weight", too
  }
  std::unique_ptr<optim::Optimizer> optimizer;
  if (recipe.adam) {
    optimizer = std::make_unique<optim::AdamW>(parameters, optim::AdamWOptions(0.01));
  } else {
    optimizer = std::make_unique<optim::SGD>(parameters, optim::SGDOptions(0.05).momentum(0.9));
  }
  train(
      net, *optimizer, recipe, ranks, {}, [](const auto& action) { action(); },
      [&](double norm) { lockstep::clip_grad_norm_(net->parameters(), norm); });
  StateDict state;
  for (const auto& item : net->named_parameters()) state.emplace(item.key(), item.value());
  return state;
}

inline fsdp::ShardingStrategy strategy_over(int hosts) {
  return hosts > 1 ? fsdp::ShardingStrategy::HYBRID_SHARD : fsdp::ShardingStrategy::FULL_SHARD;
}

/// Trains in shards and compares with one process; all ranks see the same weights, bit for bit.
inline void compare(const Recipe& recipe, int ranks, int hosts = 1) {
  const auto train_sharded = [&](int rank) {
    auto world = init_process_group();
    Net net = make_net(recipe.lstm);
    net->checkpointed = recipe.checkpointed;
    FullyShardedDataParallelOptions options{.sharding_strategy = strategy_over(hosts),
                                            .auto_wrap_policy = recipe.policy};
    recipe.adjust(options);
    FullyShardedDataParallel model(net, options);
    const auto run = [&](auto& optimizer) {
      train(
          model, optimizer, recipe, ranks, rank,
          [&](const auto& action) {
            const auto guard = model.no_sync();
            action();
          },
          [&](double norm) { model.clip_grad_norm_(norm); });
    };
    if (recipe.adam) {
      run(*model.make_optimizer<optim::AdamW>(optim::AdamWOptions(0.01)));
    } else {
      run(*model.make_optimizer<optim::SGD>(optim::SGDOptions(0.05).momentum(0.9)));
    }
    const auto state = model.full_state_dict();
    testing::expect_close(state, train_alone(recipe, ranks));
    for (const auto& [name, value] : state) EXPECT_TRUE(testing::same_everywhere(value.toTensor())) << name;
  };
  testing::run_ranks(ranks, train_sharded, {.hosts = hosts});
}

}  // namespace lockstep::fsdp_test
