#include <cmath>
#include <gmock/gmock.h>
#include <optional>
#include <thread>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/nn/testing/fixtures.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/parallel/ddp/reducer/reducer.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::ddp_test {
namespace {

namespace nn = torch::nn;
using testing::Branching;
using testing::data;
using testing::gradients;
using ::testing::HasSubstr;
using testing::mean_over_ranks;
using testing::Net;
using ::testing::Not;
using testing::run_ranks;

std::string message_of(const std::function<void()>& action) {
  return testing::message_of<c10::Error>(action);
}

TEST(DistributedDataParallel, StartsFromRankZeroAndAveragesGradientsInPlace) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    torch::manual_seed(rank);
    auto net = std::make_shared<Net>();
    net->to(at::kDouble);
    net->norm->running_mean.fill_(rank);
    // The same model without DDP, from rank 0's state.
    DistributedDataParallel<Net> model(net, {.bucket_cap_mb = 1e-4, .first_bucket_cap_mb = 1e-5});
    EXPECT_EQ(net->norm->running_mean.sum().item<double>(), 0);
    auto plain = std::make_shared<Net>();
    plain->to(at::kDouble);
    {
      torch::NoGradGuard no_grad;
      for (size_t i = 0; i < net->parameters().size(); ++i)
        plain->parameters()[i].copy_(net->parameters()[i]);
    }
    for (int step = 0; step < 4; ++step) {
      const auto x = data(rank, {7, 6}, step);
      plain->zero_grad();
      if (step == 2) {
        for (auto& parameter : net->parameters())
          parameter.mutable_grad().zero_();  // in place, as zero_grad(false)
      } else {
        net->zero_grad();
      }
      plain->forward(x).square().sum().backward();
      model(x).square().sum().backward();
      const auto expected = gradients(*plain);
      const auto actual = gradients(*net);
      ASSERT_EQ(actual.size(), expected.size());
      for (size_t i = 0; i < actual.size(); ++i) {
        ASSERT_TRUE(at::allclose(actual[i], mean_over_ranks(expected[i]), 1e-12, 1e-12)) << step << ' ' << i;
      }
      const size_t buckets = model.reducer().bucket_bytes().size();
      EXPECT_EQ(buckets > 1, step > 0) << "small caps make several buckets once the order is known";
    }
    EXPECT_THAT(model.named_parameters().keys(), ::testing::Contains("module.first.weight"));
  });
}

TEST(DistributedDataParallel, TheMeanOfLargeGradientsIsFinite) {
  run_ranks(3, [](int) {
    auto world = init_process_group();
    auto net = std::make_shared<nn::LinearImpl>(nn::LinearOptions(3000, 1).bias(false));
    DistributedDataParallel<nn::LinearImpl> model(net);
    const auto x = torch::full({1, 3000}, std::ldexp(1.0, 127));  // the sum of two is infinite
    model(x).sum().backward();
    EXPECT_TRUE(at::equal(net->weight.grad(), x));
  });
}

TEST(DistributedDataParallel, WorksAloneToo) {
  auto world = init_process_group({.rank = 0, .world_size = 1});
  auto net = std::make_shared<Net>();
  DistributedDataParallel<Net> model(net);
  torch::optim::Adam optimizer(model.parameters());
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    model(torch::randn({4, 6})).sum().backward();
    optimizer.step();
  }
}

TEST(DistributedDataParallel, NoSyncAccumulatesLocallyAndTheNextBackwardReducesTheSum) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = std::make_shared<nn::LinearImpl>(4, 3);
    net->to(at::kDouble);
    DistributedDataParallel<nn::LinearImpl> model(net);
    for (int repetition = 0; repetition < 3; ++repetition) {
      net->zero_grad();
      torch::Tensor expected = torch::zeros({3, 4}, at::kDouble);
      for (int micro = 0; micro < 3; ++micro) {
        const auto x = data(rank, {5, 4}, 10 * repetition + micro);
        const auto seen = x.sum(0).expand({3, 4});
        expected = expected + seen;
        if (micro < 2) {
          auto guard = model.no_sync();
          model(x).sum().backward();
          EXPECT_TRUE(at::allclose(net->weight.grad(), expected)) << "local sum";
        } else {
          model(x).sum().backward();
        }
      }
      EXPECT_TRUE(at::allclose(net->weight.grad(), mean_over_ranks(expected), 1e-12, 1e-12));
    }
  });
}

TEST(DistributedDataParallel, ScopesOfNoSyncMoveAndEndInAnyOrder) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    using Model = DistributedDataParallel<nn::LinearImpl>;
    auto net = std::make_shared<nn::LinearImpl>(4, 3);
    net->to(at::kDouble);
    Model model(net);
    const auto x = data(rank, {5, 4}, 1);
    const auto own = x.sum(0).expand({3, 4});
    const auto is_synchronised = [&] {
      net->zero_grad();
      model(x).sum().backward();
      const bool is_own = at::allclose(net->weight.grad(), own);
      EXPECT_EQ(!is_own, at::allclose(net->weight.grad(), mean_over_ranks(own), 1e-12, 1e-12));
      return !is_own;
    };
    EXPECT_TRUE(is_synchronised());
    std::optional<Model::NoSync> guard;
    for (int micro = 0; micro < 2; ++micro) {
      guard = model.no_sync();  // the second time over one that lives
      EXPECT_FALSE(is_synchronised());
    }
    std::optional<Model::NoSync> moved(std::move(guard));
    guard.reset();
    EXPECT_FALSE(is_synchronised()) << "the scope went along";
    std::optional later(model.no_sync());
    moved.reset();
    EXPECT_FALSE(is_synchronised()) << "the later one still lives";
    later.reset();
    EXPECT_TRUE(is_synchronised());
  });
}

TEST(DistributedDataParallel, SeveralBackwardPassesPerStepAreEachReduced) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = std::make_shared<nn::LinearImpl>(4, 3);
    net->to(at::kDouble);
    DistributedDataParallel<nn::LinearImpl> model(net);
    const auto a = data(rank, {5, 4}, 1);
    const auto b = data(rank, {6, 4}, 2);
    const auto expected = mean_over_ranks((a.sum(0) + b.sum(0)).expand({3, 4}));
    for (int repetition = 0; repetition < 3; ++repetition) {
      net->zero_grad();
      model(a).sum().backward();
      model(b).sum().backward();
      ASSERT_TRUE(at::allclose(net->weight.grad(), expected, 1e-12, 1e-12)) << "forward, backward, twice";
      net->zero_grad();
      const auto first = model(a).sum();
      const auto second = model(b).sum();
      first.backward();
      second.backward();
      ASSERT_TRUE(at::allclose(net->weight.grad(), expected, 1e-12, 1e-12)) << "two forwards, two backwards";
      net->zero_grad();
      (model(a).sum() + model(b).sum()).backward();
      ASSERT_TRUE(at::allclose(net->weight.grad(), expected, 1e-12, 1e-12)) << "two forwards, one backward";
      net->zero_grad();
      const auto loss = model(a).sum();
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
      ASSERT_TRUE(
          at::allclose(net->weight.grad(), mean_over_ranks(2 * a.sum(0).expand({3, 4})), 1e-12, 1e-12))
          << "one graph, twice";
    }
  });
}

TEST(DistributedDataParallel, AnySignatureSharedAndFrozenParameters) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = std::make_shared<Branching>();
    net->to(at::kDouble);
    DistributedDataParallel<Branching> model(net);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      const auto x = data(rank, {5, 4}, step);
      auto [output, hidden] = model(x, true, 2.0);
      (output.sum() + hidden.sum()).backward();
      const auto weight = net->common->weight.detach().clone().requires_grad_();
      const auto y =
          nn::functional::linear(x, weight, net->common->bias.detach()) * 2.0 + torch::matmul(x, weight.t());
      (nn::functional::linear(y, net->extra->weight.detach(), net->extra->bias.detach()).sum() + y.sum())
          .backward();
      ASSERT_TRUE(at::allclose(net->tied.grad(), mean_over_ranks(weight.grad()), 1e-12, 1e-12));
      ASSERT_FALSE(net->frozen.grad().defined());
    }
  });
}

TEST(DistributedDataParallel, UnusedParametersAreNamedAtTheNextForward) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = std::make_shared<Branching>();
    net->to(at::kDouble);
    DistributedDataParallel<Branching> model(net);
    const auto x = data(rank, {5, 4});
    std::get<0>(model(x, true)).sum().backward();
    std::get<0>(model(x, false)).sum().backward();  // "extra" gets no gradient
    const auto text = message_of([&] { model(x, true); });
    EXPECT_THAT(text, HasSubstr("Expected to have finished reduction in the prior iteration"));
    EXPECT_THAT(text, HasSubstr("extra.weight"));
    EXPECT_THAT(text, HasSubstr("extra.bias"));
    EXPECT_THAT(text, Not(HasSubstr("common.weight")));
  });
}

TEST(DistributedDataParallel, DifferentModelsAreRefusedOnEveryRankByName) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    nn::Sequential net;
    struct Wrapper : nn::Module {
      explicit Wrapper(int64_t width) { register_module("layer", layer = nn::Linear(3, width)); }
      torch::Tensor forward(const torch::Tensor& x) { return layer(x); }
      nn::Linear layer{nullptr};
    };
    const auto text = message_of(
        [&] { DistributedDataParallel<Wrapper> model(std::make_shared<Wrapper>(rank == 2 ? 5 : 4)); });
    EXPECT_THAT(text, HasSubstr("rank 2"));
    EXPECT_THAT(text, HasSubstr("'layer.weight' (Float [4, 3])"));
    struct Counted : nn::Module {
      explicit Counted(int64_t count) {
        for (int64_t i = 0; i < count; ++i) register_parameter("p" + std::to_string(i), torch::ones({2}));
      }
      void forward() {}
    };
    EXPECT_THAT(message_of([&] {
                  DistributedDataParallel<Counted> model(std::make_shared<Counted>(rank == 1 ? 3 : 2));
                }),
                HasSubstr("Rank 1 has 3 params, while rank 0 has 2"));
    EXPECT_THAT(message_of([&] { DistributedDataParallel<Counted> model(std::make_shared<Counted>(0)); }),
                HasSubstr("doesn't have any parameter that requires a gradient"));
    DistributedDataParallel<Counted> model(std::make_shared<Counted>(2));  // the group is none the worse
    model();
  });
}

TEST(DistributedDataParallel, BadOptionsAreRefused) {
  auto world = init_process_group({.rank = 0, .world_size = 1});
  auto net = std::make_shared<Net>();
  EXPECT_THROW(DistributedDataParallel<Net>(net, {.bucket_cap_mb = 0}), c10::ValueError);
  EXPECT_THROW(DistributedDataParallel<Net>(net, {.first_bucket_cap_mb = -1}), c10::ValueError);
  EXPECT_THROW(DistributedDataParallel<Net>(net, {.bucket_cap_mb_list = {1, 0}}), c10::ValueError);
  EXPECT_THROW(DistributedDataParallel<Net>(net, {.bucket_cap_mb = 1, .bucket_cap_mb_list = {1}}),
               c10::ValueError);
  EXPECT_THROW(DistributedDataParallel<Net>(net, {.device_ids = {at::Device(at::kCUDA, 0)}}),
               c10::ValueError);
  EXPECT_THROW(DistributedDataParallel<Net>(net, {.output_device = at::Device(at::kCUDA, 0)}),
               c10::ValueError);
  EXPECT_THROW(
      DistributedDataParallel<Net>(net, {.mixed_precision = MixedPrecision{.param_dtype = at::kInt}}),
      c10::ValueError);
  EXPECT_THROW(DistributedDataParallel<Net>(net, {.param_to_hook_all_reduce = net->parameters()[0]}),
               c10::ValueError);
  EXPECT_THROW(DistributedDataParallel<Net>(std::shared_ptr<Net>()), c10::ValueError);
}

TEST(DistributedDataParallel, BuffersFollowRankZeroWhenTorchsDo) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = std::make_shared<Net>();
    DistributedDataParallel<Net> model(net);
    const auto step = [&] { model(torch::randn({4, 6}) + rank).sum().backward(); };
    const auto same = [&] {
      auto sum = net->norm->running_mean.clone();
      all_reduce(sum);
      return at::allclose(sum, 2 * net->norm->running_mean);
    };
    step();
    EXPECT_FALSE(same()) << "each rank has seen other data";
    net->eval();
    {
      torch::NoGradGuard no_grad;
      model(torch::randn({4, 6}));
      EXPECT_TRUE(same()) << "broadcast before a forward that follows a synchronised one";
      net->norm->running_mean.fill_(rank);
      model(torch::randn({4, 6}));
      EXPECT_FALSE(same()) << "no synchronised forward in between";
    }
    net->train();
    DistributedDataParallel<Net> quiet(net, {.broadcast_buffers = false, .init_sync = false});
    net->norm->running_mean.fill_(rank);
    quiet(torch::randn({4, 6})).sum().backward();
    EXPECT_FALSE(same());
  });
}

TEST(DistributedDataParallel, SeveralModelsInSeveralThreads) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    std::vector<ProcessGroup> groups{new_group(), new_group()};
    std::vector<std::jthread> threads;
    for (int which = 0; which < 2; ++which) {
      threads.emplace_back([&, which] {
        auto net = std::make_shared<nn::LinearImpl>(20, 30);
        net->to(at::kDouble);
        DistributedDataParallel<nn::LinearImpl> model(
            net, {.process_group = groups[which], .bucket_cap_mb = 1e-4});
        for (int step = 0; step < 30; ++step) {
          const auto x = data(rank, {5, 20}, 100 * which + step);
          net->zero_grad();
          model(x).sum().backward();
          auto expected = x.sum(0);
          all_reduce(expected, ReduceOp::AVG, groups[which]);
          ASSERT_TRUE(at::allclose(net->weight.grad()[0], expected, 1e-12, 1e-12));
        }
      });
    }
  });
}

TEST(DistributedDataParallel, ErrorInBackwardLeavesThroughBackward) {
  auto outcomes = testing::run_ranks_collect(2,
                                             [](int rank) {
                                               auto world = init_process_group();
                                               auto net = std::make_shared<nn::LinearImpl>(4, 3);
                                               DistributedDataParallel<nn::LinearImpl> model(net);
                                               model(torch::randn({2, 4})).sum().backward();
                                               if (rank == 1) std::_Exit(7);
                                               EXPECT_THAT(message_of([&] {
                                                             model(torch::randn({2, 4})).sum().backward();
                                                           }),
                                                           HasSubstr("exited with status 7"));
                                             },
                                             {.expected_failures = {1}});
  testing::expect_survivors(outcomes, {1});
}

}  // namespace
}  // namespace lockstep::ddp_test
