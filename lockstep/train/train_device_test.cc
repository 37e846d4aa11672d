// The Trainer, RobustLoop and the finder of batch sizes with a model on a device.
#include <gmock/gmock.h>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/data/device_loader.h>
#include <lockstep/device/generator_state.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/simulated_device/simulated_device.h>
#include <lockstep/testing/temporary_folder.h>
#include <lockstep/testing/tensors.h>
#include <lockstep/testing/test_device.h>
#include <lockstep/train/batch_size_finder.h>
#include <lockstep/train/internal/failure_agreement.h>
#include <lockstep/train/robust_loop.h>
#include <lockstep/train/testing/fixtures.h>
#include <lockstep/train/trainer.h>

namespace lockstep::train_device_test {

using train::internal::FailureCause;
using train::internal::kind_of;

namespace {

namespace nn = torch::nn;
using data::Example;
using ::testing::HasSubstr;
using testing::Loader;
using testing::on_cpu;
using testing::Points;
using testing::SmallNet;
using testing::TemporaryFolder;
using testing::test_device;
namespace simulated = testing::simulated;

bool close(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return torch::allclose(x, y); });
}

/// More than any device has.
void ask_too_much(c10::Device device) {
  torch::empty({int64_t{1} << 46}, torch::device(device).dtype(torch::kByte));
}

/// Trains SmallNet on `device`; the weights, on the CPU.
template <class AnyLoader>
std::vector<torch::Tensor> trained(c10::Device device, AnyLoader& loader, const std::string& folder = {},
                                   int64_t max_steps = 100, int64_t most = 1 << 20) {
  SmallNet net;
  net.to(device);
  torch::optim::Adam optimizer(net.parameters(), torch::optim::AdamOptions(0.05));
  const auto loss_of = [&](SmallNet& model, const Example& batch) {
    EXPECT_EQ(batch.data.device(), device);
    EXPECT_EQ(batch.target.device(), device);
    if (model.is_training() && batch.data.size(0) > most) ask_too_much(device);
    return nn::functional::mse_loss(model.forward(batch.data), batch.target);
  };
  TrainerOptions options{
      .max_epochs = 2, .max_steps = max_steps, .clip_grad_norm = 1.0, .progress_bar = false};
  if (!folder.empty()) options.checkpoint = CheckpointManagerOptions{.directory = folder};
  Loader validation(Points{9}, {.batch_size = 4});
  Trainer trainer(net, optimizer, loader, loss_of, options);
  EXPECT_EQ(trainer.options().device, device);
  trainer.validate_on(validation);
  if (folder.empty()) {
    trainer.train();
  } else {
    EXPECT_EQ(RobustLoop(trainer).run(), 0);
    trainer.save();
  }
  if (trainer.finished() && max_steps == 100) {
    EXPECT_GT(trainer.metrics().at("validation/loss"), 0);
  }
  return on_cpu(net.parameters());
}

TEST(TrainerOnDevice, BringsBatchesThereAndTrainsAsOnTheCpu) {
  Loader plain(Points{50}, {.batch_size = 8});
  Loader pinned(Points{50}, {.batch_size = 8, .num_workers = 1, .pin_memory = true});
  Loader host(Points{50}, {.batch_size = 8, .num_workers = 1, .pin_memory = true});
  data::DeviceLoader ahead(host, test_device());
  const auto expected = trained(at::kCPU, plain);
  EXPECT_TRUE(close(trained(test_device(), plain), expected));
  EXPECT_TRUE(close(trained(test_device(), pinned), expected));
  EXPECT_TRUE(close(trained(test_device(), ahead), expected));
}

TEST(TrainerOnDevice, TrainsInShards) {
  const testing::SharedFolder folder;
  testing::run_ranks(2,
                     [&](int) {
                       auto world = init_process_group();
                       const auto state_of = [&](std::optional<c10::Device> device, const std::string& name) {
                         data::DistributedSampler sampler(40);
                         Loader loader(Points{40}, {.batch_size = 8, .sampler = &sampler});
                         TrainerOptions options{
                             .max_epochs = 2, .clip_grad_norm = 1.0, .progress_bar = false};
                         options.strategy = Strategy::fsdp;
                         options.fsdp.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(9);
                         options.fsdp.device_id = device;
                         options.checkpoint = CheckpointManagerOptions{.directory = folder.path() / name};
                         const auto loss_of = [](auto& model, const Example& batch) {
                           return nn::functional::mse_loss(model.forward(batch.data), batch.target);
                         };
                         Trainer trainer(std::make_shared<SmallNet>(), torch::optim::AdamOptions(0.05),
                                         loader, loss_of, options);
                         EXPECT_EQ(trainer.options().device, device.value_or(at::kCPU));
                         trainer.restore();
                         trainer.train();
                         trainer.save();
                         return trainer.with_model([]<class Model>(Model& model) {
                           if constexpr (ShardedModel<Model>) return model.full_state_dict();
                           return StateDict();
                         });
                       };
                       const auto expected = state_of({}, "cpu"), state = state_of(test_device(), "device");
                       ASSERT_EQ(state.size(), expected.size());
                       for (const auto& [name, value] : expected) {
                         EXPECT_TRUE(torch::allclose(state.at(name).toTensor(), value.toTensor())) << name;
                       }
                       // What one form has saved, the other one loads.
                       for (const auto& [name, value] : state_of(test_device(), "cpu")) {
                         EXPECT_TRUE(at::equal(value.toTensor(), expected.at(name).toTensor())) << name;
                       }
                     },
                     {.environment = folder.environment()});
}

TEST(TrainerOnDevice, GoesOnInTheMiddleOfAnEpochWithBatchesFetchedAhead) {
  const TemporaryFolder folder;
  const auto options = data::DataLoaderOptions{.batch_size = 8, .shuffle = true, .num_workers = 1, .seed = 4};
  const auto run = [&](const std::string& name, int64_t max_steps) {
    Loader host(Points{50}, options);
    data::DeviceLoader loader(host, test_device(), {.prefetch = 3});
    return trained(test_device(), loader, folder.path() / name, max_steps);
  };
  const auto expected = run("whole", 12);
  for (const int64_t steps : {3, 7, 9}) {  // 7: the end of the first epoch, which the loader has seen
    const std::string name = std::to_string(steps);
    run(name, steps);
    EXPECT_TRUE(close(run(name, 12), expected)) << "interrupted after step " << steps;
  }
}

TEST(RobustLoopOnDevice, LowersTheMicroBatchWhenTheDeviceHasNoMemory) {
  const TemporaryFolder folder;
  Loader loader(Points{48}, {.batch_size = 8});
  const auto expected = trained(test_device(), loader);
  const auto before = simulated::counters();
  EXPECT_TRUE(close(trained(test_device(), loader, folder.path() / "short", 100, /*most=*/3), expected));
  if (testing::test_device_is_simulated()) {
    EXPECT_EQ(simulated::counters().emptied_caches, before.emptied_caches + 2) << "for 4 at once, then for 2";
  }
}

TEST(RobustLoopOnDevice, DrawsTheSameNumbersWhenAStepIsDoneAgain) {
  const TemporaryFolder folder;
  const auto weights = [&](const std::string& name, bool fails) {
    SmallNet net(/*dropout=*/0.5);
    net.to(test_device());
    accelerator_generators().at(0).set_current_seed(7);
    torch::optim::SGD optimizer(net.parameters(), torch::optim::SGDOptions(0.05));
    const auto loss_of = [&](SmallNet& model, const Example& batch) {
      const auto prediction = model.forward(batch.data);  // draws
      if (fails && batch.data.size(0) > 4) ask_too_much(test_device());
      return nn::functional::mse_loss(prediction, batch.target);
    };
    Loader loader(Points{24}, {.batch_size = 8});
    const TrainerOptions options{.checkpoint = CheckpointManagerOptions{.directory = folder.path() / name},
                                 .progress_bar = false};
    Trainer trainer(net, optimizer, loader, loss_of, options);
    if (!fails) trainer.set_max_micro_batch(4);
    EXPECT_EQ(RobustLoop(trainer).run(), 0);
    EXPECT_EQ(trainer.step(), 3);
    EXPECT_EQ(trainer.largest_micro_batch(), 4);
    return on_cpu(net.parameters());
  };
  EXPECT_TRUE(testing::equal(weights("fails", true), weights("works", false)));
}

/// Points whose targets take a megabyte each; the first number of it is the target.
struct WidePoints {
  static constexpr int64_t kBytes = 1 << 20;
  int64_t count = 0;
  int64_t size() const { return count; }
  Example get_batch(std::span<const int64_t> indices) const {
    auto batch = Points{count}.get_batch(indices);
    batch.target = batch.target.expand({-1, kBytes / static_cast<int64_t>(sizeof(double))}).contiguous();
    return batch;
  }
};

TEST(RobustLoopOnDevice, LowersTheMicroBatchWhenABatchDoesNotFit) {
  if (!testing::test_device_is_simulated()) GTEST_SKIP() << "the simulation's memory can be limited";
  const TemporaryFolder folder;
  const auto weights = [&](const std::string& name, bool limited) {
    SmallNet net;
    net.to(test_device());
    torch::optim::SGD optimizer(net.parameters(), torch::optim::SGDOptions(0.05));
    const auto loss_of = [](SmallNet& model, const Example& batch) {
      return nn::functional::mse_loss(model.forward(batch.data), batch.target.narrow(1, 0, 1));
    };
    data::DataLoader<WidePoints> loader(WidePoints{24}, {.batch_size = 8});
    const TrainerOptions options{.checkpoint = CheckpointManagerOptions{.directory = folder.path() / name},
                                 .progress_bar = false};
    Trainer trainer(net, optimizer, loader, loss_of, options);
    if (!limited) trainer.set_max_micro_batch(4);
    std::optional<simulated::MemoryLimit> limit;
    if (limited) limit.emplace(test_device().index(), 5 * WidePoints::kBytes);
    EXPECT_EQ(RobustLoop(trainer).run(), 0);
    EXPECT_EQ(trainer.step(), 3);
    EXPECT_EQ(trainer.largest_micro_batch(), 4);
    return on_cpu(net.parameters());
  };
  EXPECT_TRUE(testing::equal(weights("limited", true), weights("works", false)));
}

/// A loader with the same batches in each epoch, which it keeps.
template <class AnyBatch>
struct Kept {
  using Batch = AnyBatch;
  std::vector<AnyBatch> batches;
  auto begin() { return batches.begin(); }
  auto end() { return batches.end(); }
  StateDict state_dict(int64_t /*unseen_batches*/) const { return {}; }
  void load_state_dict(const StateDict& /*state*/) {}
};

/// A batch that can't be copied.
struct OnlyMoved {
  OnlyMoved(torch::Tensor data, torch::Tensor target) : data(std::move(data)), target(std::move(target)) {}
  OnlyMoved(OnlyMoved&&) = default;
  template <class Visitor>
  void visit_tensors(Visitor&& visit) {
    visit(data), visit(target);
  }
  torch::Tensor data, target;
};

TEST(TrainerOnDevice, LeavesTheValidationLoaderItsBatches) {
  const std::vector<int64_t> indices = {0, 1, 2};
  const auto points = Points{3}.get_batch(indices);
  const auto loss_of = [](auto& model, const auto& batch) {
    return nn::functional::mse_loss(model.forward(batch.data), batch.target);
  };
  for (const auto& device : {c10::Device(at::kCPU), test_device()}) {
    SmallNet net;
    net.to(device);
    torch::optim::SGD optimizer(net.parameters(), torch::optim::SGDOptions(0.05));
    Loader loader(Points{8}, {.batch_size = 8});
    Trainer trainer(net, optimizer, loader, loss_of, {.progress_bar = false});
    Kept<Example> copied{{points}};
    trainer.validate_on(copied);
    const double loss = trainer.validate().at("validation/loss");
    EXPECT_EQ(trainer.validate().at("validation/loss"), loss);
    EXPECT_TRUE(copied.batches.at(0).data.is_cpu());
    Kept<OnlyMoved> moved;
    moved.batches.emplace_back(points.data.to(device), points.target.to(device));
    trainer.validate_on(moved);
    EXPECT_EQ(trainer.validate().at("validation/loss"), loss);
    EXPECT_EQ(trainer.validate().at("validation/loss"), loss);
  }
}

TEST(RobustLoopOnDevice, AllRanksMakeRoomWhenOneHasNoMemory) {
  testing::run_ranks(2, [](int rank) {
    auto world = init_process_group();
    test_device();
    const auto before = simulated::counters();
    const auto usual_timeout = lockstep_backend_of(*default_group())->timeout();
    std::exception_ptr failure;
    try {
      if (rank == 1) ask_too_much(test_device());
      C10_THROW_ERROR(DistBackendError, "a peer has left");
    } catch (...) {
      failure = std::current_exception();
    }
    EXPECT_EQ(train::internal::kind_of(failure),
              rank == 1 ? train::internal::FailureCause::kOutOfMemory : train::internal::FailureCause::kPeer);
    const auto agreement = train::internal::agree_on_failure(
        {.kind = train::internal::kind_of(failure), .text = text_of(failure)}, std::chrono::minutes(1));
    ASSERT_EQ(agreement.reports.size(), 2U);
    EXPECT_EQ(agreement.reports[1].kind, train::internal::FailureCause::kOutOfMemory);
    EXPECT_EQ(lockstep_backend_of(*default_group())->timeout(), usual_timeout);
    if (testing::test_device_is_simulated()) {
      EXPECT_EQ(simulated::counters().emptied_caches, before.emptied_caches + 1);
    }
  });
}

TEST(BatchSizeFinderOnDevice, FindsWhatTheDeviceHasMemoryFor) {
  if (!testing::test_device_is_simulated()) GTEST_SKIP() << "the simulation's memory can be limited";
  const auto device = test_device();
  SmallNet net(0.3);
  net.to(device);
  torch::optim::Adam optimizer(net.parameters(), torch::optim::AdamOptions(0.1));
  constexpr int64_t kSample = 1 << 20;  // bytes of ballast for each sample
  const auto loss_of = [&](SmallNet& model, const Example& batch) {
    EXPECT_EQ(batch.data.device(), device);
    const auto ballast =
        torch::empty({batch.data.size(0), kSample}, torch::device(device).dtype(torch::kByte));
    return nn::functional::mse_loss(model.forward(batch.data), batch.target);
  };
  const auto weights = on_cpu(net.parameters());
  const auto random = accelerator_generators().at(0).get_state();
  const simulated::MemoryLimit limit(device.index(), 41 * kSample);
  const auto found =
      scale_batch_size(net, optimizer, Points{50}, loss_of,
                       {.mode = BatchSizeFinderOptions::Mode::binsearch, .steps_per_trial = 1});
  EXPECT_EQ(found.batch_size, 40);
  EXPECT_THAT(found.trials[5].reason, HasSubstr("rank 0 ran out of memory"));
  EXPECT_GE(found.trials[4].bytes, 32 * kSample);
  EXPECT_LT(found.trials[4].bytes, 33 * kSample);
  EXPECT_TRUE(close(on_cpu(net.parameters()), weights));
  EXPECT_TRUE(optimizer.state().empty());
  EXPECT_TRUE(at::equal(accelerator_generators().at(0).get_state(), random));
}

TEST(FailureCause, KnowsWhatTheDriverAndItsLibrariesSay) {
  const auto kind_of = [](const char* text, bool of_backend) {
    try {
      if (of_backend) C10_THROW_ERROR(DistBackendError, text);
      C10_THROW_ERROR(Error, text);
    } catch (...) {
      return train::internal::kind_of(std::current_exception());
    }
  };
  using train::internal::FailureCause;
  for (const char* text : {"CUDA out of memory. Tried to allocate 2 GiB", "CUDA error: out of memory",
                           "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"}) {
    EXPECT_EQ(kind_of(text, false), FailureCause::kOutOfMemory) << text;
  }
  EXPECT_EQ(kind_of("NCCL error: ... Cuda failure 2 'out of memory'", true), FailureCause::kOutOfMemory);
  EXPECT_EQ(kind_of("CUDA error: an illegal memory access was encountered", false), FailureCause::kOther);
  EXPECT_EQ(kind_of("rank 1 is gone", true), FailureCause::kPeer);
}

}  // namespace
}  // namespace lockstep::train_device_test
