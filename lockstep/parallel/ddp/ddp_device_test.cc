// DistributedDataParallel of modules on devices: the same numbers as on the CPU, and the right order of
// streams. Every rank has a device of its own as far as there are devices.
#include <functional>
#include <gmock/gmock.h>
#include <limits>
#include <memory>

#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/nn/grad_norm.h>
#include <lockstep/nn/testing/fixtures.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/parallel/ddp/hooks/default_hooks.h>
#include <lockstep/parallel/ddp/hooks/powersgd_hook.h>
#include <lockstep/parallel/ddp/hooks/quantization_hooks.h>
#include <lockstep/parallel/ddp/reducer/fingerprint.h>
#include <lockstep/testing/expect_equal.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/simulated_device/simulated_device.h>
#include <lockstep/testing/tensors.h>
#include <lockstep/testing/test_device.h>

namespace lockstep::ddp_device_test {
namespace {

namespace nn = torch::nn;
using testing::data;
using testing::device_of_rank;
using testing::expect_equal;
using testing::Gate;
using ::testing::HasSubstr;
using testing::make_double;
using testing::message_of;
using testing::Net;
using testing::on_cpu;
using testing::run_ranks;
using testing::test_device;
using Tensors = std::vector<torch::Tensor>;

Tensors state_of(const nn::Module& module) {
  Tensors state = module.parameters();
  for (const auto& buffer : module.buffers()) state.push_back(buffer);
  return on_cpu(state);
}

using Model = DistributedDataParallel<Net>;

/// The state after some steps of a small net on `device`. `prepare` is called with the wrapped model.
Tensors train(c10::Device device, int rank, DistributedDataParallelOptions options = {},
              const std::function<void(Model&)>& prepare = {}) {
  torch::manual_seed(7);
  auto net = make_double<Net>();
  net->to(device);
  if (!device.is_cpu()) options.device_ids = {device};
  Model model(net, std::move(options));
  if (prepare) prepare(model);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    // Inputs on the CPU: device_ids has them moved.
    const auto output = model(data(rank, {4, 6}, step));
    EXPECT_EQ(output.device(), device);
    nn::functional::mse_loss(output, data(rank, {4, 2}, 50 + step).to(output.options())).backward();
    clip_grad_norm_(net->parameters(), 0.5);
    optimizer.step();
  }
  return state_of(*net);
}

TEST(DistributedDataParallelOnDevice, TrainsAsOnTheCpu) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const std::vector<std::pair<std::string, DistributedDataParallelOptions>> cases{
        {"defaults", {}},
        {"small buckets", {.bucket_cap_mb = 1e-5, .first_bucket_cap_mb = 1e-5}},
        {"bucket views", {.bucket_cap_mb = 1e-5, .gradient_as_bucket_view = true}},
        {"unused parameters", {.bucket_cap_mb = 1e-5, .find_unused_parameters = true}},
        {"static graph", {.bucket_cap_mb = 1e-5, .static_graph = true}},
    };
    for (const auto& [name, options] : cases) {
      expect_equal(train(device_of_rank(rank), rank, options), train(at::kCPU, rank, options), name);
    }
  });
}

TEST(DistributedDataParallelOnDevice, RunsCommunicationHooks) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const std::vector<std::pair<std::string, std::function<void(Model&)>>> cases{
        {"allreduce", [](Model& model) { model.register_comm_hook(ProcessGroup(), allreduce_hook); }},
        {"fp16", [](Model& model) { model.register_comm_hook(ProcessGroup(), fp16_compress_hook); }},
        {"bf16", [](Model& model) { model.register_comm_hook(ProcessGroup(), bf16_compress_hook); }},
        {"int8", [](Model& model) { model.register_comm_hook(ProcessGroup(), quantization_pertensor_hook); }},
        {"PowerSGD",
         [](Model& model) {
           model.register_comm_hook(PowerSGDState({}, {.matrix_approximation_rank = 1,
                                                       .start_powerSGD_iter = 2,
                                                       .min_compression_rate = 0.5}),
                                    powerSGD_hook);
         }},
        // Gradients of five elements share a bucket; their copy lives no longer than the hook's callbacks.
        {"PowerSGD in batches, from new Qs",
         [](Model& model) {
           model.register_comm_hook(PowerSGDState({}, {.matrix_approximation_rank = 1,
                                                       .start_powerSGD_iter = 2,
                                                       .min_compression_rate = 0.5,
                                                       .warm_start = false,
                                                       .batch_tensors_with_same_shape = true}),
                                    powerSGD_hook);
         }},
    };
    for (const auto& [name, prepare] : cases) {
      expect_equal(train(device_of_rank(rank), rank, {.bucket_cap_mb = 1e-4}, prepare),
                   train(at::kCPU, rank, {.bucket_cap_mb = 1e-4}, prepare), name, 1e-9);
    }
  });
}

/// Gradients of three forwards, the last of which is synchronised; then of an epoch of uneven length.
Tensors accumulate_and_join(c10::Device device, int rank) {
  torch::manual_seed(7);
  auto net = make_double<Net>();
  net->to(device);
  DistributedDataParallel model(net, {.bucket_cap_mb = 1e-5});
  const auto backward = [&](int salt) {
    model(data(rank, {4, 6}, salt).to(device)).square().mean().backward();
  };
  for (int round = 0; round < 2; ++round) {
    {
      auto guard = model.no_sync();
      backward(0), backward(1);
    }
    backward(2);
  }
  auto answer = on_cpu(testing::gradients(*net));
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  {
    auto join = model.join();
    for (int step = 0; step < 2 + rank; ++step) {
      optimizer.zero_grad();
      backward(10 + step);
      optimizer.step();
    }
  }
  for (auto& tensor : state_of(*net)) answer.push_back(tensor);
  return answer;
}

TEST(DistributedDataParallelOnDevice, AccumulatesAndJoins) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    expect_equal(accumulate_and_join(device_of_rank(rank), rank), accumulate_and_join(at::kCPU, rank),
                 "gradients");
  });
}

/// Two layers, maybe on two devices, and a call in backward() between them.
struct TwoLayers : nn::Module {
  TwoLayers() { register_module("first", first), register_module("last", last); }
  torch::Tensor forward(const torch::Tensor& x) {
    auto hidden = first(x.to(first->weight.device()));
    if (between) hidden.register_hook([this](const torch::Tensor&) { between(); });
    return last(torch::tanh(hidden).to(last->weight.device()));
  }
  nn::Linear first{3, 4};
  nn::Linear last{4, 2};
  std::function<void()> between;
};

TEST(DistributedDataParallelOnDevice, ComputesInMixedPrecision) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto parameters_on = [&](c10::Device device) {
      torch::manual_seed(3);
      auto net = std::make_shared<TwoLayers>();
      net->to(device);
      DistributedDataParallel model(
          net, {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        const auto output = model(data(rank, {5, 3}, step).to(device, at::kFloat));
        EXPECT_EQ(output.scalar_type(), at::kBFloat16);
        output.square().sum().backward();
        EXPECT_EQ(net->first->weight.grad().scalar_type(), at::kFloat);
        optimizer.step();
      }
      return state_of(*net);
    };
    expect_equal(parameters_on(device_of_rank(rank)), parameters_on(at::kCPU), "parameters");
  });
}

TEST(DistributedDataParallelOnDevice, TakesModulesOnSeveralDevices) {
  LOCKSTEP_NEEDS_DEVICES(2);
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto gradients_on = [&](c10::Device first, c10::Device last) {
      torch::manual_seed(3);
      auto net = make_double<TwoLayers>();
      net->first->to(first);
      net->last->to(last);
      DistributedDataParallel model(net);
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        model(data(rank, {5, 3}, step)).square().sum().backward();
      }
      return on_cpu(testing::gradients(*net));
    };
    expect_equal(gradients_on(test_device(0), test_device(1)), gradients_on(at::kCPU, at::kCPU), "gradients");
    auto net = std::make_shared<TwoLayers>();
    net->first->to(test_device(0));
    net->last->to(test_device(1));
    EXPECT_THAT(message_of<c10::ValueError>(
                    [&] { DistributedDataParallel model(net, {.device_ids = {test_device(0)}}); }),
                HasSubstr("device_ids and output_device arguments only work with single-device"));
    net->first->to(at::kCPU);
    EXPECT_THAT(message_of<c10::ValueError>([&] { DistributedDataParallel model(net); }),
                HasSubstr("must be on the same type of devices"));
  });
}

TEST(DistributedDataParallelOnDevice, ChecksDeviceIds) {
  run_ranks(1, [](int) {
    auto world = init_process_group();
    const auto device = test_device();
    nn::Linear cpu(2, 2), linear(2, 2);
    linear->to(device);
    const auto text = [](const nn::Linear& module, DistributedDataParallelOptions options) {
      return message_of<c10::ValueError>([&] { DistributedDataParallel model(module, std::move(options)); });
    };
    EXPECT_THAT(text(cpu, {.device_ids = {device}}), HasSubstr("got device_ids " + device.str()));
    EXPECT_THAT(text(linear, {.output_device = device}), HasSubstr("output_device " + device.str()));
    EXPECT_THAT(text(linear, {.device_ids = {device, device}}), HasSubstr("contain a single element"));
    EXPECT_THAT(text(linear, {.device_ids = {c10::Device(at::kCPU)}}), HasSubstr("but the module is on"));
    EXPECT_THAT(text(linear, {.device_ids = {device}, .output_device = c10::Device(at::kCPU)}),
                HasSubstr("output_device is cpu"));
    DistributedDataParallel moving(linear, {.device_ids = {device}, .output_device = device});
    EXPECT_EQ(moving(torch::ones({1, 2})).device(), device);
    EXPECT_EQ(moving.join_device(), device);
    DistributedDataParallel leaving(linear);
    EXPECT_THROW(leaving(torch::ones({1, 2})), c10::Error);  // torch says that devices differ
  });
}

TEST(DistributedDataParallelOnDevice, ReducesWhileBackwardRuns) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = std::make_shared<TwoLayers>();
    net->to(device_of_rank(rank));
    DistributedDataParallel model(net, {.bucket_cap_mb = 1e-5, .first_bucket_cap_mb = 1e-5});
    Gate first_reduced;
    model.register_comm_hook(0, [&](int, GradBucket& bucket) {
      auto future = allreduce_hook({}, bucket);
      // When the sum has come, on all ranks, backward may go on to the first layer.
      if (bucket.index() == 0) future->addCallback([&](c10::ivalue::Future&) { first_reduced.open(); });
      return future;
    });
    const auto step = [&] {
      model(data(rank, {5, 3}).to(at::kFloat).to(device_of_rank(rank))).sum().backward();
    };
    step();  // learns the order
    net->between = [&] { first_reduced.wait(); };
    step();  // hangs, unless the last layer is reduced before the first one has its gradients
    EXPECT_GT(model.reducer().bucket_bytes().size(), 1u);
  });
}

TEST(DistributedDataParallelOnDevice, ReducesAfterTheStreamsOfAllGradients) {
  run_ranks(1, [](int) {
    auto world = init_process_group();
    const auto device = test_device();
    auto net = make_double<TwoLayers>();
    net->to(device);
    // Autograd accumulates a gradient on the stream on which the parameter's node was made.
    const auto other = testing::other_stream(device);
    auto node = [&] {
      c10::StreamGuard guard(other);
      return torch::autograd::impl::grad_accumulator(net->last->weight);
    }();
    DistributedDataParallel model(net);
    Gate gate;
    torch::Tensor seen;
    model.register_comm_hook(0, [&](int, GradBucket& bucket) {
      seen = bucket.buffer().clone();  // in the current stream, and not yet
      gate.open();
      return completed_future(bucket.buffer());
    });
    const auto x = data(0, {5, 3}).to(device);
    const auto loss = model(x).square().sum();
    testing::synchronize(device);
    testing::enqueue(other, [&] { gate.wait(); });
    loss.backward();
    testing::synchronize(device);
    const auto gradients = on_cpu(testing::gradients(*net));
    EXPECT_TRUE(at::isfinite(seen).all().item<bool>());
    double sum = 0;
    for (const auto& gradient : gradients) sum += gradient.square().sum().item<double>();
    EXPECT_NEAR(seen.square().sum().item<double>(), sum, 1e-9 * sum);
    EXPECT_GT(gradients[2].abs().min().item<double>(), 0);
  });
}

TEST(DistributedDataParallelOnDevice, SurvivesRunningOutOfMemoryInBackward) {
  if (!testing::test_device_is_simulated())
    GTEST_SKIP() << "only the simulated device's memory can be limited";
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto device = device_of_rank(rank);
    const auto gradients_of = [&](bool fail) {
      torch::manual_seed(3);
      auto net = make_double<TwoLayers>();
      net->to(device);
      DistributedDataParallel model(net, {.bucket_cap_mb = 1e-5, .first_bucket_cap_mb = 1e-5});
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        if (fail) {
          // Half-way: what the last layer's gradients have started is under way.
          std::unique_ptr<testing::simulated::MemoryLimit> limit;
          net->between = [&] {
            limit = std::make_unique<testing::simulated::MemoryLimit>(device.index(), 0);
          };
          EXPECT_THROW(model(data(rank, {5, 3}, step)).sum().backward(), c10::OutOfMemoryError);
          limit.reset();
          net->between = {};
          model.reset();
          net->zero_grad();
        }
        model(data(rank, {5, 3}, step).to(device)).square().sum().backward();
      }
      return on_cpu(testing::gradients(*net));
    };
    expect_equal(gradients_of(true), gradients_of(false), "gradients");
  });
}

/// Random numbers and running statistics: all that a forward changes.
struct Noisy : nn::Module {
  Noisy() { register_module("norm", norm), register_module("last", last); }
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::dropout(norm(x), 0.5, /*train=*/true)); }
  nn::BatchNorm1d norm{3};
  nn::Linear last{3, 2};
};

TEST(DistributedDataParallelOnDevice, UndoesAFailedStepAndKnowsADoneOne) {
  run_ranks(1, [](int) {
    auto world = init_process_group();
    const auto device = test_device();
    auto net = std::make_shared<Noisy>();
    net->to(device);
    DistributedDataParallel model(net, {.restore_buffers_on_failure = true});
    bool fail = false;
    model.register_comm_hook(0, [&](int, GradBucket& bucket) -> HookFuture {
      TORCH_CHECK(!fail, "the hook failed");
      return completed_future(bucket.buffer());
    });
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    const auto x = torch::randn({6, 3}, device);
    const auto step = [&] { model(x).sum().backward(); };
    step();
    EXPECT_FALSE(model.reducer().stepped_since_round());
    optimizer.step();
    EXPECT_TRUE(model.reducer().stepped_since_round());

    const auto before = on_cpu(net->buffers());
    auto generator = at::globalContext().defaultGenerator(device);
    const auto state = generator.get_state();
    fail = true;
    EXPECT_THAT(message_of<c10::Error>(step), HasSubstr("the hook failed"));
    expect_equal(on_cpu(net->buffers()), before, "buffers");
    EXPECT_TRUE(at::equal(generator.get_state(), state));
    fail = false;
    EXPECT_EQ(model.update_process_group(new_group(), {optimizer}), 1);
    step();
    optimizer.step();
    EXPECT_EQ(model.update_process_group(new_group(), {optimizer}), 2);
  });
}

TEST(FingerprintOnDevice, LooksAtBytesWhereItCouldKeepThem) {
  run_ranks(1, [](int) {
    const auto device = test_device();
    const Tensors tensors{torch::full({5}, std::numeric_limits<double>::quiet_NaN(), device),
                          torch::ones({40}, device)};
    const auto change_unseen = [&] { tensors[1].data().mul_(2); };  // as LibTorch's optimizers do
    Fingerprint fingerprint;
    for (int round = 0; round < 3; ++round) {
      if (round == 2) tensors[1].set_data(torch::ones({40}, device));  // the views are of other memory now
      fingerprint.take(tensors);
      EXPECT_FALSE(fingerprint.differs(tensors)) << round;
      change_unseen();
      EXPECT_TRUE(fingerprint.differs(tensors)) << round;
    }
    if (!testing::test_device_is_simulated()) return;  // whose memory alone can be limited
    Fingerprint without_memory;
    {
      const testing::simulated::MemoryLimit limit(device.index(), 0);
      without_memory.take(tensors);
    }
    change_unseen();
    EXPECT_FALSE(without_memory.differs(tensors));
    tensors[1].mul_(2);  // counts a version
    EXPECT_TRUE(without_memory.differs(tensors));
  });
}

}  // namespace
}  // namespace lockstep::ddp_device_test
