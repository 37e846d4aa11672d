// The batch-size finder: what it finds, that all ranks find the same, and that nothing is left of its trials.
#include <gmock/gmock.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/train/batch_size_finder.h>
#include <lockstep/train/testing/fixtures.h>

namespace lockstep::batch_size_finder_test {
namespace {

using data::Example;
using Mode = BatchSizeFinderOptions::Mode;
using testing::copies;
using ::testing::ElementsAre;
using testing::equal;
using ::testing::HasSubstr;
using testing::message_of;
using testing::Points;
using testing::SmallNet;

std::vector<int64_t> sizes(const BatchSizeReport& report) {
  std::vector<int64_t> sizes;
  for (const auto& trial : report.trials) sizes.push_back(trial.batch_size);
  return sizes;
}

TEST(BatchSizeFinder, FindsTheLargestThatFitsOnAllRanks) {
  testing::run_ranks(2, [](int rank) {
    auto world = init_process_group();
    torch::manual_seed(5 + rank);
    DistributedDataParallel model(std::make_shared<SmallNet>(0.3));
    torch::optim::Adam optimizer(model.parameters(), torch::optim::AdamOptions(0.1));
    int64_t most = 40;  // that rank 1 has memory for
    const auto loss_of = [&](auto& net, const Example& batch) {
      if (rank == 1 && batch.data.size(0) > most) torch::empty({int64_t{1} << 46});
      return torch::nn::functional::mse_loss(net.forward(batch.data), batch.target);
    };
    const auto find = [&](const BatchSizeFinderOptions& options) {
      return scale_batch_size(model, optimizer, Points{50}, loss_of, options);
    };
    const auto weights = copies(model.parameters());
    const auto random = at::detail::getDefaultCPUGenerator().get_state();

    const auto power = find({});
    EXPECT_EQ(power.batch_size, 32);
    EXPECT_THAT(sizes(power), ElementsAre(2, 4, 8, 16, 32, 64));
    EXPECT_THAT(power.trials.back().reason, HasSubstr("rank 1 ran out of memory"));
    for (const auto& trial : power.trials) EXPECT_EQ(trial.samples_per_second > 0, trial.fits);
    EXPECT_THAT(power.table(), HasSubstr("64            -    rank 1 ran out of memory"));
    EXPECT_TRUE(equal(copies(model.parameters()), weights));
    EXPECT_TRUE(optimizer.state().empty());
    EXPECT_TRUE(at::equal(at::detail::getDefaultCPUGenerator().get_state(), random));

    const auto exact = find({.mode = Mode::binsearch, .steps_per_trial = 1});
    EXPECT_EQ(exact.batch_size, 40);
    EXPECT_THAT(sizes(exact), ElementsAre(2, 4, 8, 16, 32, 64, 48, 40, 44, 42, 41));

    most = 1000;
    EXPECT_THAT(sizes(find({.steps_per_trial = 1, .max_val = 100})), ElementsAre(2, 4, 8, 16, 32, 64, 100));
    EXPECT_EQ(find({.steps_per_trial = 1, .init_val = 3, .max_trials = 2}).batch_size, 6);
    most = 1;
    EXPECT_EQ(find({}).batch_size, 0) << "not even the first";
  });
}

TEST(BatchSizeFinder, TrainingGoesOnAsIfNothingHadBeenTried) {
  testing::run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto train = [&](bool find) {
      DistributedDataParallel model(std::make_shared<SmallNet>(0.3));
      torch::optim::Adam optimizer(model.parameters(), torch::optim::AdamOptions(0.1));
      torch::manual_seed(5 + rank);
      const auto loss_of = [&](auto& net, const Example& batch) {
        if (rank == 0 && batch.data.size(0) > 4) torch::empty({int64_t{1} << 46});
        return torch::nn::functional::mse_loss(net.forward(batch.data), batch.target);
      };
      for (int64_t step = 0; step < 6; ++step) {
        if (find && step == 3) {
          EXPECT_EQ(scale_batch_size(model, optimizer, Points{9}, loss_of).batch_size, 4);
        }
        optimizer.zero_grad();
        loss_of(model, Points{50}.get_batch(std::vector<int64_t>{step, rank})).backward();
        optimizer.step();
      }
      return copies(model.parameters());
    };
    const auto expected = train(false);
    EXPECT_TRUE(equal(train(true), expected));
  });
}

TEST(BatchSizeFinder, DoesNotTryWhatTheMachineHasNoMemoryFor) {
  torch::nn::Linear model(1, 1);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  std::vector<torch::Tensor> kept;
  const auto hungry = [&](auto& net, const Example& batch) {
    // 1 MiB a sample, which is really touched.
    const auto ballast = torch::ones({batch.data.size(0), 1 << 18});
    return net.forward(batch.data.slice(1, 0, 1).to(torch::kFloat)).sum() * ballast[0][0];
  };
  const auto found =
      scale_batch_size(*model, optimizer, Points{50}, hungry,
                       {.steps_per_trial = 1, .init_val = 8, .max_val = 1 << 20, .memory_share = 0.002});
  ASSERT_FALSE(found.trials.empty());
  EXPECT_FALSE(found.trials.back().fits);
  EXPECT_THAT(found.trials.back().reason, HasSubstr("of the "));
  EXPECT_LT(found.batch_size, 4096);
  EXPECT_GE(found.batch_size, 8);

  const auto refused = [&](const BatchSizeFinderOptions& options) {
    return message_of<c10::ValueError>(
        [&] { scale_batch_size(*model, optimizer, Points{50}, hungry, options); });
  };
  EXPECT_THAT(refused({.init_val = 0}), HasSubstr("init_val is 0"));
  EXPECT_THAT(refused({.init_val = 9, .max_val = 8}), HasSubstr("max_val is 8"));
  EXPECT_THAT(refused({.memory_share = 2}), HasSubstr("memory_share is 2"));
}

TEST(BatchSizeFinder, ThrowsWhatRestoringThrowsUnlessATrialDid) {
  struct Unloadable : torch::optim::SGD {
    using SGD::SGD;
    void load(torch::serialize::InputArchive& /*archive*/) override { TORCH_CHECK(false, "can't be loaded"); }
  };
  SmallNet model;
  Unloadable optimizer(model.parameters(), torch::optim::SGDOptions(0.1));
  bool fails = false;
  const auto error = [&] {
    return message_of<c10::Error>([&] {
      scale_batch_size(model, optimizer, Points{50},
                       [&](auto& net, const Example& batch) {
                         TORCH_CHECK(!fails, "the user's mistake");
                         return testing::loss_of(net, batch);
                       },
                       {.max_trials = 1});
    });
  };
  EXPECT_THAT(error(), HasSubstr("can't be loaded"));
  fails = true;
  EXPECT_THAT(error(), HasSubstr("the user's mistake"));
}

}  // namespace
}  // namespace lockstep::batch_size_finder_test
