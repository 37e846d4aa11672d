// DistributedDataParallel's options, one by one. Their numbers are compared with PyTorch's in parity/.
#include <gmock/gmock.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/nn/testing/fixtures.h>
#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::ddp_options_test {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using testing::close;
using testing::data;
using ::testing::HasSubstr;
using testing::make_double;
using testing::mean_over_ranks;
using testing::Net;
using testing::run_ranks;

std::string message_of(const std::function<void()>& action) {
  return testing::message_of<c10::Error>(action);
}

TEST(DdpOptions, IgnoredParametersAndBuffersAreLeftAlone) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    torch::manual_seed(rank);
    auto net = make_double<Net>();
    DistributedDataParallel model(net, {.parameters_to_ignore = {"first.weight", "norm.running_mean"}});
    const auto equal_everywhere = [](const torch::Tensor& tensor) {
      return close(mean_over_ranks(tensor), tensor);
    };
    EXPECT_FALSE(equal_everywhere(net->first->weight));
    EXPECT_TRUE(equal_everywhere(net->last->weight));
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      model(data(rank, {5, 6}, step)).square().sum().backward();
      EXPECT_FALSE(equal_everywhere(net->first->weight.grad()));
      EXPECT_TRUE(equal_everywhere(net->last->weight.grad()));
    }
    model(data(rank, {5, 6}));
    EXPECT_FALSE(equal_everywhere(net->norm->running_mean));
  });
}

TEST(DdpOptions, DelayedParametersAreReducedTogether) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (const bool all : {false, true}) {
      auto net = make_double<Net>();
      DistributedDataParallelOptions options{.param_to_hook_all_reduce = net->first->weight};
      for (const auto& item : net->named_parameters()) {
        if (all || item.key().starts_with("last"))
          options.delay_all_reduce_named_params.emplace_back(item.key(), item.value());
      }
      if (all) options.param_to_hook_all_reduce = net->first->bias;
      DistributedDataParallel model(net, options);
      for (int step = 0; step < 3; ++step) {
        const auto x = data(rank, {5, 6}, step);
        const auto expected = torch::autograd::grad({net->forward(x).square().sum()}, net->parameters());
        net->zero_grad(step == 1);
        model(x).square().sum().backward();
        EXPECT_TRUE(close(net->last->weight.grad(), mean_over_ranks(expected[4]), 1e-9))
            << all << ' ' << step;
        if (!all) {
          EXPECT_TRUE(close(net->first->weight.grad(), mean_over_ranks(expected[0]), 1e-9)) << step;
        }
      }
    }
  });
}

TEST(DdpOptions, DelayedParametersInMemoryOfTheUserGetTheAverages) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Net>();
    DistributedDataParallelOptions options{.param_to_hook_all_reduce = net->first->weight};
    for (const auto& item : net->named_parameters()) {
      if (item.key().starts_with("last"))
        options.delay_all_reduce_named_params.emplace_back(item.key(), item.value());
    }
    DistributedDataParallel model(net, options);
    const auto own = torch::zeros_like(net->last->weight);
    net->last->weight.mutable_grad() = own;
    for (int step = 0; step < 3; ++step) {
      const auto x = data(rank, {5, 6}, step);
      const auto expected = torch::autograd::grad({net->forward(x).square().sum()}, net->parameters());
      own.zero_();
      model(x).square().sum().backward();
      EXPECT_TRUE(close(own, mean_over_ranks(expected[4]), 1e-9)) << step;
      EXPECT_EQ(net->last->weight.grad().data_ptr(), own.data_ptr()) << step;
    }
  });
}

TEST(DdpOptions, DelayedParametersHaveNamesOfTheModule) {
  run_ranks(1, [](int) {
    auto world = init_process_group();
    nn::Linear linear(2, 2);
    const auto text = testing::message_of<c10::ValueError>([&] {
      DistributedDataParallel model(linear, {.parameters_to_ignore = {"weight", "bias"},
                                             .delay_all_reduce_named_params = {{"wait", linear->weight}},
                                             .param_to_hook_all_reduce = linear->bias});
    });
    EXPECT_THAT(text, HasSubstr("delay_all_reduce_named_params (wait)"));
    EXPECT_THAT(text, HasSubstr("named_parameters(): weight, bias"));
  });
}

TEST(DdpOptions, MixedPrecisionComputesInOneTypeAndTrainsInAnother) {
  struct Probe : nn::Module {
    Probe() {
      register_module("layer", layer), register_buffer("offset", offset), register_buffer("count", count);
    }
    torch::Tensor forward(const torch::Tensor& x, const std::vector<torch::Tensor>& more) {
      seen = {x.scalar_type(), more[0].scalar_type(), more[1].scalar_type(), layer->weight.scalar_type(),
              offset.scalar_type()};
      return torch::matmul(x, square).mul(square[0]).narrow(1, 0, 4) * 0 + layer(x) + offset;
    }
    torch::Tensor square = register_parameter("square", torch::ones({8, 8}));  // autograd saves it as it is
    nn::Linear layer{8, 4};
    torch::Tensor offset = torch::ones({4}), count = torch::zeros({1}, at::kLong);
    std::vector<at::ScalarType> seen;
  };
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = std::make_shared<Probe>();
    DistributedDataParallel model(net, {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16,
                                                                          .buffer_dtype = at::kBFloat16}});
    EXPECT_EQ(net->count.scalar_type(), at::kLong);
    for (int step = 0; step < 4; ++step) {
      const auto x = data(rank, {6, 8}, step).to(at::kFloat);
      net->zero_grad();
      std::vector<torch::Tensor> more{x, torch::ones({2}, at::kLong)};
      if (step == 2) {
        auto guard = model.no_sync();
        model(x, more).sum().backward();
        EXPECT_EQ(net->layer->weight.grad().scalar_type(), at::kFloat);
        net->zero_grad();
      }
      auto output = model(x, more);
      EXPECT_EQ(net->seen, (std::vector<at::ScalarType>{at::kBFloat16, at::kBFloat16, at::kLong,
                                                        at::kBFloat16, at::kBFloat16}));
      EXPECT_EQ(output.scalar_type(), at::kBFloat16);
      EXPECT_EQ(net->layer->weight.scalar_type(), at::kBFloat16) << "until the end of backward";
      EXPECT_EQ(more[0].scalar_type(), at::kFloat) << "the caller's own";
      output.sum().backward();
      EXPECT_EQ(net->layer->weight.scalar_type(), at::kFloat);
      {
        torch::NoGradGuard no_grad;
        model(x, more);
      }
      EXPECT_EQ(net->layer->weight.scalar_type(), at::kFloat) << "no backward will restore it";
      const auto& gradient = net->layer->weight.grad();
      ASSERT_EQ(gradient.scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(gradient, gradient.to(at::kBFloat16).to(at::kFloat)))
          << "it was reduced in bfloat16";
      const auto expected = mean_over_ranks(x.sum(0).expand({4, 8}));
      EXPECT_TRUE(at::allclose(gradient, expected, 0.05, 0.05)) << step;
    }
  });
}

TEST(DdpOptions, MixedPrecisionLeavesTheCallersTensorsBehindPointers) {
  struct TakesPointer : nn::Module {
    nn::Linear layer = register_module("layer", nn::Linear(3, 2));
    torch::Tensor forward(const torch::Tensor& own, const std::shared_ptr<torch::Tensor>& behind) {
      EXPECT_EQ(own.scalar_type(), at::kBFloat16);
      return layer(own + behind->to(own.scalar_type()));
    }
  };
  run_ranks(1, [](int) {
    auto world = init_process_group();
    DistributedDataParallel model(std::make_shared<TakesPointer>(),
                                  {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}});
    const auto behind = std::make_shared<torch::Tensor>(torch::ones({1, 3}));
    model(torch::ones({1, 3}), behind);
    EXPECT_EQ(behind->scalar_type(), at::kFloat);
  });
}

TEST(DdpOptions, MixedPrecisionTakesSeveralForwardsBeforeOneBackward) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    nn::Linear net(1, 1);
    DistributedDataParallel model(net, {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}});
    for (int step = 0; step < 4; ++step) {
      net->zero_grad();
      if (step % 2 == 1) model(torch::ones({1, 1}));  // without a backward
      auto loss = model(torch::full({1, 1}, rank + 1.0)).sum() + model(torch::full({1, 1}, 2.0)).sum();
      {
        torch::NoGradGuard no_grad;  // neither this forward nor one that throws ends what backward needs
        model(torch::ones({1, 1}));
        EXPECT_THROW(model(torch::ones({1, 3})), c10::Error);
      }
      EXPECT_EQ(net->weight.scalar_type(), at::kBFloat16) << step;
      loss.backward();
      EXPECT_EQ(net->weight.scalar_type(), at::kFloat) << step;
      EXPECT_EQ(net->weight.grad().item<float>(), 3.5) << step;
      EXPECT_EQ(net->bias.grad().item<float>(), 2) << step;
    }
  });
}

TEST(DdpOptions, MixedPrecisionRestoresFullPrecisionAfterAFailureAndAtItsEnd) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    nn::Linear net(1, 1);
    const auto before = net->weight.detach().clone();
    {
      DistributedDataParallel model(net, {.mixed_precision = MixedPrecision{.param_dtype = at::kBFloat16}});
      auto loss = model(torch::ones({1, 1})).sum();
      EXPECT_EQ(net->weight.scalar_type(), at::kBFloat16);
      if (rank == 1) {
        auto other = torch::ones({3});
        EXPECT_THAT(message_of([&] { all_reduce(other); }), HasSubstr("all_reduce"));
        model.reset();
      } else {
        EXPECT_THAT(message_of([&] { loss.backward(); }), HasSubstr("all_reduce"));
      }
      EXPECT_EQ(net->weight.scalar_type(), at::kFloat);
      const auto group = shrink_group();
      model.update_process_group(group);
      net->zero_grad();
      model(torch::full({1, 1}, rank + 1.0)).sum().backward();
      EXPECT_EQ(net->weight.scalar_type(), at::kFloat);
      EXPECT_EQ(net->weight.grad().item<float>(), 1.5);
      model(torch::ones({1, 1}));  // no backward follows
      EXPECT_EQ(net->weight.scalar_type(), at::kBFloat16);
    }
    EXPECT_EQ(net->weight.scalar_type(), at::kFloat);
    EXPECT_TRUE(close(net->weight.detach(), mean_over_ranks(net->weight.detach()), 1e-9));
    if (rank == 0) {
      EXPECT_TRUE(at::equal(net->weight.detach(), before)) << "rank 0's, which went to all";
    }
  });
}

TEST(DdpOptions, AHookReplacesTheReduction) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Net>();
    DistributedDataParallel model(net, {.bucket_cap_mb = 1e-4});
    std::vector<size_t> seen;
    const auto hook = [&seen](const ProcessGroup& group, GradBucket& bucket) {
      seen.push_back(bucket.index());
      EXPECT_EQ(bucket.gradients().size(), bucket.parameters().size());
      int64_t numel = 0;
      for (size_t i = 0; i < bucket.gradients().size(); ++i) {
        EXPECT_EQ(bucket.gradients()[i].sizes(), bucket.parameters()[i].sizes());
        numel += bucket.gradients()[i].numel();
      }
      EXPECT_EQ(bucket.buffer().numel(), numel);
      auto sum = bucket.buffer().clone();
      std::vector<at::Tensor> tensors{sum};
      return then((group ? group : default_group())->allreduce(tensors)->getFuture(),
                  [](const at::Tensor& reduced) { return reduced * 3; });
    };
    model.register_comm_hook(ProcessGroup(), hook, "three times");
    EXPECT_THAT(message_of([&] { model.register_comm_hook(ProcessGroup(), hook); }),
                HasSubstr("only be called once"));
    for (int step = 0; step < 3; ++step) {
      const auto x = data(rank, {5, 6}, step);
      const auto expected = torch::autograd::grad({net->forward(x).square().sum()}, net->parameters());
      net->zero_grad();
      seen.clear();
      model(x).square().sum().backward();
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(close(net->parameters()[i].grad(), mean_over_ranks(expected[i]) * 6, 1e-9))
            << step << ' ' << i;
      }
      ASSERT_EQ(seen.size(), model.reducer().bucket_bytes().size());
      for (size_t i = 0; i < seen.size(); ++i) EXPECT_EQ(seen[i], i);
    }
    EXPECT_EQ(model.get_ddp_logging_data().strs_map.at("comm_hook"), "three times");
    DistributedDataParallel other(make_double<Net>());
    other.register_comm_hook(nullptr,
                             [](std::nullptr_t, GradBucket&) { return completed_future(torch::ones({1})); });
    EXPECT_THAT(message_of([&] {
                  other(data(rank, {5, 6})).sum().backward();
                }),
                HasSubstr("1 elements for a bucket"));
  });
}

TEST(DdpOptions, AFusedOptimizerStepsInBackward) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    torch::manual_seed(2);
    auto net = make_double<Net>(), plain = make_double<Net>();
    DistributedDataParallel model(net, {.bucket_cap_mb = 1e-4}), reference(plain);
    {
      torch::NoGradGuard no_grad;
      for (size_t i = 0; i < net->parameters().size(); ++i)
        plain->parameters()[i].copy_(net->parameters()[i]);
    }
    const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
    model.register_fused_optim([&](std::vector<at::Tensor> parameters) {
      return std::make_shared<torch::optim::SGD>(parameters, options);
    });
    torch::optim::SGD optimizer(plain->parameters(), options);
    for (int step = 0; step < 4; ++step) {
      const auto x = data(rank, {5, 6}, step);
      net->zero_grad();
      model(x).square().sum().backward();
      optimizer.zero_grad();
      reference(x).square().sum().backward();
      optimizer.step();
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        EXPECT_TRUE(close(net->parameters()[i], plain->parameters()[i], 1e-9)) << step << ' ' << i;
      }
    }
  });
}

TEST(DdpOptions, ABufferHookReplacesTheBroadcast) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Net>();
    DistributedDataParallel model(net);
    model.register_buffer_comm_hook([](const std::vector<NamedTensor>& buffers) {
      std::vector<HookFuture> futures;
      for (const auto& [name, buffer] : buffers) {
        if (!buffer.is_floating_point()) continue;
        std::vector<at::Tensor> tensors{buffer};
        c10d::AllreduceOptions options;
        options.reduceOp = c10d::ReduceOp::AVG;
        at::Tensor(buffer).mul_(1);  // in place: the graph that saved it must not mind
        futures.push_back(default_group()->allreduce(tensors, options)->getFuture());
      }
      return futures;
    });
    for (int step = 0; step < 3; ++step) {
      model(data(rank, {5, 6}, step)).sum().backward();
      EXPECT_TRUE(close(mean_over_ranks(net->norm->running_mean), net->norm->running_mean))
          << "after backward";
    }
    EXPECT_TRUE(model.will_sync_module_buffers());
  });
}

TEST(DdpOptions, LoggingDataTellWhatWasDone) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto net = make_double<Net>();
    DistributedDataParallel model(net, {.bucket_cap_mb_list = {1e-4, 1}});
    for (int step = 0; step < 3; ++step) model(data(rank, {5, 6}, step)).sum().backward();
    const auto logged = model.get_ddp_logging_data();
    EXPECT_EQ(logged.ints_map.at("iteration"), 3);
    EXPECT_EQ(logged.ints_map.at("world_size"), 2);
    EXPECT_EQ(logged.ints_map.at("rank"), rank);
    EXPECT_EQ(logged.ints_map.at("num_parameter_tensors"), 6);
    EXPECT_EQ(logged.ints_map.at("total_parameter_size_bytes"), (30 + 5 + 5 + 5 + 10 + 2) * 8);
    EXPECT_EQ(logged.ints_map.at("has_rebuilt_buckets"), 1);
    EXPECT_EQ(logged.ints_map.at("num_buckets_reduced"), 2);
    EXPECT_EQ(logged.ints_map.at("can_set_static_graph"), 1);
    EXPECT_EQ(logged.ints_map.at("tuned"), 0);
    EXPECT_EQ(logged.ints_map.at("has_error"), 0);
    EXPECT_EQ(logged.strs_map.at("dtypes"), "Double");
    EXPECT_EQ(logged.strs_map.at("backend_name"), "lockstep");
    EXPECT_EQ(logged.strs_map.at("bucket_sizes"), "136, 320");
    for (const char* time : {"forward_compute_time", "backward_compute_time", "backward_comm_time"}) {
      EXPECT_GT(logged.ints_map.at(time), 0) << time;
      EXPECT_GT(logged.ints_map.at(std::string("avg_") + time), 0) << time;
    }
    EXPECT_THROW(model.set_ddp_runtime_logging_sample_rate(0), c10::ValueError);
    model.check_reducer_finalized();
  });
}

TEST(DdpOptions, ResultsDoNotDependOnTunedSizes) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    std::vector<torch::Tensor> first;
    for (const size_t cap : {size_t{0}, size_t{1}, size_t{100}, size_t{300}, size_t{1} << 30}) {
      torch::manual_seed(3);
      auto net = std::make_shared<Net>();
      DistributedDataParallel model(net);
      torch::optim::SGD optimizer(model.parameters(), 0.1);
      for (int step = 0; step < 20; ++step) {
        if (step == 5 && cap > 0) model.reducer().force_caps({cap, cap});
        optimizer.zero_grad();
        model(data(rank, {5, 6}, step).to(at::kFloat)).square().sum().backward();
        optimizer.step();
      }
      const auto logged = model.get_ddp_logging_data().ints_map;
      EXPECT_EQ(logged.at("tuned"), 1) << "by itself or by force";
      if (cap == 1) {
        EXPECT_EQ(logged.at("num_buckets_reduced"), 6);
      }
      if (first.empty()) {
        for (const auto& parameter : net->parameters()) first.push_back(parameter.detach().clone());
      }
      for (size_t i = 0; i < first.size(); ++i)
        EXPECT_TRUE(at::equal(net->parameters()[i], first[i])) << cap << ' ' << i;
    }
  });
}

TEST(DdpOptions, CompressionBetweenHostsChangesNothingOnOneHost) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto gradient_with = [&](std::optional<HostCompression> between_hosts) {
      torch::manual_seed(3);
      nn::Linear net(70, 70);  // 19 KiB of weights
      DistributedDataParallel<nn::LinearImpl> model(net.ptr(), {.between_hosts = between_hosts});
      for (int step = 0; step < 3; ++step) {
        net->zero_grad();
        torch::manual_seed(10 * step + rank);
        model(torch::randn({4, 70})).square().sum().backward();
      }
      return net->weight.grad().clone();
    };
    const torch::Tensor plain = gradient_with({});
    for (const auto between_hosts :
         {HostCompression::kNone, HostCompression::kBf16, HostCompression::kInt8}) {
      EXPECT_TRUE(torch::equal(gradient_with(between_hosts), plain));
    }
  });
}

TEST(DdpOptions, CompressionBetweenHostsMustBeTheSameOnAllRanks) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    nn::Linear net(70, 70);
    DistributedDataParallel<nn::LinearImpl> model(
        net.ptr(), {.between_hosts = rank == 0 ? HostCompression::kBf16 : HostCompression::kInt8});
    const torch::Tensor loss = model(torch::ones({4, 70})).sum();
    EXPECT_THAT(message_of([&] { loss.backward(); }),
                AllOf(HasSubstr("bf16 between hosts"), HasSubstr("int8 between hosts")));
  });
}

TEST(DdpOptions, ACompressionThatDoesNotExistIsRefused) {
  auto world = init_process_group({.rank = 0, .world_size = 1});
  EXPECT_THAT(message_of([] {
                DistributedDataParallel model(make_double<Net>(),
                                              {.between_hosts = static_cast<HostCompression>(7)});
              }),
              HasSubstr("between_hosts is 7"));
}

TEST(DdpOptions, WhatTorchSaveWritesIsThePlainModules) {
  auto world = init_process_group({.rank = 0, .world_size = 1});
  auto net = make_double<Net>();
  auto model = std::make_shared<DistributedDataParallel<Net>>(net);
  (*model)(data(0, {5, 6})).sum().backward();
  std::stringstream stream;
  torch::save(model, stream);
  auto plain = make_double<Net>();
  torch::load(plain, stream);
  for (size_t i = 0; i < plain->parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(plain->parameters()[i], net->parameters()[i]));
  }
  EXPECT_TRUE(at::equal(plain->norm->running_mean, net->norm->running_mean));
  EXPECT_THAT(model->named_parameters().keys(), ::testing::Contains("module.first.weight"));
}

TEST(DdpOptions, WrapsWhatLibTorchUsersHave) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    torch::manual_seed(rank);
    const auto x = data(rank, {5, 6}).to(at::kFloat);
    nn::Sequential sequential(nn::Linear(6, 4), nn::ReLU(), nn::Linear(4, 2));
    DistributedDataParallel in_sequence(sequential);
    in_sequence(x).sum().backward();
    nn::Linear linear(6, 2);
    DistributedDataParallel held(linear);
    held(x).sum().backward();
    nn::AnyModule any(nn::Linear(6, 2));
    DistributedDataParallel erased(any);
    erased(x).sum().backward();
    torch::jit::Module script("script");
    script.register_parameter("weight", torch::randn({6, 2}).requires_grad_(), false);
    script.define("def forward(self, x):\n  return x.matmul(self.weight)\n");
    DistributedDataParallel scripted(script);
    scripted(x).toTensor().sum().backward();
    const auto equal_everywhere = [](const torch::Tensor& tensor) {
      return close(mean_over_ranks(tensor), tensor, 1e-6);
    };
    for (const auto& parameter : {sequential->parameters()[0], linear->weight, any.ptr()->parameters()[0],
                                  script.attr("weight").toTensor()}) {
      EXPECT_TRUE(equal_everywhere(parameter));
      EXPECT_TRUE(equal_everywhere(parameter.grad()));
    }
  });
}

}  // namespace
}  // namespace lockstep::ddp_options_test
