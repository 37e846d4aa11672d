// FULL_SHARD and SHARD_GRAD_OP by gathering, forced on one host.
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/nn/meta_device_guard.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/parallel/fsdp/testing/training.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>

namespace lockstep::fsdp_gather_test {
namespace {

using fsdp::BackwardPrefetch;
using fsdp::ShardingStrategy;
using fsdp_test::batch;
using fsdp_test::compare;
using fsdp_test::loss_of;
using fsdp_test::Pass;
using testing::random;
using testing::run_ranks;
namespace nn = torch::nn;
namespace optim = torch::optim;
using Options = FullyShardedDataParallelOptions;

void gather(Options& options) {
  options.gather = true;
}
void gather_early(Options& options) {
  options.gather = options.forward_prefetch = true;
}
void gather_late(Options& options) {
  options.gather = true;
  options.backward_prefetch = {};
  options.limit_all_gathers = false;
}
void gather_post(Options& options) {
  options.gather = true;
  options.backward_prefetch = BackwardPrefetch::BACKWARD_POST;
}
void gather_until_backward(Options& options) {
  options.gather = true;
  options.sharding_strategy = ShardingStrategy::SHARD_GRAD_OP;
}

TEST(FsdpGather, TrainsAsOneProcess) {
  compare({.adjust = gather}, 2);
}

TEST(FsdpGather, TrainsWithMoreRanksThanRows) {
  compare({.adam = true, .policy = fsdp::size_based_auto_wrap_policy(1), .adjust = gather_early}, 4);
}

TEST(FsdpGather, TrainsInGroupsWithAccumulationAndClipping) {
  for (const auto adjust : {gather, gather_until_backward}) {
    compare({.adam = true,
             .accumulate = true,
             .max_norm = 0.1,
             .policy = fsdp::module_wrap_policy<nn::LinearImpl, nn::LSTMImpl>(),
             .adjust = adjust},
            3);
  }
}

TEST(FsdpGather, TrainsWithActivationCheckpoints) {
  compare({.checkpointed = true, .policy = fsdp::size_based_auto_wrap_policy(20), .adjust = gather_early}, 2);
}

TEST(FsdpGather, TrainsWithRetainedGraphs) {
  for (const auto adjust : {gather_post, gather_until_backward}) {
    compare({.pass = Pass::kRetained, .policy = fsdp::size_based_auto_wrap_policy(20), .adjust = adjust}, 2);
  }
}

TEST(FsdpGather, TrainsWithSeveralForwardsBeforeTheBackwards) {
  for (const auto adjust : {gather_late, gather_until_backward}) {
    compare({.pass = Pass::kTwoForwards, .policy = fsdp::size_based_auto_wrap_policy(1), .adjust = adjust},
            3);
  }
}

TEST(FsdpGather, TrainsWithAGradientPenalty) {
  compare({.adam = true,
           .pass = Pass::kGradientPenalty,
           .policy = fsdp::size_based_auto_wrap_policy(20),
           .adjust = gather},
          2);
}

/// Convolutions, attention, and an embedding that the last layer shares.
struct MixedImpl : nn::Module {
  nn::Embedding embedding = register_module("embedding", nn::Embedding(11, 8));
  nn::Conv1d convolution = register_module("convolution", nn::Conv1d(nn::Conv1dOptions(8, 8, 3).padding(1)));
  nn::TransformerEncoderLayer encoder = register_module(
      "encoder",
      nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(12).dropout(0)));
  nn::GRU recurrent = register_module("recurrent", nn::GRU(8, 8));
  nn::LayerNorm norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({8})));
  torch::Tensor offsets = register_parameter("offsets", torch::zeros({1, 8}));

  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = embedding(tokens);  // time, batch, 8
    x = x + convolution(x.permute({1, 2, 0})).permute({2, 0, 1});
    x = encoder(x);
    x = norm(std::get<0>(recurrent(x)));
    // One operator that is given weights of two groups.
    return torch::matmul(x, torch::cat({embedding->weight, offsets}).t());
  }
};
TORCH_MODULE(Mixed);

Mixed make_mixed() {
  torch::manual_seed(4);
  Mixed net;
  net->to(at::kDouble);
  return net;
}

TEST(FsdpGather, TrainsConvolutionsAttentionAndTiedEmbeddings) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    Mixed net = make_mixed(), alone = make_mixed();
    Options options{.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(50)};
    gather_early(options);
    FullyShardedDataParallel model(net, options);
    const auto optimizer = model.make_optimizer<optim::AdamW>(optim::AdamWOptions(0.01));
    optim::AdamW reference(alone->parameters(), optim::AdamWOptions(0.01));
    for (int step = 0; step < 5; ++step) {
      const auto tokens =
          (random({5, 4}, static_cast<uint64_t>(step), at::kDouble).abs() * 1e6).to(at::kLong) % 11;
      const auto loss = [&](auto& of, const torch::Tensor& input) { return loss_of(of(input)); };
      optimizer->zero_grad();
      reference.zero_grad();
      loss(model, tokens.narrow(1, 2 * rank, 2)).backward();
      ((loss(alone, tokens.narrow(1, 0, 2)) + loss(alone, tokens.narrow(1, 2, 2))) / 2).backward();
      optimizer->step();
      reference.step();
    }
    const auto state = model.full_state_dict();
    for (const auto& item : alone->named_parameters()) {
      EXPECT_LT(testing::difference(state.at(item.key()).toTensor(), item.value()), 1e-10) << item.key();
    }
  });
}

/// Layers that count how many of them are whole, in forward and in backward.
struct Tower : nn::Module {
  explicit Tower(int height) {
    for (int i = 0; i < height; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), nn::Linear(16, 16)));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) {
      x = torch::tanh(layer(x));
      count();
      if (x.requires_grad()) x.register_hook([this](const torch::Tensor& /*gradient*/) { count(); });
    }
    return x;
  }
  int whole() const {
    return static_cast<int>(std::ranges::count_if(layers, [](const auto& layer) {
      return layer->weight.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() != nullptr;
    }));
  }
  /// Layers whose weights' gradients are here, and wait until they are reduced.
  int waiting() const {
    return static_cast<int>(std::ranges::count_if(layers, [](const auto& layer) {
      const torch::Tensor& gradient = layer->weight.grad();
      return gradient.defined() && !gradient.is_meta();
    }));
  }
  void count() {
    most = std::max(most, whole());
    most_waiting = std::max(most_waiting, waiting());
  }

  std::vector<nn::Linear> layers;
  int most = 0, most_waiting = 0;
};

TEST(FsdpGather, NoMoreGroupsAreWholeThanTheOptionsSay) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    struct Case {
      void (*adjust)(Options&);
      int most, after_forward;
    };
    for (const Case& of : {Case{gather, 2, 2}, Case{gather_early, 2, 2}, Case{gather_late, 3, 3},
                           Case{gather_post, 2, 2}, Case{gather_until_backward, 8, 8}}) {
      const auto net = std::make_shared<Tower>(8);
      Options options{.auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>()};
      of.adjust(options);
      FullyShardedDataParallel model(net, options);
      EXPECT_EQ(net->whole(), 0);
      const auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
      const auto x = random({3, 16}, static_cast<uint64_t>(rank), at::kFloat);
      for (int step = 0; step < 3; ++step) {
        optimizer->zero_grad();
        const auto loss = model(x).sum();
        EXPECT_EQ(net->whole(), of.after_forward);
        loss.backward();
        EXPECT_EQ(net->whole(), 0);
        optimizer->step();
      }
      EXPECT_EQ(net->most, of.most);
      const torch::NoGradGuard no_grad;
      net->most = 0;
      model(x);
      EXPECT_LE(net->most, 3);
      EXPECT_EQ(net->whole(), 0);
    }
  });
}

/// In the best of several steps, for a rank that is late lets the others' gradients wait.
TEST(FsdpGather, GradientsAreReducedWhileBackwardGoesOn) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const auto adjust : {gather, gather_until_backward}) {
      const auto net = std::make_shared<Tower>(12);
      Options options{.auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>(), .gradient_buffers = 1};
      adjust(options);
      FullyShardedDataParallel model(net, options);
      const auto x = random({3, 16}, static_cast<uint64_t>(rank), at::kFloat);
      int least = 12;
      for (int step = 0; step < 10; ++step) {
        net->most_waiting = 0;
        model(x).sum().backward();
        least = std::min(least, net->most_waiting);
      }
      EXPECT_LE(least, 1) << "of 12 layers";
    }
  });
}

TEST(FsdpGather, TakesParametersWithoutElements) {
  struct Empty : nn::Module {
    torch::Tensor rows = register_parameter("rows", torch::zeros({0, 4}));
    torch::Tensor columns = register_parameter("columns", torch::zeros({3, 0}));
  };
  struct Net : nn::Module {
    std::shared_ptr<Empty> empty = register_module("empty", std::make_shared<Empty>());
    nn::Linear last = register_module("last", nn::Linear(4, 4));
    torch::Tensor own = register_parameter("own", torch::zeros({0}));
    torch::Tensor forward(const torch::Tensor& x) {
      return last(torch::cat({x, empty->rows})) + empty->columns.sum() + own.sum();
    }
  };
  run_ranks(2, [](int /*rank*/) {
    auto world = init_process_group();
    for (const auto adjust : {gather, gather_until_backward}) {
      torch::manual_seed(5);
      const auto net = std::make_shared<Net>();
      torch::manual_seed(5);
      const auto alone = std::make_shared<Net>();
      Options options{.auto_wrap_policy = fsdp::module_wrap_policy<Empty, nn::LinearImpl>()};
      adjust(options);
      FullyShardedDataParallel model(net, options);
      const auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
      optim::SGD reference(alone->parameters(), optim::SGDOptions(0.1));
      for (int step = 0; step < 3; ++step) {
        const auto x = random({5, 4}, static_cast<uint64_t>(step), at::kFloat);
        optimizer->zero_grad();
        reference.zero_grad();
        loss_of(model(x)).backward();
        loss_of(alone->forward(x)).backward();
        optimizer->step();
        reference.step();
      }
      const auto state = model.full_state_dict();
      EXPECT_EQ(state.at("empty.columns").toTensor().sizes(), at::IntArrayRef({3, 0}));
      EXPECT_LT(testing::difference(state.at("last.weight").toTensor(), alone->last->weight), 1e-6);
    }
  });
}

TEST(FsdpGather, NoSyncKeepsWhatShardGradOpHasGathered) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const auto adjust : {gather, gather_until_backward}) {
      const auto net = std::make_shared<Tower>(4);
      Options options{.auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>()};
      adjust(options);
      FullyShardedDataParallel model(net, options);
      const auto x = random({3, 16}, static_cast<uint64_t>(rank), at::kFloat);
      {
        const auto guard = model.no_sync();
        model(x).sum().backward();
      }
      EXPECT_EQ(net->whole(), adjust == gather ? 0 : 4);
      model(x).sum().backward();
      EXPECT_EQ(net->whole(), 0);
    }
  });
}

/// Its first layer may be its last one, too.
struct Biased : nn::Module {
  explicit Biased(bool begins_as_it_ends) {
    for (int i = 0; i < 6; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), nn::Linear(5, 5)));
    }
    if (begins_as_it_ends) layers.push_back(layers.front());
    to(at::kDouble);
  }
  torch::Tensor forward(torch::Tensor x, bool lacks) {
    for (size_t i = 0; i < layers.size(); ++i) {
      const auto& bias = layers[i]->bias;
      x = torch::tanh(torch::linear(x, layers[i]->weight, lacks && i == 5 ? bias.detach() : bias));
    }
    return x;
  }
  std::vector<nn::Linear> layers;
};

/// On 3 ranks, of which one has no gradient for a bias.
void expect_trains_where_a_rank_lacks_a_gradient(const Options& options, bool begins_as_it_ends) {
  run_ranks(3, [&](int rank) {
    auto world = init_process_group({.timeout = std::chrono::seconds(60)});
    torch::manual_seed(3);
    const auto net = std::make_shared<Biased>(begins_as_it_ends);
    torch::manual_seed(3);
    const auto alone = std::make_shared<Biased>(begins_as_it_ends);
    FullyShardedDataParallel model(net, options);
    const auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
    optim::SGD reference(alone->parameters(), optim::SGDOptions(0.1));
    for (int step = 0; step < 4; ++step) {
      optimizer->zero_grad();
      reference.zero_grad();
      const auto all = random({3, 4, 5}, static_cast<uint64_t>(step));
      // With a gradient of what goes in, backward uses the first layer at its end.
      model(all[rank].clone().requires_grad_(), rank == 1).square().sum().backward();
      torch::Tensor mean = torch::zeros({}, at::kDouble);
      for (int i = 0; i < 3; ++i) mean = mean + alone->forward(all[i], i == 1).square().sum() / 3;
      mean.backward();
      optimizer->step();
      reference.step();
    }
    const auto state = model.full_state_dict();
    for (const auto& item : alone->named_parameters()) {
      EXPECT_LT(testing::difference(state.at(item.key()).toTensor(), item.value()), 1e-10) << item.key();
    }
  });
}

/// They don't wait for its reduction, which they start early, before a gather.
TEST(FsdpGather, ARankMayLackGradients) {
  expect_trains_where_a_rank_lacks_a_gradient(
      {.auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>(), .gradient_buffers = 1, .gather = true},
      false);
}

/// It keeps a group that the others have freed, and frees the same one as they when room is needed.
TEST(FsdpGather, ARankMayLackGradientsWhereBackwardComesBackToAGroup) {
  for (const auto adjust : {gather, gather_late, gather_post, gather_until_backward}) {
    Options options{.auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>()};
    adjust(options);
    expect_trains_where_a_rank_lacks_a_gradient(options, true);
  }
}

/// The shared form and the gathered ones begin, go on from each other's states, and have the same weights to the bit.
TEST(FsdpGather, AllFormsHaveTheSameNumbersAndTakeEachOthersStates) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    for (const bool half : {false, true}) {
      Options shared{.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(20)};
      if (half) {
        shared.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
      }
      Options full = shared, grad = shared;
      gather(full);
      gather_until_backward(grad);
      std::vector<StateDict> states;
      const std::vector<std::pair<Options, Options>> pairs{
          {shared, shared}, {full, full}, {grad, grad}, {shared, full}, {full, shared}};
      for (const auto& [first, second] : pairs) {
        const auto train = [&](auto& model, auto& optimizer, int from) {
          for (int step = from; step < from + 3; ++step) {
            optimizer.zero_grad();
            loss_of(model(batch(step, 3, rank)).to(at::kDouble)).backward();
            model.clip_grad_norm_(0.5);
            optimizer.step();
          }
        };
        FullyShardedDataParallel one(fsdp_test::make_net(), first), other(fsdp_test::make_net(), second);
        const auto one_optimizer = one.make_optimizer<optim::AdamW>(optim::AdamWOptions(0.01));
        const auto other_optimizer = other.make_optimizer<optim::AdamW>(optim::AdamWOptions(0.5));
        train(one, *one_optimizer, 0);
        if (half) {
          other.load_full_state_dict(one.full_state_dict());
          other.load_full_optim_state_dict(*other_optimizer, one.full_optim_state_dict(*one_optimizer));
        } else {
          other.load_sharded_state_dict({one.sharded_state_dict()});
          other.load_sharded_optim_state_dict(*other_optimizer,
                                              {one.sharded_optim_state_dict(*one_optimizer)});
        }
        train(other, *other_optimizer, 3);
        states.push_back(other.full_state_dict());
      }
      for (const auto& state : states) {
        for (const auto& [name, value] : state) {
          EXPECT_TRUE(at::equal(value.toTensor(), states[0].at(name).toTensor()))
              << name << ", half " << half;
        }
      }
    }
  });
}

TEST(FsdpGather, TakesAModelThatWasBuiltWithoutValues) {
  run_ranks(2, [](int /*rank*/) {
    auto world = init_process_group();
    torch::manual_seed(7);
    const auto expected = std::make_shared<Tower>(3);
    std::shared_ptr<Tower> net;
    {
      const MetaDeviceGuard guard;
      net = std::make_shared<Tower>(3);
    }
    torch::manual_seed(7);
    FullyShardedDataParallel model(
        net, {.auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>(), .gather = true});
    const auto x = random({3, 16}, 1, at::kFloat);
    EXPECT_TRUE(at::equal(model(x), expected->forward(x)));
  });
}

TEST(FsdpGather, SyncModuleStatesGivesRank0sAndIgnoredParametersStay) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    torch::manual_seed(rank);
    fsdp_test::Net net;
    const auto own = net->first->weight;
    const auto* memory = own.const_data_ptr();
    const auto values = own.detach().clone();
    FullyShardedDataParallel model(net,
                                   {.ignored_parameters = {own}, .sync_module_states = true, .gather = true});
    EXPECT_EQ(own.const_data_ptr(), memory);
    torch::manual_seed(0);
    const fsdp_test::Net expected;
    const auto state = model.full_state_dict();
    for (const auto& item : expected->named_parameters()) {
      const auto& wanted = item.key() == "first.weight" ? values : item.value();
      EXPECT_TRUE(at::equal(state.at(item.key()).toTensor(), wanted)) << item.key();
    }
  });
}

/// Wrappers that are members of a module that is none, with an optimizer of each.
TEST(FsdpGather, SeveralWrappersMakeAModel) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    torch::manual_seed(1);
    nn::Linear one(4, 6), other(6, 2), plain_one(4, 6), plain_other(6, 2);
    for (nn::Linear layer : {one, other, plain_one, plain_other}) layer->to(at::kDouble);
    {
      const torch::NoGradGuard no_grad;
      plain_one->weight.copy_(one->weight);
      plain_one->bias.copy_(one->bias);
      plain_other->weight.copy_(other->weight);
      plain_other->bias.copy_(other->bias);
    }
    FullyShardedDataParallel first(one, {.sync_module_states = true, .gather = true});
    FullyShardedDataParallel second(other, {.sync_module_states = true, .gather = true});
    const auto of_first = first.make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
    const auto of_second = second.make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
    std::vector<torch::Tensor> parameters = plain_one->parameters();
    for (const auto& parameter : plain_other->parameters()) parameters.push_back(parameter);
    optim::SGD reference(parameters, optim::SGDOptions(0.1));
    for (int step = 0; step < 3; ++step) {
      const auto all = random({2, 3, 4}, static_cast<uint64_t>(step));
      second(torch::tanh(first(all[rank]))).square().mean().backward();
      plain_other(torch::tanh(plain_one(all))).square().mean().backward();
      of_first->step();
      of_second->step();
      reference.step();
      of_first->zero_grad();
      of_second->zero_grad();
      reference.zero_grad();
    }
    EXPECT_LT(testing::difference(first.full_state_dict().at("weight").toTensor(), plain_one->weight), 1e-10);
    EXPECT_LT(testing::difference(second.full_state_dict().at("weight").toTensor(), plain_other->weight),
              1e-10);
  });
}

}  // namespace
}  // namespace lockstep::fsdp_gather_test
