// The simulated device itself: that it is as asynchronous, and as strict, as tests of device code need it.
#include <gmock/gmock.h>
#include <thread>
#include <vector>

#include <ATen/DeviceAccelerator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/device/host_memory.h>
#include <lockstep/testing/simulated_device/simulated_device.h>
#include <lockstep/testing/test_device.h>

namespace lockstep::testing::simulated_device_test {
namespace {

using ::testing::HasSubstr;

class SimulatedDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!test_device_is_simulated()) GTEST_SKIP() << "LOCKSTEP_TEST_DEVICE asks for another device";
    device_ = test_device();
  }
  torch::Tensor pinned(std::vector<float> values) { return torch::tensor(values).pin_memory(); }
  static std::vector<float> values_of(const torch::Tensor& tensor) {
    auto host = tensor.cpu().contiguous();
    return {host.data_ptr<float>(), host.data_ptr<float>() + host.numel()};
  }

  c10::Device device_{c10::kCPU};
};

TEST_F(SimulatedDevice, IsTorchsAccelerator) {
  EXPECT_EQ(at::getAccelerator(), c10::kPrivateUse1);
  EXPECT_EQ(device_.str(), "sim:0");
  EXPECT_EQ(at::accelerator::deviceCount(), 2);
  EXPECT_EQ(test_device_count(), 2);
  EXPECT_TRUE(torch::ones({3}).pin_memory().is_pinned());
  EXPECT_FALSE(torch::ones({3}).is_pinned());
  EXPECT_TRUE(torch::empty({3}, torch::TensorOptions().pinned_memory(true)).is_pinned());
  EXPECT_EQ(torch::ones({2}, test_device(1)).device(), test_device(1));
  EXPECT_THROW(torch::ones({2}, c10::Device(c10::kPrivateUse1, 2)), c10::Error);
}

TEST_F(SimulatedDevice, CopiesOfPinnedMemoryRunInTheStream) {
  auto source = pinned({1, 2, 3});
  auto result = pinned({7, 7, 7});
  auto on_device = torch::zeros({3}, device_);
  Gate gate;
  enqueue(current_stream(device_), [&] { gate.wait(); });
  on_device.copy_(source, /*non_blocking=*/true);
  result.copy_(on_device, /*non_blocking=*/true);
  auto doubled = on_device.clone();
  // All calls have returned, and nothing has happened.
  EXPECT_EQ(values_of(result), (std::vector<float>{7, 7, 7}));
  source[0] = 5;  // the copy has not read it yet
  gate.open();
  synchronize(device_);
  EXPECT_EQ(values_of(result), (std::vector<float>{5, 2, 3}));
  EXPECT_EQ(values_of(doubled), (std::vector<float>{5, 2, 3}));
}

TEST_F(SimulatedDevice, PinnedMemoryOutlivesItsCopies) {
  auto on_device = torch::zeros({3}, device_);
  Gate gate;
  enqueue(current_stream(device_), [&] { gate.wait(); });
  on_device.copy_(pinned({4, 5, 6}), /*non_blocking=*/true);
  gate.open();
  EXPECT_EQ(values_of(on_device), (std::vector<float>{4, 5, 6}));
}

TEST_F(SimulatedDevice, CopiesOfOrdinaryMemoryStopTheHost) {
  auto source = torch::tensor({1.0f, 2.0f});
  auto before = simulated::counters();
  auto on_device = torch::zeros({2}, device_);
  on_device.copy_(source, /*non_blocking=*/true);
  source.zero_();
  EXPECT_EQ(values_of(on_device), (std::vector<float>{1, 2}));
  auto after = simulated::counters();
  EXPECT_EQ(after.host_to_device_bytes - before.host_to_device_bytes, 8);
  EXPECT_EQ(after.device_to_host_bytes - before.device_to_host_bytes, 8);
  EXPECT_EQ(after.host_synchronizations - before.host_synchronizations, 2);
}

TEST_F(SimulatedDevice, RegisteredMemoryIsPinned) {
  auto* registrar = host_memory_registrar(c10::kPrivateUse1);
  ASSERT_NE(registrar, nullptr);
  auto memory = torch::zeros({4});
  auto source = torch::ones({2}, device_);
  auto before = simulated::counters();
  ASSERT_TRUE(registrar->lock(memory.data_ptr(), memory.nbytes()));
  EXPECT_EQ(simulated::counters().registrations, before.registrations + 1);
  Gate gate;
  enqueue(current_stream(device_), [&] { gate.wait(); });
  memory.slice(0, 1, 3).copy_(source, /*non_blocking=*/true);
  EXPECT_EQ(memory.sum().item<float>(), 0);
  gate.open();
  synchronize(device_);
  EXPECT_EQ(memory.sum().item<float>(), 2);
  registrar->unlock(memory.data_ptr());
  EXPECT_FALSE(memory.is_pinned());
  EXPECT_EQ(simulated::counters().registered_now, before.registered_now);
}

TEST_F(SimulatedDevice, StreamsHaveNoOrderButByEvents) {
  auto source = pinned({1, 2, 3});
  auto written = torch::zeros({3}, device_);
  auto read = torch::zeros({3}, device_);
  auto stream = other_stream(device_);
  Gate gate;
  enqueue(stream, [&] { gate.wait(); });
  {
    c10::StreamGuard guard(stream);
    written.copy_(source, /*non_blocking=*/true);
  }
  EXPECT_EQ(values_of(written), (std::vector<float>{0, 0, 0}));  // read in the default stream, too early
  c10::Event done(c10::kPrivateUse1);
  done.record(stream);
  EXPECT_FALSE(done.query());
  done.block(current_stream(device_));
  read.copy_(written, /*non_blocking=*/true);
  gate.open();
  EXPECT_EQ(values_of(read), (std::vector<float>{1, 2, 3}));
  EXPECT_TRUE(done.query());
}

TEST_F(SimulatedDevice, EventsMeasureTime) {
  c10::Event begin(c10::kPrivateUse1, c10::EventFlag::BACKEND_DEFAULT);
  c10::Event end(c10::kPrivateUse1, c10::EventFlag::BACKEND_DEFAULT);
  EXPECT_TRUE(begin.query());
  begin.record(current_stream(device_));
  Gate gate;
  enqueue(current_stream(device_), [&] { gate.wait(); });
  end.record(current_stream(device_));
  EXPECT_THROW(begin.elapsedTime(end), c10::Error);
  gate.open();
  end.synchronize();
  EXPECT_GE(begin.elapsedTime(end), 0.0);
}

TEST_F(SimulatedDevice, FreedMemoryIsNanInTheOrderOfItsStreams) {
  for (bool recorded : {false, true}) {
    auto freed = torch::ones({3}, device_);
    auto read = torch::zeros({3}, device_);
    auto stream = other_stream(device_);
    Gate gate;
    enqueue(stream, [&] { gate.wait(); });
    {
      c10::StreamGuard guard(stream);
      read.copy_(freed, /*non_blocking=*/true);
    }
    if (recorded) freed.record_stream(stream);
    freed.reset();
    gate.open();
    stream.synchronize();
    EXPECT_EQ(torch::isnan(read).all().item<bool>(), !recorded);
  }
  EXPECT_TRUE(torch::isnan(torch::empty({100}, device_)).all().item<bool>());
}

TEST_F(SimulatedDevice, DeviceMemoryIsNotTheHosts) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  auto tensor = torch::ones({3}, device_);
  EXPECT_DEATH(
      {
        volatile float read = *tensor.data_ptr<float>();
        (void)read;
      },
      "");
}

TEST_F(SimulatedDevice, DevicesDoNotMix) {
  auto first = torch::ones({2}, device_);
  for (const auto& other : {torch::ones({2}, test_device(1)), torch::ones({2})}) {
    try {
      first.mul(other);
      ADD_FAILURE() << "should have thrown";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("Expected all tensors to be on the same device"));
    }
  }
  EXPECT_EQ(values_of(first * torch::tensor(3.0f)), (std::vector<float>{3, 3}));  // a number
}

TEST_F(SimulatedDevice, CopiesBetweenDevicesAreOrderedOnBoth) {
  auto source = torch::zeros({2}, device_);
  auto destination = torch::zeros({2}, test_device(1));
  Gate gate;
  enqueue(current_stream(device_), [&] { gate.wait(); });
  source.copy_(pinned({3, 4}), /*non_blocking=*/true);
  destination.copy_(source);
  auto copied_after = destination.clone();
  gate.open();
  EXPECT_EQ(values_of(copied_after), (std::vector<float>{3, 4}));
}

TEST_F(SimulatedDevice, RunsOutOfMemory) {
  auto before = simulated::allocated_bytes(0);
  {
    simulated::MemoryLimit limit(0, 1 << 20);
    auto half = torch::empty({1 << 17}, device_);
    try {
      torch::empty({1 << 18}, device_);
      ADD_FAILURE() << "should have thrown";
    } catch (const c10::OutOfMemoryError& error) {
      EXPECT_THAT(error.what(), HasSubstr("out of memory. Tried to allocate 1048576 bytes"));
    }
    torch::empty({1 << 18}, test_device(1));  // the other one has its own
    half.reset();
    torch::empty({1 << 18}, device_);
  }
  EXPECT_EQ(simulated::allocated_bytes(0), before);
}

TEST_F(SimulatedDevice, HasViewsAndResizes) {
  auto tensor = torch::arange(12, torch::kFloat).to(device_);
  auto host = tensor.cpu();
  auto same = [](const torch::Tensor& on_device, const torch::Tensor& expected) {
    EXPECT_TRUE(torch::equal(on_device.cpu(), expected)) << on_device << expected;
  };
  auto view = tensor.view({3, 4});
  EXPECT_TRUE(view.is_alias_of(tensor));
  view.t()[1].fill_(-1);
  host.view({3, 4}).t()[1].fill_(-1);
  same(tensor, host);
  same(view.select(1, 2).unsqueeze(0).expand({2, 3}),
       host.view({3, 4}).select(1, 2).unsqueeze(0).expand({2, 3}));
  same(tensor.unfold(0, 3, 2), host.unfold(0, 3, 2));
  same(tensor.view({4, 3}).transpose(0, 1).reshape({12}), host.view({4, 3}).transpose(0, 1).reshape({12}));
  same(torch::view_as_complex(tensor.view({6, 2})).conj(), torch::view_as_complex(host.view({6, 2})).conj());
  same(tensor.to(torch::kHalf), host.to(torch::kHalf));
  auto indices = torch::tensor({2, 0});
  same(view.index({indices.to(device_)}), host.view({3, 4}).index({indices}));
  view.index_put_({indices}, torch::ones({4}, device_));
  host.view({3, 4}).index_put_({indices}, torch::ones({4}));
  same(tensor, host);

  auto resized = torch::ones({2}, device_);
  resized.resize_({4});
  resized.slice(0, 2).fill_(2);
  same(resized, torch::tensor({1.0f, 1.0f, 2.0f, 2.0f}));
  auto alias = torch::empty({0}, device_);
  alias.set_(resized);
  EXPECT_TRUE(alias.is_alias_of(resized));
  alias.set_(resized.storage(), 1, {2}, {1});
  same(alias, torch::tensor({1.0f, 2.0f}));

  std::vector<torch::Tensor> list{torch::ones({2}, device_), torch::ones({3}, device_)};
  at::_foreach_mul_(list, 3);
  same(list[1], torch::full({3}, 3.0f));
}

TEST_F(SimulatedDevice, HasAGeneratorOfItsOwn) {
  auto generator = at::globalContext().defaultGenerator(device_);
  generator.set_current_seed(5);
  torch::manual_seed(5);
  auto state = generator.get_state();
  auto drawn = torch::randn({4}, device_);
  EXPECT_TRUE(torch::equal(drawn.cpu(), torch::randn({4})));
  generator.set_state(state);
  EXPECT_TRUE(torch::equal(torch::randn({4}, device_), drawn));
  EXPECT_TRUE(torch::equal(
      torch::empty({4}, device_)
          .normal_(0, 1,
                   [&] {
                     auto own = at::globalContext().getAcceleratorHooksInterface().getNewGenerator(0);
                     own.set_current_seed(5);
                     return own;
                   }()),
      drawn));
}

TEST_F(SimulatedDevice, BackwardRunsInAThreadOfItsOwn) {
  auto leaf = torch::ones({2}, torch::TensorOptions(device_).requires_grad(true));
  std::thread::id thread;
  auto product = leaf * 2;
  product.register_hook([&](const torch::Tensor&) { thread = std::this_thread::get_id(); });
  product.sum().backward();
  EXPECT_NE(thread, std::thread::id());
  EXPECT_NE(thread, std::this_thread::get_id());
  EXPECT_EQ(values_of(leaf.grad()), (std::vector<float>{2, 2}));
}

/// Losses of a few steps of a model with most kinds of layers, on `device`.
std::vector<float> train(c10::Device device) {
  torch::manual_seed(1);
  torch::nn::Sequential model(
      torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).padding(1)), torch::nn::BatchNorm2d(4),
      torch::nn::ReLU(), torch::nn::MaxPool2d(2), torch::nn::Flatten(), torch::nn::Linear(64, 16),
      torch::nn::LayerNorm(torch::nn::LayerNormOptions({16})), torch::nn::GELU(), torch::nn::Linear(16, 5));
  auto images = torch::randn({8, 1, 8, 8});
  auto labels = torch::randint(5, {8});
  model->to(device);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  std::vector<float> losses;
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    auto loss = torch::nn::functional::cross_entropy(model->forward(images.to(device)), labels.to(device));
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<float>());
  }
  return losses;
}

TEST_F(SimulatedDevice, TrainsAsTheCpuDoes) {
  auto expected = train(c10::kCPU);
  EXPECT_LT(expected.back(), expected.front());
  EXPECT_EQ(train(test_device(0)), expected);
  EXPECT_EQ(train(test_device(1)), expected);
}

}  // namespace
}  // namespace lockstep::testing::simulated_device_test
