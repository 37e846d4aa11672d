// A rank dies in the middle of training; the others go on from the same step, in the same processes.
#include <chrono>
#include <csignal>
#include <gmock/gmock.h>
#include <random>
#include <unistd.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/nn/testing/fixtures.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/parallel/ddp/reducer/bucket_memory.h>
#include <lockstep/parallel/ddp/reducer/reducer.h>
#include <lockstep/testing/long_run.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/tensors.h>
#include <lockstep/transport/host/memory/arena.h>

namespace lockstep::ddp_failure_test {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using testing::copies;
using testing::data;
using testing::equal;
using ::testing::HasSubstr;
using testing::make_double;
using testing::message_of;

/// With everything that forward changes: running statistics and random numbers.
struct Noisy : nn::Module {
  Noisy() {
    register_module("a", a), register_module("norm", norm), register_module("b", b), register_module("c", c);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return c(torch::dropout(torch::relu(b(norm(torch::relu(a(x))))), 0.2, is_training()));
  }
  nn::Linear a{32, 64};
  nn::BatchNorm1d norm{64};
  nn::Linear b{64, 64};
  nn::Linear c{64, 8};
};

std::vector<torch::Tensor> momentum(const torch::optim::SGD& optimizer) {
  std::vector<torch::Tensor> answer;
  for (const auto& parameter : optimizer.param_groups()[0].params()) {
    const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer.state().end()) continue;
    answer.push_back(static_cast<torch::optim::SGDParamState&>(*found->second).momentum_buffer());
  }
  return answer;
}

torch::Tensor random_state() {
  auto generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

/// The same values on all ranks of the group.
void expect_same_everywhere(const std::vector<torch::Tensor>& tensors, const ProcessGroup& group) {
  for (const auto& tensor : tensors) EXPECT_TRUE(testing::same_everywhere(tensor, group));
}

void train_until_a_rank_dies(int rank, int victim, std::chrono::microseconds delay, bool over_hosts) {
  auto world = init_process_group();
  torch::manual_seed(rank);
  auto net = make_double<Noisy>();
  DistributedDataParallel model(net, {.bucket_cap_mb = 0.01, .restore_buffers_on_failure = true});
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  ProcessGroup group = default_group();
  int64_t step = 0, steps_after = 0;
  while (steps_after < 6) {
    if (rank == victim && step == 3) testing::die_after(delay);
    optimizer.zero_grad();
    const auto parameters = copies(net->parameters()), buffers = copies(net->buffers());
    const auto momenta = copies(momentum(optimizer));
    const auto random = random_state();
    try {
      model(data(rank, {16, 32}, static_cast<int>(step))).square().mean().backward();
      optimizer.step();
      ++step;
      if (get_world_size(group) == 2) ++steps_after;
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what_without_backtrace(), HasSubstr("rank " + std::to_string(victim)));
      EXPECT_TRUE(equal(parameters, net->parameters()));
      EXPECT_TRUE(equal(buffers, net->buffers()));
      EXPECT_TRUE(equal(momenta, momentum(optimizer)));
      EXPECT_TRUE(at::equal(random, random_state()));
      group = shrink_group();
      ASSERT_EQ(get_world_size(group), 2);
      const int64_t common = model.update_process_group(group, {optimizer});
      // Over hosts a step that has failed here may have succeeded on another host.
      EXPECT_TRUE(common == step || (over_hosts && common == step + 1)) << common << " after " << step;
      step = common;
    }
  }
  EXPECT_GT(step, 6);
  auto progress = torch::tensor({step});
  expect_same_everywhere({progress}, group);
  expect_same_everywhere(net->parameters(), group);
  expect_same_everywhere(momentum(optimizer), group);
}

void expect_the_others_go_on(int moments, int hosts) {
  std::mt19937 random(11);
  for (int i = 0; i < moments; ++i) {
    const int victim = i % 3;
    const std::chrono::microseconds delay(random() % 8000);
    SCOPED_TRACE("moment " + std::to_string(i));
    testing::run_survivors(3, {victim},
                           [&](int rank) { train_until_a_rank_dies(rank, victim, delay, hosts > 1); },
                           {.hosts = hosts});
  }
}

TEST(DdpFailure, SurvivorsGoOnFromTheSameStepBitIdentically) {
  expect_the_others_go_on(testing::long_run() ? 50 : 15, 1);
}

// Two ranks on the first host, one on the second: the group that is left is over hosts, or not.
TEST(DdpFailure, SurvivorsOverHostsGoOnFromTheSameStepBitIdentically) {
  if (!testing::has_wire()) GTEST_SKIP() << "ranks on several hosts need UCX";
  expect_the_others_go_on(testing::long_run() ? 12 : 6, 2);
}

struct Stop {
  const char* name;
  const char* failpoint;  // at which rank 2 stops
};

class RankStoppedInAStep : public ::testing::TestWithParam<Stop> {};

TEST_P(RankStoppedInAStep, ChangesNoGradientOfTheOthersWhenItWakes) {
  testing::run_ranks(3, [where = GetParam().failpoint](int rank) {
    auto world = init_process_group();
    auto pid = torch::full({1}, static_cast<int64_t>(::getpid()), torch::kLong);
    broadcast(pid, 2);
    const auto group = new_group();
    const auto survivors = new_group({0, 1});
    const auto square = [] { return nn::Linear(nn::LinearOptions(512, 512).bias(false)); };
    nn::Sequential net(square(), square(), square());
    const DistributedDataParallelOptions options{.process_group = group, .bucket_cap_mb = 0.5};
    DistributedDataParallel model(net, options);
    const auto x = torch::full({4, 512}, rank + 1.0F);
    std::vector<const void*> slots;
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      model(x).sum().backward();
      slots.clear();
      for (const auto& parameter : net->parameters()) slots.push_back(parameter.grad().const_data_ptr());
    }
    ASSERT_EQ(model.reducer().bucket_bytes().size(), 3U);
    for (const void* slot : slots)
      EXPECT_TRUE(arena_of(group)->find_writable(slot, 512 * 512 * sizeof(float)).has_value());
    net->zero_grad();
    group->getBackend(at::kCPU)->setTimeout(std::chrono::milliseconds(1500));
    auto loss = model(x).sum();
    if (rank == 2) {
      failpoint::configure(where);
      message_of([&] { loss.backward(); });
      barrier();
      return;
    }
    EXPECT_THAT(message_of([&] { loss.backward(); }),
                AllOf(HasSubstr("rank 2 (pid " + std::to_string(pid.item<int64_t>()) + ")"),
                      HasSubstr("is stopped")));
    std::vector<torch::Tensor> gradients;
    for (const auto& parameter : net->parameters()) {
      ASSERT_TRUE(parameter.grad().defined());
      EXPECT_EQ(parameter.grad().const_data_ptr(), slots[gradients.size()]);
      gradients.push_back(parameter.grad().fill_(100));
    }
    barrier(survivors);
    if (rank == 0) ::kill(static_cast<pid_t>(pid.item<int64_t>()), SIGCONT);
    barrier();  // rank 2's backward has ended
    const auto expect_unchanged = [&] {
      for (const auto& gradient : gradients) EXPECT_TRUE(gradient.eq(100).all().item<bool>());
    };
    expect_unchanged();
    model.update_process_group(survivors);
    net->zero_grad();
    model(x).sum().backward();
    for (const auto& parameter : net->parameters()) expect_same_everywhere({parameter.grad()}, survivors);
    expect_unchanged();
  });
}

INSTANTIATE_TEST_SUITE_P(Places, RankStoppedInAStep,
                         ::testing::Values(Stop{"announcing_the_first", "announce=kill(19)@1"},
                                           Stop{"reducing_the_first", "reduce=kill(19)@1"},
                                           Stop{"reducing_the_second", "reduce=kill(19)@2"},
                                           Stop{"finishing", "finish=kill(19)@1"}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(DdpFailure, WhoIsBehindGetsTheStateOfOneThatIsAhead) {
  testing::run_ranks(3, [](int rank) {
    auto world = init_process_group();
    torch::manual_seed(1);
    auto net = make_double<Noisy>();
    DistributedDataParallel model(net);
    torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
    const auto train = [&](int steps) {
      for (int step = 0; step < steps; ++step) {
        optimizer.zero_grad();
        model(data(rank, {16, 32}, step)).square().mean().backward();
        optimizer.step();
      }
    };
    train(3);
    optimizer.zero_grad();
    model(data(rank, {16, 32}, 3)).square().mean().backward();
    if (rank != 1) optimizer.step();  // rank 1 lost its way between backward and step
    const auto group = new_group();
    EXPECT_EQ(model.update_process_group(group, {optimizer}), 4);
    expect_same_everywhere(net->parameters(), group);
    expect_same_everywhere(net->buffers(), group);
    expect_same_everywhere(momentum(optimizer), group);
    train(3);
    expect_same_everywhere(net->parameters(), group);
    EXPECT_EQ(model.get_ddp_logging_data().ints_map.at("iteration"), 7);
  });
}

TEST(DdpFailure, WhoOnlyShadowedInAJoinIsBehind) {
  testing::run_survivors(3, {2}, [](int rank) {
    auto world = init_process_group();
    torch::manual_seed(1);
    auto net = make_double<Noisy>();
    DistributedDataParallel model(net);
    torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
    message_of<c10::DistBackendError>([&] {
      auto join = model.join();
      for (int step = 0; step < (rank == 0 ? 2 : 10); ++step) {
        if (rank == 2 && step == 6) testing::die();
        optimizer.zero_grad();
        model(data(rank, {16, 32}, step)).square().mean().backward();
        optimizer.step();
      }
      join.finish();
    });
    const auto group = shrink_group();
    EXPECT_EQ(model.update_process_group(group, {optimizer}), 6);
    expect_same_everywhere(net->parameters(), group);
    expect_same_everywhere(momentum(optimizer), group);
  });
}

TEST(DdpFailure, WhoShadowsAFailingStepKeepsItsRandomNumbers) {
  testing::run_survivors(2, {1}, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Noisy>();
    DistributedDataParallel model(net);
    torch::optim::SGD optimizer(model.parameters(), 0.01);
    torch::Tensor random;
    message_of<c10::DistBackendError>([&] {
      auto join = model.join();
      for (int step = 0; step < (rank == 0 ? 2 : 10); ++step) {
        optimizer.zero_grad();
        auto loss = model(data(rank, {16, 32}, step)).square().mean();
        if (rank == 1 && step == 4) testing::die();  // while rank 0 waits for its gradients
        loss.backward();
        optimizer.step();
      }
      random = random_state();
      join.finish();
    });
    EXPECT_TRUE(at::equal(random, random_state())) << "those of its last step, which was completed";
  });
}

TEST(DdpFailure, WhoIsBehindGetsDelayedParametersToo) {
  testing::run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const bool all : {false, true}) {
      nn::Linear first(2, 2), last(2, 2);
      nn::Sequential net(first, last);
      DistributedDataParallelOptions options{.param_to_hook_all_reduce = first->weight};
      for (const auto& item : net->named_parameters()) {
        if (all || item.value().is_same(last->weight))
          options.delay_all_reduce_named_params.emplace_back(item.key(), item.value());
      }
      DistributedDataParallel model(net, options);
      torch::optim::SGD optimizer(model.parameters(), 0.1);
      model(torch::ones({1, 2})).sum().backward();
      if (rank == 0) optimizer.step();  // rank 1 lost its way between backward and step
      EXPECT_FALSE(testing::same_everywhere(last->weight));
      EXPECT_EQ(model.update_process_group(new_group(), {optimizer}), all ? 0 : 1);
      expect_same_everywhere(net->parameters(), default_group());
      optimizer.zero_grad();
      model(torch::full({1, 2}, rank + 1.0F)).sum().backward();
      EXPECT_TRUE(testing::same_everywhere(last->weight.grad()));
    }
  });
}

TEST(DdpFailure, ARankWithoutMemoryForAnothersStateFailsTheOthersToo) {
  testing::run_ranks(2, [](int rank) {
    auto world = init_process_group();
    torch::manual_seed(1);
    auto net = make_double<Noisy>();
    DistributedDataParallel model(net);
    torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      model(data(rank, {16, 32}, step)).square().mean().backward();
      if (step == 0 || rank == 0) optimizer.step();
    }
    if (rank == 1) failpoint::configure("ddp_catch_up=error(no memory)@1");
    EXPECT_THAT(
        message_of<c10::Error>([&] { model.update_process_group(new_group(), {optimizer}); }),
        HasSubstr(rank == 1 ? "no memory" : "rank 1 of the group has no memory for another rank's state"));
    failpoint::configure("");
    EXPECT_EQ(model.update_process_group(new_group(), {optimizer}), 2);
    expect_same_everywhere(net->parameters(), default_group());
    expect_same_everywhere(momentum(optimizer), default_group());
  });
}

TEST(DdpFailure, ASenderThatEndsInTheMiddleLeavesTheOthersAsTheyWere) {
  testing::run_survivors(3, {0}, [](int rank) {
    auto world = init_process_group();
    torch::manual_seed(1);
    auto net = make_double<Noisy>();
    DistributedDataParallel model(net);
    torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      model(data(rank, {16, 32}, step)).square().mean().backward();
      if (step < 2 || rank == 0) optimizer.step();
    }
    const auto before = copies(net->parameters());
    // After the parameters were sent, before this state is.
    const Recoverable deadly(
        [] {
          testing::die();
          return std::string();
        },
        [](const std::string&) {});
    message_of<c10::DistBackendError>([&] { model.update_process_group(new_group(), {deadly}); });
    EXPECT_TRUE(equal(before, net->parameters()));
    const auto group = shrink_group();
    EXPECT_EQ(model.update_process_group(group, {optimizer}), 2);
    EXPECT_TRUE(equal(before, net->parameters()));
    expect_same_everywhere(net->parameters(), group);
    expect_same_everywhere(momentum(optimizer), group);
  });
}

TEST(DdpFailure, AFinishedStepIsNotUndone) {
  testing::run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Noisy>();
    DistributedDataParallel model(net, {.restore_buffers_on_failure = true});
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    const auto before = copies(net->buffers());
    model(data(rank, {16, 32})).square().mean().backward();
    model.reset();  // not applied: undone
    EXPECT_TRUE(equal(before, net->buffers()));
    model(data(rank, {16, 32})).square().mean().backward();
    const auto buffers = copies(net->buffers());
    const auto random = random_state();
    optimizer.step();
    model.reset();
    EXPECT_TRUE(equal(buffers, net->buffers()));
    EXPECT_TRUE(at::equal(random, random_state()));
  });
}

TEST(DdpFailure, AnExceptionInAForwardUndoesItsOwnStepOnly) {
  struct Failing : Noisy {
    torch::Tensor forward(const torch::Tensor& x) {
      auto output = Noisy::forward(x);
      TORCH_CHECK(!fails, "bad sample");
      return output;
    }
    bool fails = false;
  };
  testing::run_ranks(2, [](int) {
    auto world = init_process_group();
    auto net = make_double<Failing>();
    DistributedDataParallel<Failing> model(net, {.restore_buffers_on_failure = true});
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    const auto x = data(7, {16, 32});  // the same on all ranks, so that rank 0's buffers change nothing
    const auto expect_failure_leaves_all = [&] {
      const auto buffers = copies(net->buffers());
      const auto random = random_state();
      net->fails = true;
      EXPECT_THAT(message_of<c10::Error>([&] { model(x); }), HasSubstr("bad sample"));
      net->fails = false;
      EXPECT_TRUE(equal(buffers, net->buffers()));
      EXPECT_TRUE(at::equal(random, random_state()));
    };
    expect_failure_leaves_all();  // of the first step
    model(x).square().mean().backward();
    {
      torch::NoGradGuard no_grad;
      model.eval();
      expect_failure_leaves_all();  // of a validation, before the finished step is applied
      optimizer.step();
      expect_failure_leaves_all();  // and after it
      model.train();
    }
    expect_failure_leaves_all();  // of the second step
    EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 1);
  });
}

TEST(DdpFailure, AMismatchFailsAllAndAnotherGroupGoesOn) {
  testing::run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Noisy>();
    DistributedDataParallel model(net, {.restore_buffers_on_failure = true});
    const auto x = data(rank, {16, 32});
    model(x).square().mean().backward();
    const auto buffers = copies(net->buffers());
    const auto random = random_state();
    net->zero_grad();
    auto loss = model(x).square().mean();
    if (rank == 1) {
      auto other = torch::ones({3});
      EXPECT_THAT(message_of([&] { all_reduce(other); }), HasSubstr("all_reduce"));
      model.reset();
    } else {
      EXPECT_THAT(message_of([&] { loss.backward(); }), HasSubstr("all_reduce"));
    }
    EXPECT_TRUE(equal(buffers, net->buffers()));
    EXPECT_TRUE(at::equal(random, random_state()));
    const auto logged = model.get_ddp_logging_data();
    EXPECT_EQ(logged.ints_map.at("has_error"), rank == 0 ? 1 : 0);
    if (rank == 0) {
      EXPECT_THAT(logged.strs_map.at("error"), HasSubstr("all_reduce"));
    }
    const auto group = shrink_group();
    EXPECT_EQ(get_world_size(group), 2);
    EXPECT_EQ(model.update_process_group(group), 0) << "nothing was applied";
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      model(x).square().mean().backward();
      expect_same_everywhere({net->a->weight.grad(), net->c->bias.grad()}, group);
    }
  });
}

}  // namespace
}  // namespace lockstep::ddp_failure_test
