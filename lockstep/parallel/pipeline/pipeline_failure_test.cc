#include <chrono>
#include <csignal>
#include <functional>
#include <gmock/gmock.h>
#include <optional>
#include <stdexcept>
#include <string>
#include <unistd.h>
#include <utility>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/errors.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/mesh/device_mesh.h>
#include <lockstep/parallel/pipeline/pipeline_runner.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

// Stages that die, stop and throw: all others name the rank, and what it was doing.
namespace lockstep::pipeline_failure_test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using testing::die;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using testing::run_ranks_collect;
using testing::run_survivors;

/// What a stage does in the backward of the micro-batch with that number.
struct InBackward : torch::autograd::Function<InBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const std::function<void()>& action) {
    context->saved_data["action"] = reinterpret_cast<int64_t>(&action);
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    (*reinterpret_cast<const std::function<void()>*>(context->saved_data["action"].toInt()))();
    return {gradients[0], at::Tensor()};
  }
};

/// A pipeline of a stage on each rank, in which one of them does something at its n-th forward or backward.
struct Plan {
  int culprit = -1;
  int forward = -1;
  int backward = -1;
  std::function<void()> action = {};
  bool evaluates = false;
};

void run_pipeline(int rank, const ProcessGroup& group, const Plan& plan, int steps = 1,
                  const std::optional<ProcessGroup>& data_parallel_group = {}) {
  const auto weight = torch::ones({3}, at::requires_grad());
  int forwards = 0, backwards = 0;
  const std::function<void()> at_backward = [&] {
    if (rank == plan.culprit && backwards++ == plan.backward) plan.action();
  };
  const auto stage = [&](const at::Tensor& x) {
    if (rank == plan.culprit && forwards++ == plan.forward) plan.action();
    return InBackward::apply(x * weight, at_backward);
  };
  const auto loss = [](const at::Tensor& output, const at::Tensor& /*target*/) { return output.mean(); };
  PipelineRunner pipeline(
      PipelineStage(stage, get_rank(group), get_world_size(group), {.group = group, .parameters = {weight}}),
      {.n_microbatches = 6, .loss_fn = loss, .data_parallel_group = data_parallel_group});
  if (plan.evaluates) pipeline.eval({at::ones({6, 3})});
  for (int step = 0; step < steps; ++step) pipeline.step({at::ones({6, 3})}, at::ones({6}));
}

/// Two pipelines of two stages, of which ranks 0 and 1 have the first.
void run_two_pipelines(int rank, const Plan& plan) {
  auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "pp"});
  run_pipeline(rank, mesh.get_group("pp"), plan, 1, mesh.get_group("dp"));
}

/// A job of two pipelines of two stages. The victim dies at the place that it comes to by itself, or after `action`.
void expect_killed_is_named_in(int victim, const std::string& death,
                               const std::function<void(const std::function<void()>& dies_now)>& action) {
  SCOPED_TRACE(death);
  run_survivors(4, {victim}, [&](int rank) {
    auto world = init_process_group();
    const std::string text = message_of<c10::Error>([&] {
      action([&] {
        if (rank == victim) failpoint::configure(death);
      });
      if (rank == victim) die();
      barrier();
    });
    EXPECT_THAT(text, ContainsRegex("rank " + std::to_string(victim) +
                                    " \\(pid [0-9]+[^)]*\\) (was )?killed by signal 9"));
    shrink_group();  // until here no survivor ends, so that none is told by that
  });
}

void expect_killed_is_named(int ranks, int hosts, const Plan& plan, const std::string& action) {
  run_survivors(
      ranks, {plan.culprit},
      [&](int rank) {
        auto world = init_process_group();
        const std::string text = message_of<c10::Error>([&] { run_pipeline(rank, default_group(), plan); });
        EXPECT_THAT(text, AllOf(HasSubstr("rank " + std::to_string(plan.culprit) + " (pid "),
                                HasSubstr("signal 9 (SIGKILL) in " + action), HasSubstr("of the pipeline")));
      },
      {.hosts = hosts});
}

TEST(PipelineFailure, AKilledStageIsNamedWithItsAction) {
  expect_killed_is_named(3, 1, {.culprit = 2, .backward = 3, .action = die}, "2B3");
  expect_killed_is_named(3, 1, {.culprit = 0, .forward = 4, .action = die}, "0F4");
  expect_killed_is_named(4, 1, {.culprit = 1, .forward = 2, .action = die}, "1F2");
}

/// The stages before it wait until it takes what they send, and those after it for what it sends.
TEST(PipelineFailure, AStageKilledInAnEvaluationIsNamedWithItsAction) {
  expect_killed_is_named(3, 1, {.culprit = 1, .forward = 2, .action = die, .evaluates = true}, "1F2");
  expect_killed_is_named(2, 1, {.culprit = 1, .forward = 5, .action = die, .evaluates = true}, "1F5");
}

TEST(PipelineFailure, AKilledStageIsNamedOnOtherHosts) {
  if (!testing::has_wire()) GTEST_SKIP() << "ranks on several hosts need UCX";
  expect_killed_is_named(4, 2, {.culprit = 3, .backward = 2, .action = die}, "3B2");
  expect_killed_is_named(4, 2, {.culprit = 1, .forward = 3, .action = die}, "1F3");
}

/// Each rank is on a host of its own, and the others know what has come from it last. `actions`: that, or what it did since.
void expect_killed_alone_is_named(int ranks, const Plan& plan, const std::string& actions) {
  SCOPED_TRACE(actions + " of " + std::to_string(ranks) + " ranks");
  run_survivors(
      ranks, {plan.culprit},
      [&](int rank) {
        auto world = init_process_group();
        const std::string text = message_of<c10::Error>([&] { run_pipeline(rank, default_group(), plan); });
        EXPECT_THAT(text, ContainsRegex("rank " + std::to_string(plan.culprit) +
                                        " \\(pid [^)]*\\) is lost: .*; it was in or after " + actions + ";"));
        EXPECT_THAT(text, HasSubstr("rank " + std::to_string(rank) + " of the pipeline was "));
      },
      {.hosts = ranks});
}

// Each of the others has done before what the culprit's action needs, so it has taken what came from the culprit before that.
TEST(PipelineFailure, AKilledRankAloneOnItsHostIsNamedWithTheLastActionThatIsKnown) {
  if (!testing::has_wire()) GTEST_SKIP() << "ranks on several hosts need UCX";
  expect_killed_alone_is_named(2, {.culprit = 1, .backward = 2, .action = die}, "1(B[012]|F[12])");
  expect_killed_alone_is_named(3, {.culprit = 1, .forward = 3, .action = die}, "1(B[01]|F[123])");
  // Rank 0 has no messages with it.
  expect_killed_alone_is_named(3, {.culprit = 2, .backward = 2, .action = die}, "2(B[012]|F[12])");
}

TEST(PipelineFailure, AnExceptionIsToldOnAllStages) {
  for (const bool in_backward : {false, true}) {
    run_ranks(4, [&](int rank) {
      auto world = init_process_group();
      auto group = new_group();
      const std::function<void()> fails = [] { throw std::runtime_error("no such word: xyzzy"); };
      Plan plan{.culprit = 2, .action = fails};
      (in_backward ? plan.backward : plan.forward) = 1;
      const std::string action = in_backward ? "2B1" : "2F1";
      const std::string text = message_of<c10::Error>([&] { run_pipeline(rank, group, plan); });
      EXPECT_THAT(text, AllOf(HasSubstr("no such word: xyzzy"), HasSubstr("in " + action)));
      if (rank != 2) {
        EXPECT_THAT(text, HasSubstr("rank 2 (pid "));
      }
      barrier();  // other groups are as they were
    });
  }
}

TEST(PipelineFailure, AnExceptionIsToldInTheOtherPipelines) {
  const std::function<void()> fails = [] { throw std::runtime_error("no such word: xyzzy"); };
  for (const auto& [plan, action] : {std::pair{Plan{.culprit = 0, .backward = 1, .action = fails}, "0B1"},
                                     std::pair{Plan{.culprit = 1, .forward = 1, .action = fails}, "1F1"}}) {
    run_ranks(4, [&plan = plan, &action = action, culprit = plan.culprit](int rank) {
      auto world = init_process_group();
      const std::string text = message_of<c10::Error>([&] { run_two_pipelines(rank, plan); });
      EXPECT_THAT(text, AllOf(HasSubstr("no such word: xyzzy"), HasSubstr("in " + std::string(action))));
      if (rank != culprit) {
        EXPECT_THAT(text, HasSubstr("rank " + std::to_string(culprit) + " (pid "));
      }
      barrier();  // until here no rank ends, so that none is told by that
    });
  }
}

TEST(PipelineFailure, AKilledStageIsNamedInTheOtherPipelines) {
  const Plan plan{.culprit = 1, .backward = 3, .action = die};
  run_survivors(4, {plan.culprit}, [&](int rank) {
    auto world = init_process_group();
    const std::string text = message_of<c10::Error>([&] { run_two_pipelines(rank, plan); });
    EXPECT_THAT(text, AllOf(HasSubstr("rank 1 (pid "), HasSubstr("signal 9 (SIGKILL) in 1B3")));
  });
}

/// Two pipelines of two stages with a tied weight.
PipelineRunner make_replica(DeviceMesh& mesh, const at::Tensor& weight) {
  const auto stage = [weight](const at::Tensor& x) { return x * weight; };
  const auto loss = [](const at::Tensor& output, const at::Tensor& /*target*/) { return output.mean(); };
  const PipelineStageOptions options{
      .group = mesh.get_group("pp"), .tied = {{"weight", weight}}, .parameters = {weight}};
  return PipelineRunner(PipelineStage(stage, mesh.get_local_rank("pp"), 2, options),
                        {.n_microbatches = 2, .loss_fn = loss, .data_parallel_group = mesh.get_group("dp")});
}

TEST(PipelineFailure, AStageKilledWhilePipelinesAreMadeIsNamedOnAllRanks) {
  const auto make = [](const std::function<void()>& dies_now) {
    auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "pp"});
    dies_now();
    make_replica(mesh, torch::ones({3}, at::requires_grad()));
  };
  for (int operation = 1; operation <= 7; ++operation) {
    expect_killed_is_named_in(3, "announce=kill(9)@" + std::to_string(operation), make);
  }
  expect_killed_is_named_in(0, "send=kill(9)", make);
}

/// The stage belongs to one pipeline; the other one's ranks come to their next step, in which they average gradients with it.
TEST(PipelineFailure, AStageKilledWhileGradientsAreClippedIsNamedOnAllRanks) {
  const auto clip = [](const std::function<void()>& dies_now) {
    auto mesh = init_device_mesh("cpu", {2, 2}, {"dp", "pp"});
    auto pipeline = make_replica(mesh, torch::ones({3}, at::requires_grad()));
    pipeline.step({at::ones({2, 3})}, at::ones({2}));
    dies_now();
    pipeline.clip_grad_norm_(1.0);
    pipeline.step({at::ones({2, 3})}, at::ones({2}));
  };
  expect_killed_is_named_in(1, "announce=kill(9)@1", clip);
}

/// Rank 0, which is not the culprit, ends it when the others have seen that it is stopped. `words`: what all say of it, as a
/// regular expression. The others may begin late on a busy machine.
void expect_stopped_is_named(int ranks, int hosts, Plan plan, const std::string& words,
                             std::chrono::milliseconds timeout = 4s, int silence_limit = 10) {
  SCOPED_TRACE(words + " on " + std::to_string(hosts) + " hosts");
  plan.action = [] { ::raise(SIGSTOP); };
  const auto outcomes = run_ranks_collect(
      ranks,
      [&](int rank) {
        auto world = init_process_group();
        auto group = new_group({}, timeout);
        at::Tensor pid = at::full({1}, rank == plan.culprit ? ::getpid() : 0, at::kLong);
        broadcast(pid, plan.culprit);
        const std::string text = message_of<c10::Error>([&] { run_pipeline(rank, group, plan); });
        EXPECT_THAT(text,
                    ContainsRegex("rank " + std::to_string(plan.culprit) + " \\(pid [^)]*\\).*" + words));
        at::Tensor done = at::ones({1});
        if (rank != 0) return send(done, 0);
        for (int other = 1; other < ranks; ++other)
          if (other != plan.culprit) recv(done, other);
        ::kill(static_cast<pid_t>(pid.item<int64_t>()), SIGKILL);
      },
      {.expected_failures = {plan.culprit},
       .hosts = hosts,
       .environment = {{"LOCKSTEP_HEARTBEAT_TIMEOUT_SEC", std::to_string(silence_limit)}}});
  testing::expect_survivors(outcomes, {plan.culprit});
}

TEST(PipelineFailure, AStoppedStageIsNamedWithItsAction) {
  expect_stopped_is_named(3, 1, {.culprit = 1, .forward = 2}, "stopped in 1F2");
  expect_stopped_is_named(3, 1, {.culprit = 2, .backward = 3}, "stopped in 2B3");
  expect_stopped_is_named(2, 1, {.culprit = 1, .forward = 4, .evaluates = true}, "stopped in 1F4");
}

TEST(PipelineFailure, AStoppedStageIsNamedOnOtherHosts) {
  if (!testing::has_wire()) GTEST_SKIP() << "ranks on several hosts need UCX";
  expect_stopped_is_named(4, 2, {.culprit = 2, .backward = 2}, "stopped in 2B2");
  expect_stopped_is_named(4, 2, {.culprit = 1, .forward = 3}, "stopped in 1F3");
}

TEST(PipelineFailure, AStoppedRankAloneOnItsHostIsNamedWithTheLastActionThatIsKnown) {
  if (!testing::has_wire()) GTEST_SKIP() << "ranks on several hosts need UCX";
  expect_stopped_is_named(2, 2, {.culprit = 1, .backward = 2}, "which was in or after 1(B[012]|F[12]);", 4s,
                          60);
  expect_stopped_is_named(3, 3, {.culprit = 2, .backward = 2}, "which was in or after 2(B[012]|F[12]);", 4s,
                          60);
  expect_stopped_is_named(3, 3, {.culprit = 1, .forward = 3},
                          "is unreachable: silent for .*; rank 1 was in or after 1(B[01]|F[123])", 60s, 5);
}

TEST(PipelineFailure, ARankThatLeavesIsNamed) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto group = new_group();
    const auto steps = [&] { run_pipeline(rank, group, {.culprit = -1}, rank == 0 ? 2 : 1); };
    if (rank == 0) {
      EXPECT_THAT(message_of<c10::DistBackendError>(steps),
                  AllOf(HasSubstr("rank 1 (pid "), HasSubstr("left")));
    } else {
      steps();
      destroy_process_group(group);
    }
  });
}

}  // namespace
}  // namespace lockstep::pipeline_failure_test
