#include <gmock/gmock.h>
#include <limits>
#include <thread>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/ddp/hooks/bucket_order.h>
#include <lockstep/parallel/ddp/hooks/default_hooks.h>
#include <lockstep/parallel/ddp/hooks/optimizer_overlap_hook.h>
#include <lockstep/parallel/ddp/hooks/post_local_sgd_hook.h>
#include <lockstep/parallel/ddp/hooks/quantization_hooks.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::hooks_test {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;

torch::Tensor data(int rank, at::IntArrayRef sizes, at::ScalarType dtype = at::kDouble, int salt = 0) {
  const auto seed = static_cast<uint64_t>(100 * salt + rank);
  return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed), at::kDouble).to(dtype);
}

/// The mean of all ranks' data(), without communication.
torch::Tensor mean(int ranks, at::IntArrayRef sizes, at::ScalarType dtype = at::kDouble, int salt = 0) {
  auto sum = torch::zeros(sizes, at::kDouble);
  for (int rank = 0; rank < ranks; ++rank) sum += data(rank, sizes, dtype, salt).to(at::kDouble);
  return sum / ranks;
}

/// The buffer of a bucket of one parameter, reduced by `hook`. Fails unless the result is that buffer.
template <class State, class Hook>
torch::Tensor reduced(const State& state, const Hook& hook, const torch::Tensor& buffer) {
  GradBucket bucket(0, buffer, {torch::zeros_like(buffer)}, /*is_last=*/true);
  HookFuture future = hook(state, bucket);
  future->waitAndThrow();
  EXPECT_TRUE(future->value().toTensor().is_same(buffer));
  EXPECT_TRUE(bucket.buffer().is_same(buffer));
  return buffer;
}

double largest_error(const torch::Tensor& actual, const torch::Tensor& expected) {
  if (expected.numel() == 0) return 0;
  return (actual.to(at::kDouble) - expected).abs().max().item<double>() / expected.abs().max().item<double>();
}

TEST(DefaultHooks, AverageInTheirPrecision) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    run_ranks(ranks, [ranks](int rank) {
      auto world = init_process_group();
      for (auto dtype : {at::kFloat, at::kDouble}) {
        // The last is more than a block of cast_and_divide().
        for (int64_t numel : {0, 1, 33, 300'001}) {
          const auto expected = mean(ranks, {numel}, dtype);
          const auto gradient = [&] { return data(rank, {numel}, dtype); };
          const auto check = [&](const auto& hook, double bound) {
            const auto result = reduced(nullptr, hook, gradient());
            EXPECT_EQ(result.scalar_type(), dtype);
            EXPECT_LE(largest_error(result, expected), bound) << dtype << ' ' << numel;
            return result;
          };
          check(allreduce_hook, dtype == at::kFloat ? 1e-6 : 1e-15);
          const auto fp16 = check(fp16_compress_hook, 2e-3);
          const auto bf16 = check(bf16_compress_hook, 2e-2);
          EXPECT_TRUE(at::equal(fp16, check(fp16_compress_wrapper(allreduce_hook), 2e-3)));
          EXPECT_TRUE(at::equal(bf16, check(bf16_compress_wrapper(allreduce_hook), 2e-2)));
          EXPECT_TRUE(at::equal(fp16, fp16.to(at::kHalf).to(dtype)));
          EXPECT_TRUE(at::equal(bf16, bf16.to(at::kBFloat16).to(dtype)));
          EXPECT_TRUE(at::equal(reduced(nullptr, noop_hook, gradient()), gradient()));
          // The same with buffers that peers can read, as the reducer's are.
          const auto shared = empty_shared({numel}, dtype).copy_(gradient());
          EXPECT_TRUE(at::equal(reduced(nullptr, fp16_compress_hook, shared), fp16));
        }
      }
    });
  }
}

TEST(DefaultHooks, AverageOverTheGroupTheyAreGiven) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const auto group = new_group({0, 2});
    if (rank == 1) return;
    const auto expected = (data(0, {50}) + data(2, {50})) / 2;
    EXPECT_LE(largest_error(reduced(group, allreduce_hook, data(rank, {50})), expected), 1e-15);
    EXPECT_LE(largest_error(reduced(group, fp16_compress_hook, data(rank, {50})), expected), 2e-3);
    EXPECT_LE(largest_error(reduced(group, quantization_pertensor_hook, data(rank, {50})), expected), 1e-2);
  });
}

TEST(DefaultHooks, AverageSparseGradients) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const auto dense = torch::zeros({5, 2}).index_put_({rank + 1}, 4.F);
    GradBucket bucket(0, dense.to_sparse(1), {torch::zeros({5, 2})}, true);
    auto future = allreduce_hook(ProcessGroup{}, bucket);
    future->waitAndThrow();
    const auto expected = torch::zeros({5, 2}).index_put_({1}, 2.F).index_put_({2}, 2.F);
    EXPECT_TRUE(at::equal(future->value().toTensor().to_dense(), expected));
  });
}

TEST(DefaultHooks, WrappersTakeAUsersHookAndShowItTheShortBuffer) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    struct State {
      ProcessGroup group;
      std::vector<at::ScalarType> seen;
      std::vector<size_t> gradients;
    };
    auto state = std::make_shared<State>();
    const auto own = [](const std::shared_ptr<State>& its, GradBucket& bucket) {
      its->seen.push_back(bucket.buffer().scalar_type());
      its->gradients.push_back(bucket.gradients().size());
      auto future = all_reduce(bucket.buffer(), ReduceOp::MAX, its->group, true)->getFuture();
      // The result need not be the buffer.
      return then(future, [](const torch::Tensor& largest) { return largest * 2; });
    };
    GradBucket bucket(3, torch::full({6}, rank + 1.F), {torch::zeros({2, 2}), torch::zeros({2})}, true);
    auto future = bf16_compress_wrapper(fp16_compress_wrapper(own))(state, bucket);
    future->waitAndThrow();
    EXPECT_TRUE(at::equal(future->value().toTensor(), torch::full({6}, 4.F)));
    EXPECT_EQ(state->seen, std::vector<at::ScalarType>{at::kHalf});
    EXPECT_EQ(state->gradients, std::vector<size_t>{2});
  });
}

TEST(DefaultHooks, PassErrorsOn) {
  auto world = init_process_group({.rank = 0, .world_size = 1});
  GradBucket bucket(0, torch::ones({3}), {torch::zeros({3})}, true);
  const auto failing = [](const ProcessGroup&, GradBucket& its) {
    return then(completed_future(its.buffer()),
                [](const torch::Tensor&) -> torch::Tensor { TORCH_CHECK(false, "the hook's own error"); });
  };
  auto future = fp16_compress_wrapper(failing)(ProcessGroup{}, bucket);
  EXPECT_THAT(message_of<c10::Error>([&] { future->waitAndThrow(); }), HasSubstr("the hook's own error"));
}

TEST(QuantizationHooks, AreWithinHalfAScaleOfTheMean) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    run_ranks(ranks, [ranks](int rank) {
      auto world = init_process_group();
      for (auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
        for (int64_t numel : {0, 1, 7, 512, 100'003}) {
          const auto expected = mean(ranks, {numel}, dtype);
          double bound = 0;  // half a scale, on average over the ranks
          for (int other = 0; other < ranks && numel > 0; ++other) {
            const auto values = data(other, {numel}, dtype).to(at::kDouble);
            const double high = std::max(0., values.max().item<double>());
            const double low = std::min(0., values.min().item<double>());
            bound += (high - low) / 255 / 2 / ranks;
          }
          const double rounding = dtype == at::kBFloat16 ? 2e-2 : dtype == at::kHalf ? 2e-3 : 1e-5;
          const auto check = [&](const auto& hook) {
            const torch::Tensor result = reduced(nullptr, hook, data(rank, {numel}, dtype));
            const torch::Tensor error = (result.to(at::kDouble) - expected).abs();
            if (numel > 0) {
              EXPECT_LE(error.max().item<double>(), bound * 1.001 + rounding) << dtype << numel;
            }
            return error.sum().item<double>();
          };
          const double coarse = check(quantization_pertensor_hook);
          const double fine = check(quantization_perchannel_hook);
          const double finer = check(QuantizationPerChannelHook{.bucket_size = 16});
          if (numel > 10'000 && rounding < 1e-4) {
            EXPECT_LT(fine, coarse);
            EXPECT_LT(finer, fine);
          }
        }
      }
    });
  }
}

TEST(QuantizationHooks, KeepZerosAndPassOnWhatIsNotFinite) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (auto dtype : {at::kFloat, at::kDouble}) {
      EXPECT_TRUE(at::equal(reduced(nullptr, quantization_pertensor_hook, torch::zeros({9}, dtype)),
                            torch::zeros({9}, dtype)));
      // An exact byte for 0, also beside numbers that are all positive.
      auto sparse = torch::zeros({1000}, dtype);
      sparse[rank] = 3.7;
      EXPECT_EQ(reduced(nullptr, quantization_pertensor_hook, sparse).count_nonzero().item<int64_t>(), 2);
      for (double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(),
                         -std::numeric_limits<double>::infinity()}) {
        auto buffer = torch::ones({30}, dtype);
        if (rank == 1) buffer[12] = bad;
        GradBucket bucket(0, buffer, {torch::zeros({30})}, true);
        quantization_perchannel_hook(nullptr, bucket, 10)->waitAndThrow();
        EXPECT_TRUE(buffer.narrow(0, 10, 10).isnan().all().item<bool>()) << buffer;
        EXPECT_TRUE(at::allclose(buffer.narrow(0, 0, 10), torch::ones({10}, dtype)));
        EXPECT_TRUE(at::allclose(buffer.narrow(0, 20, 10), torch::ones({10}, dtype)));
      }
    }
  });
}

TEST(QuantizationHooks, RefuseWhatTheyCantQuantise) {
  auto world = init_process_group({.rank = 0, .world_size = 1});
  GradBucket complex(2, torch::zeros({3}, at::kComplexFloat), {torch::zeros({3})}, true);
  EXPECT_THAT(message_of<c10::ValueError>([&] { quantization_pertensor_hook(nullptr, complex); }),
              HasSubstr("bucket 2 is Strided ComplexFloat"));
  GradBucket sparse(0, torch::eye(3).to_sparse(), {torch::zeros({3, 3})}, true);
  EXPECT_THAT(message_of<c10::ValueError>([&] { quantization_perchannel_hook(nullptr, sparse); }),
              HasSubstr("dense"));
  GradBucket good(0, torch::zeros({3}), {torch::zeros({3})}, true);
  EXPECT_THAT(message_of<c10::ValueError>([&] { quantization_perchannel_hook(nullptr, good, 0); }),
              HasSubstr("bucket_size is 0"));
}

TEST(PostLocalSgd, AveragesOverAllRanksThenOverTheSubgroup) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    const auto subgroup = new_subgroups_by_enumeration({{0, 1}, {2}}).first;
    const auto of_all = mean(3, {20});
    const auto local = rank == 2 ? data(2, {20}) : mean(2, {20});
    const PostLocalSGDState state(nullptr, subgroup, 2), undivided(nullptr, subgroup, 1, false);
    const PostLocalSGDState same_host(nullptr, nullptr, 0);
    const auto step = [&](const PostLocalSGDState& its, bool is_last) {
      GradBucket bucket(is_last ? 1 : 0, data(rank, {20}), {torch::zeros({20})}, is_last);
      auto future = post_localSGD_hook(its, bucket);
      future->waitAndThrow();
      return future->value().toTensor();
    };
    for (int iteration = 0; iteration < 4; ++iteration) {
      EXPECT_EQ(state.iter(), std::min(iteration, 2));
      for (bool is_last : {false, true}) {
        EXPECT_LE(largest_error(step(state, is_last), iteration < 2 ? of_all : local), 1e-15);
        const auto own = data(rank, {20});
        EXPECT_LE(largest_error(step(undivided, is_last), iteration < 1 ? of_all : own), 1e-15);
        EXPECT_LE(largest_error(step(same_host, is_last), get_topology().spans_hosts() ? local : of_all),
                  1e-15);
      }
    }
  });
}

TEST(PostLocalSgd, AveragesOverTheHostWithoutASubgroup) {
  if (!testing::has_wire()) GTEST_SKIP() << "needs UCX";
  const auto body = [](int rank) {
    auto world = init_process_group();
    const PostLocalSGDState state(nullptr, nullptr, 1);
    const auto step = [&] {
      GradBucket bucket(0, data(rank, {20}), {torch::zeros({20})}, /*is_last=*/true);
      auto future = post_localSGD_hook(state, bucket);
      future->waitAndThrow();
      return future->value().toTensor();
    };
    // Three ranks on the first host, two on the second.
    const auto local = rank < 3 ? mean(3, {20}) : (data(3, {20}) + data(4, {20})) / 2;
    EXPECT_LE(largest_error(step(), mean(5, {20})), 1e-15);
    for (int iteration = 0; iteration < 3; ++iteration) EXPECT_LE(largest_error(step(), local), 1e-15);
  };
  run_ranks(5, body, {.hosts = 2});
}

TEST(BucketOrder, LetsCallbacksStartCollectivesInOneOrder) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    struct State {
      BucketOrder order;
    };
    auto state = std::make_shared<State>();
    // Sums, and sums the sum again, over tensors whose sizes differ, so that a wrong order is an error.
    const auto twice = [](const std::shared_ptr<State>& its, GradBucket& bucket) {
      auto turn = its->order.take_turn({});
      auto first = all_reduce(bucket.buffer(), ReduceOp::SUM, {}, true)->getFuture();
      return then(first, [turn, buffer = bucket.buffer()](const torch::Tensor&) mutable {
        turn->wait();
        auto second = all_reduce(buffer, ReduceOp::SUM, turn->group(), true);
        turn.reset();
        second->wait();
        return buffer;
      });
    };
    constexpr int kBuckets = 12;
    for (int round = 0; round < 30; ++round) {
      std::vector<HookFuture> futures;
      std::vector<torch::Tensor> buffers;
      for (int index = 0; index < kBuckets; ++index) {
        // Ranks are slow at different buckets.
        if ((index + rank + round) % 4 == 0) torch::mm(torch::ones({60, 60}), torch::ones({60, 60}));
        buffers.push_back(torch::full({1 + index * (index % 3 == 0 ? 4'000 : 1)}, rank + 1.));
        GradBucket bucket(index, buffers.back(), {torch::zeros_like(buffers.back())}, index + 1 == kBuckets);
        futures.push_back(twice(state, bucket));
        // Something else on the hook's group in the meantime, as a SyncBatchNorm's backward.
        auto other = torch::ones({7});
        all_reduce(other);
        ASSERT_EQ(other[0].item<float>(), 3);
      }
      for (int index = 0; index < kBuckets; ++index) {
        futures[index]->waitAndThrow();
        ASSERT_TRUE(at::equal(buffers[index], torch::full_like(buffers[index], 18))) << round << ' ' << index;
      }
    }
  });
}

/// Two parameters, one of them in channels_last order, and their bucket.
struct TwoParameters {
  torch::Tensor plain = torch::arange(6., at::kDouble).view({2, 3}).requires_grad_();
  torch::Tensor channels = torch::arange(24., at::kDouble)
                               .view({2, 3, 2, 2})
                               .contiguous(at::MemoryFormat::ChannelsLast)
                               .requires_grad_();

  std::vector<torch::Tensor> list() const { return {plain, channels}; }
  /// What autograd gives: in the parameter's memory order.
  std::vector<torch::Tensor> gradients(int rank, int step) const {
    return {data(rank, {2, 3}, at::kDouble, 2 * step),
            data(rank, {2, 3, 2, 2}, at::kDouble, 2 * step + 1).contiguous(at::MemoryFormat::ChannelsLast)};
  }
  GradBucket bucket(int rank, int step) const {
    const auto both = gradients(rank, step);
    const auto in_memory = both[1].as_strided({24}, {1});
    return GradBucket(0, torch::cat({both[0].flatten(), in_memory}), list(), true);
  }
};

TEST(OptimizerOverlap, StepsEachParameterWhenItsBucketIsReduced) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    using torch::optim::Adam;
    using torch::optim::AdamOptions;
    TwoParameters overlapped, plain;
    OptimizerPerParameter optimizers(overlapped.list(), [](auto parameters) {
      return std::make_shared<Adam>(parameters, AdamOptions(0.1).weight_decay(0.01));
    });
    ASSERT_EQ(optimizers.optimizers().size(), 2u);
    const auto hook = hook_then_optimizer(allreduce_hook, OptimizerHookState(optimizers));
    Adam optimizer(plain.list(), AdamOptions(0.1).weight_decay(0.01));
    for (int step = 0; step < 3; ++step) {
      const auto untouched = torch::ones({2, 3}, at::kDouble);
      overlapped.plain.mutable_grad() = untouched;
      auto bucket = overlapped.bucket(rank, step);
      auto future = hook(nullptr, bucket);
      future->waitAndThrow();
      EXPECT_TRUE(future->value().toTensor().is_same(bucket.buffer()));
      EXPECT_TRUE(overlapped.plain.grad().is_same(untouched)) << "gradients are the reducer's business";
      const auto of_0 = plain.gradients(0, step), of_1 = plain.gradients(1, step);
      for (size_t i = 0; i < 2; ++i) plain.list()[i].mutable_grad() = (of_0[i] + of_1[i]) / 2;
      optimizer.step();
      for (size_t i = 0; i < 2; ++i) {
        ASSERT_TRUE(at::allclose(overlapped.list()[i], plain.list()[i], 1e-12, 1e-12)) << step << ' ' << i;
      }
    }
  });
}

TEST(OptimizerOverlap, TakesAFunctionAndSomeOfTheParameters) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    TwoParameters parameters;
    const auto before = parameters.plain.detach().clone();
    const OptimizerHookState state(
        [](const torch::Tensor& parameter, const torch::Tensor& gradient) { parameter.sub_(gradient); },
        std::vector<torch::Tensor>{parameters.channels});
    // A hook whose result is a tensor of its own: the step sees it.
    const auto doubled = [](const ProcessGroup& group, GradBucket& bucket) {
      return then(allreduce_hook(group, bucket), [](const torch::Tensor& mean) { return mean * 2; });
    };
    const auto expected =
        parameters.channels.detach() - parameters.gradients(0, 0)[1] - parameters.gradients(1, 0)[1];
    auto bucket = parameters.bucket(rank, 0);
    hook_then_optimizer(doubled, state)(ProcessGroup{}, bucket)->waitAndThrow();
    EXPECT_TRUE(at::equal(parameters.plain.detach(), before));
    EXPECT_TRUE(at::allclose(parameters.channels.detach(), expected, 1e-12, 1e-12));
  });
}

TEST(OptimizerOverlap, SaysWhatIsMissing) {
  auto world = init_process_group({.rank = 0, .world_size = 1});
  EXPECT_THAT(message_of<c10::ValueError>([] { OptimizerHookState(ParameterStep{}); }),
              HasSubstr("no step to take"));
  TwoParameters parameters;
  const OptimizerPerParameter one({parameters.plain}, [](auto list) {
    return std::make_shared<torch::optim::SGD>(list, torch::optim::SGDOptions(0.1));
  });
  auto bucket = parameters.bucket(0, 0);
  auto future = hook_then_optimizer(allreduce_hook, OptimizerHookState(one))(nullptr, bucket);
  EXPECT_THAT(message_of<c10::Error>([&] { future->waitAndThrow(); }), HasSubstr("[2, 3, 2, 2]"));
  EXPECT_THAT(message_of<c10::ValueError>(
                  [&] { OptimizerPerParameter({parameters.plain}, [](auto) { return nullptr; }); }),
              HasSubstr("made no optimizer"));
}

TEST(Hooks, OfTwoModelsWorkInTwoThreads) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    std::vector<ProcessGroup> groups{new_group(), new_group()};
    std::vector<std::jthread> threads;
    for (int model = 0; model < 2; ++model) {
      threads.emplace_back([&, model] {
        for (int step = 0; step < 40; ++step) {
          const int salt = 1000 * model + step;
          const auto expected = mean(2, {3000}, at::kFloat, salt);
          const auto gradient = [&] { return data(rank, {3000}, at::kFloat, salt); };
          EXPECT_LE(largest_error(reduced(groups[model], fp16_compress_hook, gradient()), expected), 2e-3);
          EXPECT_LE(largest_error(reduced(groups[model], bf16_compress_wrapper(allreduce_hook), gradient()),
                                  expected),
                    2e-2);
          EXPECT_LE(largest_error(reduced(groups[model], quantization_pertensor_hook, gradient()), expected),
                    2e-2);
        }
      });
    }
  });
}

}  // namespace
}  // namespace lockstep::hooks_test
