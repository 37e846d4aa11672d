// What RobustLoop survives, and what it leaves behind when it does not: memory that is not there, exceptions,
// signals, deaths.
#include <chrono>
#include <csignal>
#include <gmock/gmock.h>
#include <unistd.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/optim/zero_redundancy_optimizer.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/temporary_folder.h>
#include <lockstep/train/robust_loop.h>
#include <lockstep/train/testing/fixtures.h>
#include <lockstep/train/trainer.h>

namespace lockstep::robust_loop_test {
namespace {

namespace nn = torch::nn;
using data::DistributedSampler;
using ::testing::AllOf;
using testing::copies;
using testing::equal;
using ::testing::HasSubstr;
using testing::Loader;
using testing::loss_of;
using testing::message_of;
using testing::Points;
using testing::SharedFolder;
using testing::SmallNet;
using testing::TemporaryFolder;

/// An allocation that no machine can serve, for batches of more than `most` samples.
struct Greed {
  int64_t most = 1 << 30;
  bool in_backward = false;
  int64_t failures = 0;

  void ask(int64_t samples) {
    if (samples <= most) return;
    ++failures;
    torch::empty({int64_t{1} << 46});  // 256 TiB
  }
};

struct AskInBackward : torch::autograd::Function<AskInBackward> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               int64_t greed) {
    context->saved_data["greed"] = greed;
    return x.view_as(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    reinterpret_cast<Greed*>(context->saved_data["greed"].toInt())->ask(gradients[0].size(0));
    return {gradients[0], torch::Tensor()};
  }
};

/// Several buckets, so that a failing backward leaves some reductions done and others not.
struct GreedyNet : nn::Module {
  GreedyNet(Greed& greed, double dropout) : greed(greed), dropout(dropout) {
    torch::manual_seed(3);
    a = register_module("a", nn::Linear(3, 64));
    b = register_module("b", nn::Linear(64, 64));
    c = register_module("c", nn::Linear(64, 1));
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto y = torch::dropout(torch::tanh(a(x.slice(1, 1))), dropout, is_training());
    if (!greed.in_backward) greed.ask(x.size(0));
    if (greed.in_backward) y = AskInBackward::apply(y, reinterpret_cast<int64_t>(&greed));
    return c(torch::tanh(b(y)));
  }
  Greed& greed;
  double dropout;
  nn::Linear a{nullptr}, b{nullptr}, c{nullptr};
};

struct Job {
  struct Options {
    int64_t batch_size = 8;
    int64_t accumulate = 1;
    double dropout = 0.3;
    int64_t every_steps = 0;
    bool scaler_has_a_group = false;
    TrainerCallbacks callbacks = {};
  };
  Job(const std::filesystem::path& folder, const Options& options)
      : model(std::make_shared<GreedyNet>(greed, options.dropout), {.bucket_cap_mb = 0.004}),
        optimizer(model.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9)),
        sampler(48, {.seed = 2}),
        loader(Points{48}, {.batch_size = options.batch_size, .sampler = &sampler, .num_workers = 1}),
        trainer(
            model, optimizer, loader, loss_of,
            {.max_epochs = 2,
             .accumulate_grad_batches = options.accumulate,
             .autocast_dtype = options.scaler_has_a_group ? std::optional(at::kHalf) : std::nullopt,
             .scaler = {.process_group =
                            options.scaler_has_a_group ? std::optional(default_group()) : std::nullopt},
             .checkpoint = CheckpointManagerOptions{.directory = folder, .every_steps = options.every_steps},
             .progress_bar = false,
             .callbacks = {options.callbacks}}) {
    torch::manual_seed(40 + trainer.rank());
  }
  std::vector<torch::Tensor> weights() const { return copies(model.parameters()); }

  Greed greed;
  DistributedDataParallel<GreedyNet> model;
  torch::optim::SGD optimizer;
  DistributedSampler sampler;
  Loader loader;
  Trainer<DistributedDataParallel<GreedyNet>, Loader, std::remove_const_t<decltype(loss_of)>> trainer;
};

/// Rank 1 alone runs out of memory, above so many samples, from a step on.
struct Shortage {
  const char* name;
  bool in_backward;
  int64_t most;
  int64_t from_step;
};

TEST(RobustLoop, LowersTheMicroBatchWhenOneRankRunsOutOfMemory) {
  const SharedFolder folder;
  const auto body = [&](int rank) {
    auto world = init_process_group();
    const auto smaller = [&](int64_t batch_size, double dropout) {
      Job job(folder.path() / "none",
              {.batch_size = batch_size, .accumulate = 8 / batch_size, .dropout = dropout});
      job.trainer.train();
      return job.weights();
    };
    int number = 0;
    for (const Shortage& shortage :
         {Shortage{"forward", false, 4, 0}, Shortage{"backward", true, 4, 0}, Shortage{"twice", true, 2, 0},
          Shortage{"forward, later", false, 4, 4}, Shortage{"backward, later", true, 4, 4}}) {
      const bool later = shortage.from_step > 0;
      const double dropout = later ? 0 : 0.3;
      const auto expected = smaller(shortage.most, dropout);
      Greed* greed = nullptr;
      Job job(folder.path() / std::to_string(number++),
              {.dropout = dropout, .callbacks = {.before_step = [&](TrainerCore& core) {
                                     if (rank == 1 && core.step() == shortage.from_step)
                                       greed->most = shortage.most;
                                   }}});
      greed = &job.greed;
      greed->in_backward = shortage.in_backward;
      EXPECT_EQ(RobustLoop(job.trainer).run(), 0) << shortage.name;
      EXPECT_EQ(job.trainer.step(), 6);
      EXPECT_EQ(greed->failures, rank == 0 ? 0 : shortage.most == 2 ? 2 : 1) << shortage.name;
      EXPECT_EQ(job.trainer.largest_micro_batch(), shortage.most);
      const auto weights = job.weights();
      if (!later) {
        EXPECT_TRUE(equal(weights, expected)) << shortage.name;
      }
      for (size_t i = 0; i < weights.size(); ++i) {
        EXPECT_TRUE(torch::allclose(weights[i], expected[i], 1e-10, 1e-10)) << shortage.name;
      }
    }
    // With one sample at once there is nothing to lower.
    Job job(folder.path() / "hopeless", {});
    if (rank == 1) job.greed.most = 0;
    if (rank == 1) {
      EXPECT_THAT(message_of<c10::Error>([&] { RobustLoop(job.trainer).run(); }), HasSubstr("allocate"));
    } else {
      EXPECT_THAT(message_of<c10::DistBackendError>([&] { RobustLoop(job.trainer).run(); }),
                  AllOf(HasSubstr("rank 1 failed after step 0"), HasSubstr("allocate")));
    }
    const auto found = find_latest_checkpoint(folder.path() / "hopeless");
    ASSERT_TRUE(found.has_value());
    EXPECT_THAT(found->emergency, HasSubstr("rank 1 failed after step 0"));
    EXPECT_EQ(found->step, 0);
  };
  testing::run_ranks(2, body, {.environment = folder.environment()});
}

TEST(RobustLoop, AScalersGroupIsTheNewOneAfterAStepWithoutMemory) {
  const SharedFolder folder;
  const auto body = [&](int rank) {
    auto world = init_process_group();
    Job job(folder.path() / "run", {.dropout = 0, .scaler_has_a_group = true});
    if (rank == 1) job.greed.most = 4;
    EXPECT_EQ(RobustLoop(job.trainer).run(), 0);
    EXPECT_EQ(job.greed.failures, rank);
    EXPECT_EQ(job.trainer.step(), 6);
  };
  testing::run_ranks(2, body, {.environment = folder.environment()});
}

/// Runs the job again in the same processes, which goes on, and compares.
void expect_the_usual_ending(const std::filesystem::path& folder,
                             const std::vector<torch::Tensor>& expected) {
  Job job(folder, {});
  EXPECT_EQ(RobustLoop(job.trainer).run(), 0);
  EXPECT_EQ(job.trainer.step(), 6);
  EXPECT_TRUE(equal(job.weights(), expected));
}

std::vector<torch::Tensor> undisturbed(const std::filesystem::path& folder) {
  Job job(folder, {});
  job.trainer.train();
  return job.weights();
}

TEST(RobustLoop, SavesBeforeAnExceptionAndWhenASignalComes) {
  const SharedFolder folder;
  const auto body = [&](int rank) {
    auto world = init_process_group();
    const auto expected = undisturbed(folder.path() / "none");
    enum class Place { kBeforeStep, kAfterStep, kAfterEpoch };
    for (const auto& [name, place] : {std::pair{"before-step", Place::kBeforeStep},
                                      {"after-step", Place::kAfterStep},
                                      {"after-epoch", Place::kAfterEpoch}}) {
      const auto fail = [&, place = place](Place here) {
        return [&, place, here](TrainerCore& core) {
          TORCH_CHECK_INDEX(rank != 1 || here != place || core.step() != 3, "the user's mistake");
        };
      };
      Job job(folder.path() / name, {.callbacks = {.after_epoch = fail(Place::kAfterEpoch),
                                                   .before_step = fail(Place::kBeforeStep),
                                                   .after_step = fail(Place::kAfterStep)}});
      RobustLoop loop(job.trainer);
      if (rank == 1) {
        EXPECT_THAT(message_of<c10::IndexError>([&] { loop.run(); }), HasSubstr("the user's mistake"));
      } else {
        EXPECT_THAT(message_of<c10::DistBackendError>([&] { loop.run(); }),
                    AllOf(HasSubstr("rank 1 failed after step 3"), HasSubstr("the user's mistake")));
      }
      const auto found = find_latest_checkpoint(folder.path() / name);
      ASSERT_TRUE(found.has_value()) << name;
      EXPECT_EQ(found->step, 3) << name;
      EXPECT_EQ(found->world_size, 2) << name;
      EXPECT_THAT(found->emergency, HasSubstr("the user's mistake"));
      expect_the_usual_ending(folder.path() / name, expected);
    }
    for (const int signal : {SIGTERM, SIGUSR1}) {
      const auto name = std::to_string(signal);
      Job job(folder.path() / name, {.callbacks = {.after_step = [&](TrainerCore& core) {
                                       if (rank == 1 && core.step() == 4) ::raise(signal);
                                     }}});
      EXPECT_EQ(RobustLoop(job.trainer).run(), 75);
      EXPECT_EQ(job.trainer.step(), 4);
      const auto found = find_latest_checkpoint(folder.path() / name);
      ASSERT_TRUE(found.has_value());
      EXPECT_EQ(found->step, 4);
      EXPECT_THAT(found->emergency, HasSubstr("stopped by"));
      expect_the_usual_ending(folder.path() / name, expected);
    }
    EXPECT_THAT(message_of<c10::Error>([&] {
                  Job job(folder.path() / "x", {});
                  RobustLoop(job.trainer, {.agree_timeout = std::chrono::milliseconds(0)});
                }),
                HasSubstr("agree_timeout is 0 ms"));
  };
  testing::run_ranks(2, body, {.environment = folder.environment()});
}

TEST(RobustLoop, SavesFullPrecisionAfterAnExceptionBetweenForwardAndBackward) {
  const SharedFolder folder;
  const auto body = [&](int rank) {
    auto world = init_process_group();
    const auto run = [&](const auto& with_trainer) {
      DistributedDataParallel model(std::make_shared<SmallNet>(),
                                    {.mixed_precision = MixedPrecision{.param_dtype = at::kFloat}});
      torch::optim::SGD optimizer(model.parameters(), 0.05);
      DistributedSampler sampler(48);
      Loader loader(Points{48}, {.batch_size = 4, .sampler = &sampler});
      int64_t steps = 0;
      const auto loss = [&](auto& net, const data::Example& batch) {
        const auto output = net.forward(batch.data);
        TORCH_CHECK_INDEX(rank != 1 || steps != 3, "the user's mistake");
        return torch::nn::functional::mse_loss(output, batch.target.to(output.scalar_type()));
      };
      Trainer trainer(model, optimizer, loader, loss,
                      {.checkpoint = CheckpointManagerOptions{.directory = folder.path() / "run"},
                       .progress_bar = false,
                       .callbacks = {{.after_step = [&](TrainerCore& core) { steps = core.step(); }}}});
      with_trainer(trainer);
      for (const auto& parameter : model.parameters()) EXPECT_EQ(parameter.scalar_type(), at::kDouble);
      return copies(model.parameters());
    };
    const auto trained = run([](auto& trainer) {
      EXPECT_THAT(message_of<c10::Error>([&] { RobustLoop(trainer).run(); }),
                  HasSubstr("the user's mistake"));
    });
    const auto saved = run([](auto& trainer) { EXPECT_EQ(trainer.restore()->step, 3); });
    EXPECT_TRUE(equal(saved, trained));
  };
  testing::run_ranks(2, body, {.environment = folder.environment()});
}

TEST(RobustLoop, TheLowestSurvivorSavesWhatWasDone) {
  const SharedFolder folder;
  for (const int victim : {0, 2}) {
    const auto name = "victim" + std::to_string(victim);
    const auto outcomes = testing::run_ranks_collect(
        3,
        [&](int rank) {
          auto world = init_process_group();
          // Without dropout's random numbers, of which the dead rank takes its own with it.
          Job job(folder.path() / name,
                  {.dropout = 0, .every_steps = 2, .callbacks = {.before_step = [&](TrainerCore& core) {
                                                     if (rank == victim && core.step() == 3) testing::die();
                                                   }}});
          RobustLoop(job.trainer).run();
        },
        {.expected_failures = {0, 1, 2}, .environment = folder.environment()});
    if (outcomes[0].pid == 0) continue;  // within a rank of a later call
    for (const auto& outcome : outcomes) {
      if (outcome.rank == victim) {
        EXPECT_EQ(outcome.signal.value_or(0), SIGKILL);
      } else {
        EXPECT_EQ(outcome.exit_status.value_or(-1), 1);
        EXPECT_THAT(outcome.exception.value_or(""), HasSubstr("rank " + std::to_string(victim)));
      }
    }
    const auto found = find_latest_checkpoint(folder.path() / name);
    ASSERT_TRUE(found.has_value()) << outcomes[1].output;
    EXPECT_EQ(found->step, 3);
    EXPECT_THAT(found->emergency, HasSubstr("rank " + std::to_string(victim)));
  }
  const auto body = [&](int) {
    auto world = init_process_group();
    Job reference(folder.path() / "none", {.dropout = 0});
    reference.trainer.train();
    for (const char* name : {"victim0", "victim2"}) {
      Job job(folder.path() / name, {.dropout = 0});
      EXPECT_EQ(job.trainer.restore()->step, 3);
      job.trainer.train();
      EXPECT_EQ(job.trainer.step(), reference.trainer.step());
      EXPECT_TRUE(equal(job.weights(), reference.weights())) << name;
    }
  };
  testing::run_ranks(3, body, {.environment = folder.environment()});
}

TEST(RobustLoop, OverHostsAStepWithoutMemoryIsDoneAgain) {
  if (!testing::has_wire()) GTEST_SKIP() << "ranks on several hosts need UCX";
  const SharedFolder folder;
  const auto body = [&](int rank) {
    auto world = init_process_group();
    Job reference(folder.path() / "none", {.dropout = 0});
    reference.trainer.train();
    // After two steps rank 1 runs out of memory.
    Greed* greed = nullptr;
    Job job(folder.path() / "run", {.dropout = 0, .callbacks = {.before_step = [&](TrainerCore& core) {
                                                    if (rank == 1 && core.step() == 2) greed->most = 4;
                                                  }}});
    greed = &job.greed;
    EXPECT_EQ(RobustLoop(job.trainer).run(), 0);
    EXPECT_EQ(greed->failures, rank);
    EXPECT_EQ(job.trainer.largest_micro_batch(), 4);
    const auto weights = job.weights(), expected = reference.weights();
    for (size_t i = 0; i < weights.size(); ++i) {
      EXPECT_TRUE(torch::allclose(weights[i], expected[i], 1e-10, 1e-10));
    }
  };
  testing::run_ranks(2, body, {.hosts = 2, .environment = folder.environment()});
}

TEST(RobustLoop, WithoutAHostTheLowestSurvivorSavesWhatWasDone) {
  if (!testing::has_wire()) GTEST_SKIP() << "ranks on several hosts need UCX";
  const SharedFolder folder;
  const auto outcomes = testing::run_ranks_collect(
      4,
      [&](int rank) {
        auto world = init_process_group();
        Job job(folder.path() / "run", {.batch_size = 4,
                                        .dropout = 0,
                                        .every_steps = 2,
                                        .callbacks = {.before_step = [&](TrainerCore& core) {
                                          if (rank >= 2 && core.step() == 3) testing::die();
                                        }}});
        RobustLoop(job.trainer).run();
      },
      {.expected_failures = {0, 1, 2, 3}, .hosts = 2, .environment = folder.environment()});
  if (outcomes[0].pid == 0) return;  // within a rank
  for (const auto& outcome : outcomes) {
    if (outcome.rank >= 2) {
      EXPECT_EQ(outcome.signal.value_or(0), SIGKILL);
    } else {
      EXPECT_EQ(outcome.exit_status.value_or(-1), 1);
      EXPECT_THAT(outcome.exception.value_or(""), HasSubstr("rank "));
    }
  }
  const auto found = find_latest_checkpoint(folder.path() / "run");
  ASSERT_TRUE(found.has_value()) << outcomes[0].output;
  EXPECT_EQ(found->step, 3);
  EXPECT_THAT(found->emergency, HasSubstr("rank "));
}

TEST(RobustLoop, AShardedOptimizerIsNotSavedInPart) {
  const SharedFolder folder;
  const auto outcomes = testing::run_ranks_collect(
      2,
      [&](int rank) {
        auto world = init_process_group();
        DistributedDataParallel model(std::make_shared<SmallNet>());
        ZeroRedundancyOptimizer optimizer(
            model.parameters(), optimizer_class<torch::optim::Adam>(torch::optim::AdamOptions(0.01)));
        DistributedSampler sampler(24);
        Loader loader(Points{24}, {.batch_size = 4, .sampler = &sampler});
        Trainer trainer(model, optimizer, loader, loss_of,
                        {.checkpoint = CheckpointManagerOptions{.directory = folder.path() / "run"},
                         .progress_bar = false,
                         .callbacks = {{.before_step = [&](TrainerCore& core) {
                           if (rank == 1 && core.step() == 2) testing::die();
                         }}}});
        RobustLoop(trainer).run();
      },
      {.expected_failures = {0, 1}, .environment = folder.environment()});
  EXPECT_EQ(outcomes[0].exit_status.value_or(-1), 1);
  EXPECT_THAT(outcomes[0].exception.value_or(""), HasSubstr("rank 1"));
  EXPECT_THAT(outcomes[0].output, HasSubstr("no emergency checkpoint: the optimizer is sharded"));
  EXPECT_FALSE(find_latest_checkpoint(folder.path() / "run").has_value());
}

TEST(RobustLoop, WorksInOneProcessWithoutAGroup) {
  const TemporaryFolder folder;
  const auto train = [&](const std::string& name, int64_t most, int64_t fail_at, int64_t batch_size) {
    Greed greed{.most = most};
    GreedyNet net(greed, 0.3);
    torch::optim::SGD optimizer(net.parameters(), 0.05);
    Loader loader(Points{24}, {.batch_size = batch_size, .shuffle = true});
    Trainer trainer(net, optimizer, loader, loss_of,
                    {.max_epochs = 2,
                     .accumulate_grad_batches = 8 / batch_size,
                     .checkpoint = CheckpointManagerOptions{.directory = folder.path() / name},
                     .progress_bar = false,
                     .callbacks = {{.after_step = [&](TrainerCore& core) {
                       TORCH_CHECK_INDEX(core.step() != fail_at, "the user's mistake");
                     }}}});
    torch::manual_seed(4);
    const int status = RobustLoop(trainer).run();
    EXPECT_EQ(status, 0);
    EXPECT_EQ(trainer.step(), 6);
    return copies(net.parameters());
  };
  const auto expected = train("four", 8, -1, 4);
  EXPECT_TRUE(equal(train("memory", 4, -1, 8), expected));
  EXPECT_THAT(message_of<c10::IndexError>([&] { train("exception", 4, 4, 8); }), HasSubstr("mistake"));
  EXPECT_THAT(find_latest_checkpoint(folder.path() / "exception")->emergency,
              HasSubstr("rank 0 failed after step 4"));
  EXPECT_TRUE(equal(train("exception", 4, -1, 8), expected));

  // A disk that can't be read is no reason to begin at step 0, nor to remove anything.
  const auto there = list_checkpoints(folder.path() / "exception").size();
  failpoint::configure("checkpoint.read=errno(5)");
  EXPECT_THAT(message_of<CheckpointIoError>([&] { train("exception", 4, -1, 8); }),
              HasSubstr("Input/output error"));
  failpoint::configure("");
  EXPECT_EQ(list_checkpoints(folder.path() / "exception").size(), there);

  // What can't be loaded is no reason to save what was not trained.
  torch::nn::Linear other(3, 1);
  torch::optim::SGD optimizer(other->parameters(), 0.05);
  Loader loader(Points{24}, {.batch_size = 8});
  Trainer trainer(*other, optimizer, loader, loss_of,
                  {.checkpoint = CheckpointManagerOptions{.directory = folder.path() / "exception"},
                   .progress_bar = false});
  const auto before = list_checkpoints(folder.path() / "exception").size();
  EXPECT_THAT(message_of<c10::Error>([&] { RobustLoop(trainer).run(); }), HasSubstr("model"));
  EXPECT_EQ(list_checkpoints(folder.path() / "exception").size(), before);
}

TEST(RobustLoop, EndsAtTheDeadlineWithTheStopStatus) {
  const SharedFolder folder;
  const auto outcomes = testing::run_ranks_collect(
      1,
      [&](int) {
        auto world = init_process_group();
        Job job(folder.path() / "run", {.callbacks = {.before_step = [](TrainerCore&) {
                                          ::raise(SIGUSR1);
                                          while (true) ::pause();
                                        }}});
        RobustLoop(job.trainer, {.deadline = std::chrono::milliseconds(50), .stop_status = 99}).run();
      },
      {.expected_failures = {0}, .environment = folder.environment()});
  EXPECT_EQ(outcomes[0].exit_status.value_or(-1), 99) << outcomes[0].output;
  EXPECT_THAT(outcomes[0].output, HasSubstr("the deadline after the signal has passed"));
}

}  // namespace
}  // namespace lockstep::robust_loop_test
