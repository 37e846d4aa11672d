// That checkpoints hold what the device's streams will have made, and that the program need not wait for it.
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint/checkpoint_manager.h>
#include <lockstep/checkpoint/internal/save_job.h>
#include <lockstep/checkpoint/rng_state.h>
#include <lockstep/checkpoint/testing/scratch.h>
#include <lockstep/checkpoint/testing/states.h>
#include <lockstep/checkpoint/training_state.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/simulated_device/simulated_device.h>
#include <lockstep/testing/test_device.h>

namespace lockstep::checkpoint_device_test {
namespace {

using testing::current_stream;
using testing::enqueue;
using testing::Gate;
using ::testing::HasSubstr;
using testing::message_of;
using testing::other_stream;
using testing::Scratch;
using testing::StateHolder;
using testing::synchronize;
using testing::test_device;

constexpr int64_t kLarge = 1 << 20;  // numbers: copied beside the training with copy_later
constexpr int64_t kSmall = 4;

torch::Tensor filled(int64_t size, double value) {
  return torch::full({size}, value, torch::kFloat).to(test_device());
}

/// What a program's next step puts there, when its stream comes to it.
void overwrite_later(const torch::Tensor& tensor, double value) {
  tensor.copy_(torch::full({tensor.numel()}, value, torch::kFloat).pin_memory(), /*non_blocking=*/true);
}

struct Tensors {
  StateDict state() const { return {{"large", large}, {"small", small}}; }
  torch::Tensor large = filled(kLarge, 1), small = filled(kSmall, 1);
};

bool holds(const std::filesystem::path& directory, double value) {
  const auto model = from_object<StateDict>(load_checkpoint(directory).state.at("model"));
  return model.at("large").toTensor().eq(value).all().item<bool>() &&
         model.at("small").toTensor().eq(value).all().item<bool>();
}

TEST(CheckpointOnDevice, TakesWhatTheCurrentStreamWillHaveMade) {
  for (const bool beside : {false, true}) {  // the default stream, or another one
    const Scratch scratch;
    Tensors tensors;
    synchronize(test_device());
    std::optional<c10::StreamGuard> current;
    if (beside) current.emplace(other_stream(test_device()));
    Gate gate;
    enqueue(current_stream(test_device()), [&] { gate.wait(); });
    overwrite_later(tensors.large, 2);
    overwrite_later(tensors.small, 2);
    std::thread opener([&] {
      gate.wait_for_arrival();
      gate.open();
    });
    const checkpoint::internal::MemberRanks ranks;
    checkpoint::internal::SaveJob job(scratch.path() / "a", {{"model", to_object(tensors.state())}}, {}, {},
                                      {},
                                      /*managed=*/false, ranks);
    checkpoint::internal::Pages memory;
    job.stage(memory, ranks);
    overwrite_later(tensors.large, 3);  // the next step
    overwrite_later(tensors.small, 3);
    opener.join();
    job.write(ranks);
    EXPECT_TRUE(holds(scratch.path() / "a", 2));
  }
}

TEST(CheckpointOnDevice, CopiesLaterWithoutWaiting) {
  const Scratch scratch;
  Tensors tensors;
  synchronize(test_device());
  const checkpoint::internal::MemberRanks ranks;
  checkpoint::internal::Pages memory;
  Gate gate;
  enqueue(current_stream(test_device()), [&] { gate.wait(); });
  overwrite_later(tensors.large, 2);
  overwrite_later(tensors.small, 2);
  checkpoint::internal::SaveJob job(scratch.path() / "a", {{"model", to_object(tensors.state())}}, {}, {}, {},
                                    /*managed=*/false, ranks);
  job.stage(memory, ranks, /*later=*/true);  // returns, though nothing can be copied yet
  overwrite_later(tensors.small, 3);         // a BatchNorm's running mean, in the next forward
  gate.open();
  job.copy_rest(ranks);
  overwrite_later(tensors.large, 3);  // the optimizer's step
  job.write(ranks);
  EXPECT_TRUE(holds(scratch.path() / "a", 2));
}

TEST(CheckpointOnDevice, AForkedChildDoesNotWaitForItsParentsCopies) {
  const Scratch scratch;
  Tensors tensors;
  synchronize(test_device());
  StateHolder training;
  training.state["model"] = to_object(tensors.state());
  CheckpointManager manager({.directory = scratch.path(), .copy_later = true});
  Gate gate;
  enqueue(current_stream(test_device()), [&] { gate.wait(); });
  manager.save(training, {.step = 1});
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::alarm(30);
    manager.finish_copy();
    ::_exit(0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  gate.open();
  manager.finish_copy();
  manager.wait();
  EXPECT_TRUE(holds(manager.last_saved()->directory, 1));
}

TEST(CheckpointOnDevice, ATensorThatIsChangedMeanwhileFailsTheCheckpoint) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the fault that is to be noticed is a race";
#endif
  const Scratch scratch;
  Tensors tensors;
  const checkpoint::internal::MemberRanks ranks;
  checkpoint::internal::Pages memory;
  checkpoint::internal::SaveJob job(scratch.path() / "a", {{"model", to_object(tensors.state())}}, {}, {}, {},
                                    /*managed=*/false, ranks);
  job.stage(memory, ranks, /*later=*/true);
  tensors.large.add_(1);
  job.copy_rest(ranks);
  EXPECT_THAT(message_of<c10::ValueError>([&] { job.write(ranks); }),
              HasSubstr("'large' of model was changed"));
}

TEST(CheckpointOnDevice, StagesInPageLockedMemory) {
  if (!testing::test_device_is_simulated()) GTEST_SKIP() << "the simulation counts";
  const Scratch scratch;
  Tensors tensors;
  const checkpoint::internal::MemberRanks ranks;
  const auto before = testing::simulated::counters();
  {
    checkpoint::internal::Pages memory;
    for (const std::string name : {"a", "b"}) {
      checkpoint::internal::SaveJob job(scratch.path() / name, {{"model", to_object(tensors.state())}}, {},
                                        {}, {},
                                        /*managed=*/false, ranks);
      job.stage(memory, ranks);
      job.write(ranks);
    }
    EXPECT_EQ(testing::simulated::counters().registrations, before.registrations + 1) << "once for both";
  }
  EXPECT_EQ(testing::simulated::counters().registered_now, before.registered_now);
}

/// A model on a device, and what trains it.
struct Training {
  explicit Training(c10::Device device) {
    torch::manual_seed(3);
    net->to(device);
    optimizer = std::make_unique<torch::optim::Adam>(net->parameters(), torch::optim::AdamOptions(0.1));
    state.add_model("model", *net);
    state.add_optimizer("optimizer", *optimizer, *net);
    state.add_rng();
  }
  void step() {
    optimizer->zero_grad();
    const auto device = net->weight.device();
    const auto noise = torch::rand({4, 3}, torch::device(device));  // of the device's generator
    (net->forward(noise + 1) * 2).sum().backward();
    optimizer->step();
  }
  std::vector<torch::Tensor> weights() const {
    std::vector<torch::Tensor> weights;
    for (const auto& each : net->parameters()) weights.push_back(each.detach().cpu().clone());
    return weights;
  }
  torch::nn::Linear net{3, 2};
  std::unique_ptr<torch::optim::Adam> optimizer;
  TrainingState state;
};

TEST(CheckpointOnDevice, TrainingGoesOnThereAsIfItHadNotStopped) {
  const Scratch scratch;
  Training first(test_device());
  CheckpointManager manager({.directory = scratch.path()});
  first.step();
  manager.save(first.state, {.step = 1});
  manager.wait();
  first.step();
  first.step();
  Training again(test_device());
  again.step();
  again.step();
  ASSERT_TRUE(manager.restore(again.state));
  EXPECT_EQ(again.net->weight.device(), test_device());
  for (const auto& [key, state] : again.optimizer->state()) {
    EXPECT_EQ(static_cast<torch::optim::AdamParamState&>(*state).exp_avg().device(), test_device());
  }
  again.step();
  again.step();
  const auto expected = first.weights(), got = again.weights();
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(got[i].equal(expected[i]));
  // What was on a device can be loaded onto the CPU. The device's random numbers stay its own.
  Training here(at::kCPU);
  ASSERT_TRUE(manager.restore(here.state));
  EXPECT_TRUE(here.net->weight.is_cpu());
}

TEST(CheckpointOnDevice, RandomNumbersOfDevicesAreSaved) {
  const auto draw = [] { return torch::rand({8}, torch::device(test_device())).cpu(); };
  const auto state = get_rng_state();
  const auto numbers = draw();
  EXPECT_FALSE(draw().equal(numbers));
  set_rng_state(state);
  EXPECT_TRUE(draw().equal(numbers));
  derive_rng_state(7, 0, 2);
  const auto derived = draw();
  derive_rng_state(7, 1, 2);
  EXPECT_FALSE(draw().equal(derived)) << "another rank's";
  derive_rng_state(7, 0, 2);
  EXPECT_TRUE(draw().equal(derived));
}

TEST(CheckpointOnDevice, LoadsOntoTheDevice) {
  const Scratch scratch;
  Tensors tensors;
  save_checkpoint(scratch.path() / "a", {{"model", to_object(tensors.state())}}, {}, {});
  const auto loaded = load_checkpoint(scratch.path() / "a", {.device = test_device()});
  const auto model = from_object<StateDict>(loaded.state.at("model"));
  EXPECT_EQ(model.at("large").toTensor().device(), test_device());
  EXPECT_TRUE(model.at("large").toTensor().cpu().eq(1).all().item<bool>());
}

}  // namespace
}  // namespace lockstep::checkpoint_device_test
