// What a Trainer gives back to its loader, where it is left in the middle of an epoch.
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/data/data_loader.h>
#include <lockstep/data/samplers/sampler.h>
#include <lockstep/testing/temporary_folder.h>
#include <lockstep/testing/tensors.h>
#include <lockstep/train/testing/fixtures.h>
#include <lockstep/train/trainer.h>

namespace lockstep::trainer_given_back_test {
namespace {

using data::Example;
using testing::copies;
using testing::equal;
using testing::loss_of;
using testing::Points;
using testing::SmallNet;
using testing::TemporaryFolder;

/// Points with noise from the default generator.
struct Noisy {
  Points points;
  int64_t size() const { return points.size(); }
  Example get_batch(std::span<const int64_t> indices) const {
    Example example = points.get_batch(indices);
    example.data.add_(torch::rand_like(example.data));
    return example;
  }
};

/// Two epochs of three batches, whose order, noise and dropout are all from the default generator.
struct NoisyJob {
  explicit NoisyJob(const TrainerCallbacks& callbacks = {}, std::optional<int64_t> max_steps = {},
                    const std::optional<CheckpointManagerOptions>& checkpoint = {})
      : trainer(model, optimizer, loader, loss_of,
                {.max_epochs = 2,
                 .max_steps = max_steps,
                 .checkpoint = checkpoint,
                 .progress_bar = false,
                 .callbacks = {callbacks}}) {}
  std::vector<torch::Tensor> weights() const { return copies(model.parameters()); }

  std::shared_ptr<SmallNet> net = std::make_shared<SmallNet>(0.3);
  SmallNet& model = *net;
  torch::optim::SGD optimizer{model.parameters(), 0.1};
  data::RandomSampler sampler{6};
  data::DataLoader<Noisy> loader{Noisy{{6}}, {.batch_size = 2, .sampler = &sampler}};
  Trainer<SmallNet, data::DataLoader<Noisy>, std::remove_const_t<decltype(loss_of)>> trainer;
};

std::vector<torch::Tensor> undisturbed() {
  NoisyJob job;
  job.trainer.train();
  return job.weights();
}

TEST(Trainer, DrawsTheSameNumbersWhenItWasStopped) {
  const auto expected = undisturbed();
  const auto stop = [](TrainerCore& core) { core.stop(); };
  NoisyJob job({.after_epoch = stop, .after_step = stop});
  while (!job.trainer.finished()) job.trainer.train();
  EXPECT_TRUE(equal(job.weights(), expected));
}

TEST(Trainer, DrawsTheSameNumbersAfterMaxSteps) {
  const auto expected = undisturbed();
  for (const int64_t max_steps : {2, 3, 4}) {  // of three an epoch
    const TemporaryFolder folder;
    const CheckpointManagerOptions checkpoint{.directory = folder.path(), .every_epochs = 1};
    {
      NoisyJob shorter({}, max_steps, checkpoint);
      shorter.trainer.train();
      EXPECT_EQ(shorter.trainer.step(), max_steps);
    }
    NoisyJob job({}, {}, checkpoint);
    ASSERT_TRUE(job.trainer.restore().has_value());
    job.trainer.train();
    EXPECT_EQ(job.trainer.step(), 6);
    EXPECT_TRUE(equal(job.weights(), expected)) << max_steps;
  }
}

TEST(Trainer, AfterAFailureTheEpochGoesOn) {
  const auto expected = undisturbed();
  int64_t failures = 0;
  const auto fail_once_at = [&](int64_t step) {
    return [&failures, step, failed = false](TrainerCore& core) mutable {
      if (core.step() != step || std::exchange(failed, true)) return;
      ++failures;
      throw std::runtime_error("the user's mistake");
    };
  };
  for (const int64_t step : {0, 2, 4}) {
    NoisyJob job({.before_step = fail_once_at(step), .after_step = fail_once_at(step + 1)});
    while (!job.trainer.finished()) {
      try {
        job.trainer.train();
      } catch (const std::runtime_error&) {
      }
    }
    EXPECT_EQ(job.trainer.step(), 6);
    EXPECT_TRUE(equal(job.weights(), expected)) << step;
  }
  EXPECT_EQ(failures, 6);
}

}  // namespace
}  // namespace lockstep::trainer_given_back_test
