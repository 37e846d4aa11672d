// FullyShardedDataParallel on devices, where parameters are gathered: the numbers of one process on the CPU, the order of
// streams, and memory.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/device/accelerator.h>
#include <lockstep/device/streams.h>
#include <lockstep/nn/meta_device_guard.h>
#include <lockstep/parallel/fsdp/fully_sharded_data_parallel.h>
#include <lockstep/parallel/fsdp/testing/device_training.h>
#include <lockstep/parallel/fsdp/testing/training.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>
#include <lockstep/testing/test_device.h>

namespace lockstep::fsdp_device_test {
namespace {

using fsdp::BackwardPrefetch;
using fsdp::ShardingStrategy;
using fsdp_test::batch;
using fsdp_test::expect_close;
using fsdp_test::kLayerBytes;
using fsdp_test::kLayers;
using fsdp_test::kWidth;
using fsdp_test::loss_of;
using fsdp_test::make_deep_net;
using fsdp_test::make_small_net;
using fsdp_test::own_device;
using fsdp_test::Pass;
using fsdp_test::trained;
using testing::run_ranks;
using testing::test_device;
namespace nn = torch::nn;
namespace optim = torch::optim;
using Options = FullyShardedDataParallelOptions;

/// Beside one process on the CPU.
void compare(fsdp_test::Recipe recipe, int ranks, int hosts = 1) {
  recipe.lstm = false;
  fsdp_test::compare(recipe, ranks, hosts);
}

void on_device(Options& options) {
  options.device_id = own_device();
}
void early(Options& options) {
  on_device(options);
  options.forward_prefetch = true;
  options.limit_all_gathers = false;
}
void late(Options& options) {
  on_device(options);
  options.backward_prefetch = {};
}
void post(Options& options) {
  on_device(options);
  options.backward_prefetch = BackwardPrefetch::BACKWARD_POST;
}
void until_backward(Options& options) {
  on_device(options);
  options.sharding_strategy = ShardingStrategy::SHARD_GRAD_OP;
}

TEST(FsdpOnDevice, TrainsAsOneProcessOnTheCpu) {
  compare({.adjust = on_device}, 2);
  compare({.adam = true, .policy = fsdp::size_based_auto_wrap_policy(1), .adjust = early}, 4);
}

TEST(FsdpOnDevice, TrainsOnOneRank) {
  compare({.policy = fsdp::size_based_auto_wrap_policy(20), .adjust = on_device}, 1);
}

TEST(FsdpOnDevice, TrainsInGroupsWithAccumulationAndClipping) {
  for (const auto adjust : {on_device, until_backward}) {
    compare({.adam = true,
             .accumulate = true,
             .max_norm = 0.1,
             .policy = fsdp::module_wrap_policy<nn::LinearImpl, nn::LSTMImpl>(),
             .adjust = adjust},
            3);
  }
}

TEST(FsdpOnDevice, TrainsWithActivationCheckpoints) {
  compare({.checkpointed = true, .policy = fsdp::size_based_auto_wrap_policy(20), .adjust = early}, 2);
}

TEST(FsdpOnDevice, TrainsWithGraphsUsedInOtherWays) {
  compare({.pass = Pass::kRetained, .policy = fsdp::size_based_auto_wrap_policy(20), .adjust = post}, 2);
  compare({.pass = Pass::kTwoForwards, .policy = fsdp::size_based_auto_wrap_policy(1), .adjust = late}, 2);
  compare({.pass = Pass::kGradientPenalty,
           .policy = fsdp::size_based_auto_wrap_policy(20),
           .adjust = until_backward},
          2);
}

void over_all_hosts(Options& options) {
  on_device(options);
  options.sharding_strategy = ShardingStrategy::FULL_SHARD;
}

TEST(FsdpOnDevice, TrainsOverHosts) {
  if (!testing::has_wire()) GTEST_SKIP() << "needs UCX";
  // HYBRID_SHARD: each host has all rows.
  compare({.max_norm = 0.1, .policy = fsdp::size_based_auto_wrap_policy(20), .adjust = on_device}, 4, 2);
  compare({.adam = true, .policy = fsdp::size_based_auto_wrap_policy(20), .adjust = over_all_hosts}, 3, 2);
}

TEST(FsdpOnDevice, MixedPrecisionIsThatOfTheCpu) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    Options options{.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(10),
                    .mixed_precision = {.param_dtype = at::kBFloat16,
                                        .reduce_dtype = at::kFloat,
                                        .buffer_dtype = at::kBFloat16},
                    .gather = true};
    const auto expected = trained(options, rank);
    options.gather = false;
    options.device_id = own_device();
    expect_close(trained(options, rank), expected, testing::test_device_is_simulated() ? 0 : 1e-2);
  });
}

void from_files(Options& options) {
  on_device(options);
  options.cpu_offload.offload_params = true;
}

TEST(FsdpOnDevice, RowsMayLieInFilesOfTheHost) {
  compare({.adam = true,
           .accumulate = true,
           .max_norm = 0.1,
           .policy = fsdp::size_based_auto_wrap_policy(20),
           .adjust = from_files},
          2);
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    Options options{.mixed_precision = {.param_dtype = at::kBFloat16,
                                        .reduce_dtype = at::kFloat,
                                        .buffer_dtype = at::kBFloat16},
                    .gather = true};
    const auto expected = trained(options, rank);
    options = {.mixed_precision = options.mixed_precision,
               .device_id = own_device(),
               .cpu_offload = {.offload_params = true}};
    FullyShardedDataParallel model(make_small_net(), options);
    for (const auto& parameter : model.parameters()) EXPECT_TRUE(parameter.is_cpu());
    expect_close(trained(options, rank), expected, testing::test_device_is_simulated() ? 0 : 1e-2);
  });
}

TEST(FsdpOnDevice, StatesGoFromOneFormToTheOthers) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const std::vector<Options> forms{
        {}, {.gather = true}, {.device_id = own_device()}, {.sync_module_states = true}};
    for (const Options& from : forms) {
      const auto source =
          std::make_unique<FullyShardedDataParallel<nn::SequentialImpl>>(make_small_net(), from);
      const auto of_source = source->make_optimizer<optim::AdamW>(optim::AdamWOptions(0.01));
      const auto full = trained(source, rank, *of_source);
      const auto sharded = source->sharded_state_dict();
      const auto full_optim = source->full_optim_state_dict(*of_source);
      const auto sharded_optim = source->sharded_optim_state_dict(*of_source);
      const auto further = trained(source, rank, *of_source);
      for (const Options& to : forms) {
        for (const bool whole : {true, false}) {
          const auto target =
              std::make_unique<FullyShardedDataParallel<nn::SequentialImpl>>(make_small_net(), to);
          const auto of_target = target->make_optimizer<optim::AdamW>(optim::AdamWOptions(0.01));
          target->load_full_state_dict(full);
          if (whole) {
            target->load_full_optim_state_dict(*of_target, full_optim);
          } else {
            target->load_sharded_state_dict({sharded});
            target->load_sharded_optim_state_dict(*of_target, {sharded_optim});
          }
          expect_close(target->full_state_dict(), full, 0);
          expect_close(trained(target, rank, *of_target), further, 1e-6);
        }
      }
    }
  });
}

TEST(FsdpOnDevice, ModulesOnTheMetaDeviceGetTheirValuesThere) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    nn::Sequential net;
    {
      const MetaDeviceGuard meta;
      net = make_small_net();
    }
    torch::manual_seed(2);
    const Options options{.device_id = own_device()};
    const auto model = std::make_unique<FullyShardedDataParallel<nn::SequentialImpl>>(net, options);
    for (const auto& buffer : net->buffers()) EXPECT_EQ(buffer.device(), own_device());
    for (const auto& parameter : model->parameters()) EXPECT_EQ(parameter.device(), own_device());
    const auto optimizer = model->make_optimizer<optim::AdamW>(optim::AdamWOptions(0.01));
    expect_close(trained(model, rank, *optimizer), trained(options, rank), 1e-6);
  });
}

TEST(FsdpOnDevice, SummonedParametersAreWholeOnTheDevice) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    auto net = make_small_net();
    net->to(own_device());  // without device_id it is where its parameters are
    FullyShardedDataParallel model(net, {});
    EXPECT_TRUE(model.gathers());
    const auto expected = make_small_net()->parameters();
    model.summon_full_params([&] {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_EQ(net->parameters()[i].device(), own_device());
        EXPECT_TRUE(at::equal(net->parameters()[i].cpu(), expected[i]));
        net->parameters()[i].add_(1);
      }
    });
    const auto state = model.full_state_dict();
    EXPECT_TRUE(at::equal(state.at("0.weight").toTensor(), expected[0] + 1));
  });
}

/// The most that a step takes on the device besides what lies there before it.
int64_t step_memory(Options options) {
  options.device_id = own_device();
  options.auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>();
  FullyShardedDataParallel model(make_deep_net(), options);
  const auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(0.1));
  const auto x = testing::random({4, kWidth}, 1, at::kFloat).to(own_device());
  int64_t most = 0;
  for (int step = 0; step < 3; ++step) {
    optimizer->zero_grad();
    synchronize(own_device());
    const int64_t before = (reset_peak_device_memory(own_device()), *peak_device_memory(own_device()));
    model.forward(x).sum().backward();
    most = std::max(most, *peak_device_memory(own_device()) - before);
    optimizer->step();
  }
  return most;
}

TEST(FsdpOnDevice, FewGroupsAreWholeAtOnce) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    // Two groups are gathered at once, a third is freed meanwhile; gradients: a whole one, and every rank's averages.
    const int64_t averages = kLayers * kLayerBytes / 2;
    const int64_t limited = step_memory({}) - averages;
    EXPECT_LT(limited, 5 * kLayerBytes);
    EXPECT_GE(step_memory({.sharding_strategy = ShardingStrategy::SHARD_GRAD_OP}), kLayers * kLayerBytes);
  });
}

/// Its layers compute on two streams in turn.
struct OnTwoStreamsImpl : nn::Module {
  nn::Linear first = register_module("first", nn::Linear(5, 64));
  nn::Linear second = register_module("second", nn::Linear(64, 64));
  nn::Linear third = register_module("third", nn::Linear(64, 2));

  torch::Tensor on(const c10::Stream& stream, nn::Linear& layer, const torch::Tensor& x) {
    const auto before = testing::current_stream(x.device());
    order_streams(before, stream);
    torch::Tensor y;
    {
      const c10::StreamGuard guard(stream);
      y = torch::tanh(layer(x));
    }
    order_streams(stream, before);
    x.record_stream(stream);
    y.record_stream(before);
    return y;
  }

  torch::Tensor forward(const torch::Tensor& x) {
    if (x.is_cpu()) return third(torch::tanh(second(torch::tanh(first(x)))));
    if (!beside) beside = testing::other_stream(x.device());
    return third(on(*beside, second, torch::tanh(first(x))));
  }

  std::optional<c10::Stream> beside;
};
TORCH_MODULE(OnTwoStreams);

OnTwoStreams make_on_two_streams() {
  torch::manual_seed(5);
  OnTwoStreams net;
  net->to(at::kDouble);
  return net;
}

TEST(FsdpOnDevice, ModulesMayUseStreamsOfTheirOwn) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto train = [&](std::optional<c10::Device> device) {
      std::optional<c10::StreamGuard> guard;
      if (device) guard.emplace(testing::other_stream(*device));
      FullyShardedDataParallel model(make_on_two_streams(),
                                     {.auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>(),
                                      .device_id = device,
                                      .gather = true});
      const auto optimizer = model.make_optimizer<optim::SGD>(optim::SGDOptions(0.05).momentum(0.9));
      for (int step = 0; step < 10; ++step) {
        optimizer->zero_grad();
        loss_of(model(batch(step, 2, rank))).backward();
        optimizer->step();
      }
      return model.full_state_dict();
    };
    expect_close(train(own_device()), train({}));
  });
}

/// Of two ranks the second one has no element of any parameter.
TEST(FsdpOnDevice, ARankWithoutRowsClipsWithTheOthers) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    for (const double norm_type : {2.0, std::numeric_limits<double>::infinity(), 0.0}) {
      FullyShardedDataParallel model(nn::Linear(10, 1), {.device_id = own_device()});
      model(torch::ones({4, 10})).sum().backward();
      const double norm = model.clip_grad_norm_(0.5, norm_type).item<double>();
      EXPECT_NEAR(norm, norm_type == 0 ? 2 : norm_type == 2 ? std::sqrt(11 * 16.0) : 4, 1e-5);
    }
  });
}

TEST(FsdpOnDevice, WhatIsIgnoredStaysWhereItIs) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    auto net = make_small_net();
    net[1]->as<nn::BatchNorm1d>()->to(own_device());
    const Options options{.ignored_modules = {net->ptr(1)}};
    {
      FullyShardedDataParallel model(net, options);
      EXPECT_FALSE(model.gathers());
      EXPECT_EQ(net->buffers()[0].device(), own_device());
    }
    auto other = make_small_net();
    FullyShardedDataParallel model(other, {.ignored_modules = {other->ptr(1)}, .device_id = own_device()});
    EXPECT_TRUE(model.gathers());
    for (const auto& buffer : other->buffers()) EXPECT_TRUE(buffer.is_cpu());
  });
}

TEST(FsdpOnDevice, DeviceIdMovesAModuleToTheCpu) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const bool sync : {false, true}) {
      auto net = make_small_net();
      net->to(test_device());
      const auto expected = trained(Options(), rank);
      const auto model = std::make_unique<FullyShardedDataParallel<nn::SequentialImpl>>(
          net, Options{.device_id = at::kCPU, .sync_module_states = sync});
      EXPECT_FALSE(model->gathers());
      for (const auto& tensors : {net->parameters(), net->buffers()}) {
        for (const auto& tensor : tensors) EXPECT_TRUE(tensor.is_cpu());
      }
      const auto optimizer = model->make_optimizer<optim::AdamW>(optim::AdamWOptions(0.01));
      expect_close(trained(model, rank, *optimizer), expected, 0);
    }
  });
}

}  // namespace
}  // namespace lockstep::fsdp_device_test
