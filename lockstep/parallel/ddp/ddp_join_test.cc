// DistributedDataParallel inside of a Join.
#include <cstdint>
#include <gmock/gmock.h>
#include <memory>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/nn/activation_checkpoint.h>
#include <lockstep/nn/join.h>
#include <lockstep/nn/testing/fixtures.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::ddp_join_test {
namespace {

namespace nn = torch::nn;
using testing::Branching;
using testing::close;
using testing::data;
using ::testing::HasSubstr;
using testing::make_double;
using testing::mean_over_ranks;
using testing::message_of;
using testing::Net;
using testing::run_ranks;

TEST(DdpOptions, SkippingBucketsIsRefusedInsideAJoin) {
  auto world = init_process_group({.rank = 0, .world_size = 1});
  DistributedDataParallel model(make_double<Branching>(),
                                {.find_unused_parameters = true, .skip_all_reduce_unused_params = true});
  EXPECT_THAT(message_of<c10::ValueError>([&] { auto join = model.join(); }),
              HasSubstr("skip_all_reduce_unused_params does not go together with join()"));
  auto disabled = model.join({.enable = false});
}

TEST(DdpOptions, DelayedParametersAreRefusedInsideAJoin) {
  auto world = init_process_group({.rank = 0, .world_size = 1});
  nn::Linear net(2, 2);
  DistributedDataParallel model(net, {.delay_all_reduce_named_params = {{"weight", net->weight}},
                                      .param_to_hook_all_reduce = net->bias});
  EXPECT_THAT(message_of<c10::ValueError>([&] { auto join = model.join(); }),
              HasSubstr("delay_all_reduce_named_params does not go together with join()"));
  auto disabled = model.join({.enable = false});
}

TEST(DdpOptions, UnevenInputsInsideJoin) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    for (const bool by_initial : {true, false}) {
      auto net = make_double<Net>();
      DistributedDataParallel model(net, {.bucket_cap_mb = 1e-4});
      const int batches = 2 + 2 * rank;
      {
        auto join = model.join({.divide_by_initial_world_size = by_initial});
        for (int step = 0; step < batches; ++step) {
          int64_t training = 0;
          for (int other = 0; other < 3; ++other) training += step < 2 + 2 * other ? 1 : 0;
          const auto x = data(7, {5, 6}, step);  // the same on all ranks that still train
          net->zero_grad();
          auto output = model(x);
          const auto expected = torch::autograd::grad({output.square().sum()}, {net->last->weight}, {}, true);
          output.square().sum().backward();
          const double share = by_initial ? static_cast<double>(training) / 3 : 1.0;
          EXPECT_TRUE(close(net->last->weight.grad(), expected[0] * share, 1e-9))
              << by_initial << ' ' << step;
          torch::NoGradGuard no_grad;
          for (auto& parameter : net->parameters()) parameter.sub_(0.1 * parameter.grad());
        }
      }
      for (const auto& parameter : net->parameters()) {
        EXPECT_TRUE(close(mean_over_ranks(parameter), parameter)) << "the last joiner's model is everywhere";
      }
      EXPECT_TRUE(close(mean_over_ranks(net->norm->running_mean), net->norm->running_mean));
    }
    DistributedDataParallel model(make_double<Net>());
    const auto text = message_of<c10::Error>([&] {
      auto join = model.join({.throw_on_early_termination = true});
      for (int step = 0; step < 2 + rank; ++step) model(data(rank, {5, 6})).sum().backward();
      join.finish();
    });
    EXPECT_THAT(text, HasSubstr("exhausted"));
  });
}

TEST(DdpOptions, AModelThatBackwardComputesAgainIsShadowedOnce) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const auto train = [&](bool checkpointed) {
      torch::manual_seed(1);
      auto net = make_double<Net>();  // its buffers are synchronised
      DistributedDataParallel model(net, {.bucket_cap_mb = 1e-4});
      const auto body = [&](const torch::Tensor& x) { return model(x); };
      auto join = model.join();
      for (int step = 0; step < 3 + 2 * rank; ++step) {
        net->zero_grad();
        const auto x = data(rank, {5, 6}, step);
        const auto output = checkpointed ? activation_checkpoint({}, body, x) : body(x);
        output.square().sum().backward();
        torch::NoGradGuard no_grad;
        for (auto& parameter : net->parameters()) parameter.sub_(0.1 * parameter.grad());
      }
      join.finish();
      return net->parameters();
    };
    const auto expected = train(false), actual = train(true);
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(torch::equal(actual[i], expected[i])) << i;
  });
}

TEST(DdpOptions, AStaticGraphIsLearnedInAJoinWithoutInputs) {
  struct Twice : nn::Module {
    Twice() { register_module("used", used), register_module("unused", unused); }
    torch::Tensor forward(const torch::Tensor& x) { return used(x) + used(2 * x); }
    nn::Linear used{1, 1}, unused{1, 1};
  };
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = std::make_shared<Twice>();
    DistributedDataParallel<Twice> model(net, {.static_graph = true});
    for (int epoch = 0; epoch < 3; ++epoch) {
      const int batches = rank == 0 && epoch == 0 ? 0 : 2;
      auto join = model.join();
      for (int step = 0; step < batches; ++step) {
        net->zero_grad();
        model(torch::ones({1, 1})).sum().backward();
        const float training = epoch == 0 ? 1 : 2;
        EXPECT_EQ(net->used->weight.grad().item<float>(), 3 * training / 2) << epoch << ' ' << step;
        EXPECT_EQ(net->used->bias.grad().item<float>(), 2 * training / 2) << epoch << ' ' << step;
        EXPECT_FALSE(net->unused->weight.grad().defined()) << epoch << ' ' << step;
      }
      join.finish();
      net->zero_grad();
    }
  });
}

TEST(DdpOptions, AllModelsOfAJoinDivideByTheRanksThatTrain) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    nn::Linear first(1, 1), second(1, 1);
    DistributedDataParallel a(first), b(second);
    {
      Join join({&a, &b}, {.divide_by_initial_world_size = false});
      for (int step = 0; step < 2 + 2 * rank; ++step) {
        for (auto* model : {&a, &b}) {
          model->zero_grad();
          (*model)(torch::ones({1, 1})).sum().backward();
        }
        EXPECT_EQ(first->bias.grad().item<float>(), 1) << step;
        EXPECT_EQ(second->bias.grad().item<float>(), 1) << step;
      }
    }
    EXPECT_EQ(first->bias.grad().item<float>(), 1) << "the last shadowed step's";
    EXPECT_EQ(second->bias.grad().item<float>(), 1) << "the last shadowed step's";
    a.zero_grad();
    a(torch::ones({1, 1}) * (2 + 2 * rank)).sum().backward();
    EXPECT_EQ(first->weight.grad().item<float>(), 3) << "after the Join by all ranks again";
  });
}

}  // namespace
}  // namespace lockstep::ddp_join_test
