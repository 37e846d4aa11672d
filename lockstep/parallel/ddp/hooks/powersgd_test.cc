#include <gmock/gmock.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/ddp/hooks/default_hooks.h>
#include <lockstep/parallel/ddp/hooks/internal/numpy_random.h>
#include <lockstep/parallel/ddp/hooks/powersgd_hook.h>
#include <lockstep/testing/expect_equal.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

// hooks_parity_test.py compares the numbers with PyTorch's.
namespace lockstep::powersgd_test {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using Sizes = std::vector<int64_t>;
using PowerHook = HookFuture (*)(const PowerSGDState&, GradBucket&);

/// A model's gradients by bucket, different in each iteration and on each rank.
struct Model {
  std::vector<std::vector<Sizes>> shapes;
  at::ScalarType dtype = at::kDouble;

  std::vector<torch::Tensor> parameters(size_t bucket) const {
    std::vector<torch::Tensor> list;
    for (const Sizes& sizes : shapes[bucket]) list.push_back(torch::zeros(sizes, dtype));
    return list;
  }
  torch::Tensor gradient(int rank, int iteration, size_t bucket) const {
    int64_t numel = 0;
    for (const auto& parameter : parameters(bucket)) numel += parameter.numel();
    const auto seed = static_cast<uint64_t>((iteration * 10 + rank) * 10) + bucket;
    return at::randn({numel}, at::make_generator<at::CPUGeneratorImpl>(seed), at::kDouble).to(dtype);
  }
  torch::Tensor mean(int ranks, int iteration, size_t bucket) const {
    auto sum = gradient(0, iteration, bucket).clone();
    for (int rank = 1; rank < ranks; ++rank) sum += gradient(rank, iteration, bucket);
    return sum / ranks;
  }
  /// One iteration: all buckets are on their way at once, as in a backward pass.
  template <class Hook>
  std::vector<torch::Tensor> reduce(const PowerSGDState& state, const Hook& hook, int rank,
                                    int iteration) const {
    std::vector<torch::Tensor> buffers;
    std::vector<HookFuture> futures;
    for (size_t index = 0; index < shapes.size(); ++index) {
      buffers.push_back(gradient(rank, iteration, index));
      GradBucket bucket(index, buffers.back(), parameters(index), index + 1 == shapes.size());
      futures.push_back(hook(state, bucket));
    }
    for (size_t index = 0; index < shapes.size(); ++index) {
      futures[index]->waitAndThrow();
      EXPECT_TRUE(futures[index]->value().toTensor().is_same(buffers[index]));
    }
    return buffers;
  }
};

/// Matrices that are worth it and some that are not, a scalar, empty ones, a bucket of nothing.
const Model kModel{
    {{{12, 20}, {12}, {}, {9, 2, 3, 3}, {12, 20}}, {{0, 4}, {30, 17}}, {{4}}, {{0}}, {{31, 31}}}};

bool equal_on_all_ranks(const torch::Tensor& tensor) {
  auto highest = tensor.clone(), lowest = tensor.clone();
  all_reduce(highest, ReduceOp::MAX);
  all_reduce(lowest, ReduceOp::MIN);
  return at::equal(highest, lowest);
}

/// The mean over the ranks of what compression has lost so far in each bucket.
std::vector<torch::Tensor> mean_errors(const PowerSGDState& state, size_t buckets) {
  const auto saved = state.get_state().toGenericDict().at("error_dict").toGenericDict();
  std::vector<torch::Tensor> errors;
  for (size_t bucket = 0; bucket < buckets; ++bucket) {
    errors.push_back(saved.at(static_cast<int64_t>(bucket)).toTensor().clone());
    all_reduce(errors.back(), ReduceOp::AVG);
  }
  return errors;
}

/// With error feedback nothing gets lost, only late: what all iterations gave, and the error that is left,
/// are together the mean of all gradients.
TEST(PowerSgd, LosesNothingForGood) {
  for (int ranks = 1; ranks <= 3; ++ranks) {
    run_ranks(ranks, [ranks](int rank) {
      auto world = init_process_group();
      for (PowerHook hook : {powerSGD_hook, batched_powerSGD_hook}) {
        for (const PowerSGDOptions& options :
             {PowerSGDOptions{.min_compression_rate = 1}, PowerSGDOptions{.matrix_approximation_rank = 3},
              PowerSGDOptions{.matrix_approximation_rank = 2, .warm_start = false, .random_seed = 5},
              PowerSGDOptions{.matrix_approximation_rank = 2, .batch_tensors_with_same_shape = true}}) {
          auto with_start = options;
          with_start.start_powerSGD_iter = 2;
          const PowerSGDState state(nullptr, with_start);
          std::vector<torch::Tensor> given, wanted;
          for (int iteration = 0; iteration < 6; ++iteration) {
            const auto results = kModel.reduce(state, hook, rank, iteration);
            EXPECT_EQ(state.iter(), iteration + 1);
            for (size_t bucket = 0; bucket < results.size(); ++bucket) {
              const auto mean = kModel.mean(ranks, iteration, bucket);
              EXPECT_TRUE(equal_on_all_ranks(results[bucket]));
              if (iteration < 2) {
                EXPECT_TRUE(at::allclose(results[bucket], mean, 1e-12, 1e-12));
                continue;
              }
              if (iteration == 2) {
                given.push_back(torch::zeros_like(mean)), wanted.push_back(torch::zeros_like(mean));
              }
              given[bucket] += results[bucket];
              wanted[bucket] += mean;
            }
          }
          const auto errors = mean_errors(state, kModel.shapes.size());
          for (size_t bucket = 0; bucket < errors.size(); ++bucket) {
            const auto left = errors[bucket].narrow(0, 0, given[bucket].numel());
            EXPECT_TRUE(at::allclose(given[bucket] + left, wanted[bucket], 1e-10, 1e-10)) << bucket;
          }
          EXPECT_GT(errors[1].abs().max().item<double>(), 0.1) << "compression loses something";
          EXPECT_GT(state.compression_stats().compress_rate, 1);
        }
      }
    });
  }
}

TEST(PowerSgd, IsExactForGradientsOfALowRank) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    torch::manual_seed(3);
    const auto left = torch::randn({40, 2}, at::kDouble), right = torch::randn({2, 30}, at::kDouble);
    const auto gradient = [&](int its_rank) { return at::matmul(left * (its_rank + 1), right).flatten(); };
    const auto before = at::detail::getDefaultCPUGenerator().get_state();
    const PowerSGDState state(nullptr, {.matrix_approximation_rank = 2, .start_powerSGD_iter = 2});
    const Model model{{{{40, 30}}}};
    for (int iteration = 0; iteration < 4; ++iteration) {
      auto buffer = gradient(rank);
      GradBucket bucket(0, buffer, model.parameters(0), true);
      powerSGD_hook(state, bucket)->waitAndThrow();
      EXPECT_TRUE(at::allclose(buffer, (gradient(0) + gradient(1) + gradient(2)) / 3, 1e-9, 1e-9))
          << iteration;
    }
    EXPECT_TRUE(at::equal(before, at::detail::getDefaultCPUGenerator().get_state()))
        << "the global generator is the user's";
    const auto stats = state.compression_stats();
    EXPECT_EQ(stats.numel_before_compression, 2 * 40 * 30);
    EXPECT_EQ(stats.numel_after_compression, 2 * 2 * (40 + 30));
    EXPECT_EQ(stats.compress_rate, 1200. / 140);
  });
}

/// The same property, to 16 bits' precision.
TEST(PowerSgd, LosesLittleInSixteenBits) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const Model model{kModel.shapes, at::kFloat};
    const PowerSGDState state(nullptr, {.matrix_approximation_rank = 3, .start_powerSGD_iter = 2});
    std::vector<torch::Tensor> given, wanted;
    for (int iteration = 0; iteration < 6; ++iteration) {
      const auto results = model.reduce(state, fp16_compress_wrapper(powerSGD_hook), rank, iteration);
      for (size_t bucket = 0; bucket < results.size(); ++bucket) {
        const auto mean = model.mean(2, iteration, bucket);
        EXPECT_TRUE(equal_on_all_ranks(results[bucket]));
        if (iteration < 2) {
          EXPECT_TRUE(at::allclose(results[bucket], mean, 0, 5e-3)) << bucket;
        } else if (iteration == 2) {
          given.push_back(results[bucket].clone()), wanted.push_back(mean);
        } else {
          given[bucket] += results[bucket];
          wanted[bucket] += mean;
        }
      }
    }
    const auto errors = mean_errors(state, model.shapes.size());
    for (size_t bucket = 0; bucket < errors.size(); ++bucket) {
      EXPECT_EQ(errors[bucket].scalar_type(), at::kHalf);
      EXPECT_TRUE(at::allclose(given[bucket] + errors[bucket], wanted[bucket], 0, 0.05)) << bucket;
    }
  });
}

TEST(PowerSgd, DropsItsMemoryWhenTheBucketsChange) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (PowerHook hook : {powerSGD_hook, batched_powerSGD_hook}) {
      const PowerSGDState state(nullptr, {.start_powerSGD_iter = 2});
      const Model other{{{{30, 16}}, {{12, 20}, {9, 9}}, {{7}}, {{3, 3}}, {{31, 32}}}};
      for (int iteration = 0; iteration < 4; ++iteration) kModel.reduce(state, hook, rank, iteration);
      for (const auto& result : other.reduce(state, hook, rank, 4)) EXPECT_TRUE(equal_on_all_ranks(result));
    }
  });
}

TEST(PowerSgd, SavesAndLoadsEverything) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    for (PowerHook hook : {powerSGD_hook, batched_powerSGD_hook}) {
      for (bool warm_start : {true, false}) {
        const PowerSGDState state(nullptr, {.matrix_approximation_rank = 2,
                                            .start_powerSGD_iter = 2,
                                            .warm_start = warm_start,
                                            .random_seed = 9});
        for (int iteration = 0; iteration < 4; ++iteration) kModel.reduce(state, hook, rank, iteration);
        const auto bytes = torch::pickle_save(state.get_state());
        // The saved one is a copy, and the settings come along.
        PowerSGDState loaded;
        loaded.set_state(torch::pickle_load(bytes));
        EXPECT_EQ(loaded.iter(), 4);
        EXPECT_EQ(loaded.options().matrix_approximation_rank, 2);
        EXPECT_EQ(loaded.options().warm_start, warm_start);
        for (int iteration = 4; iteration < 7; ++iteration) {
          const auto expected = kModel.reduce(state, hook, rank, iteration);
          const auto actual = kModel.reduce(loaded, hook, rank, iteration);
          testing::expect_equal(actual, expected);
        }
        EXPECT_EQ(loaded.compression_stats().numel_after_compression,
                  state.compression_stats().numel_after_compression);
      }
    }
  });
}

TEST(PowerSgd, RefusesBadSettingsAndStates) {
  auto world = init_process_group({.rank = 0, .world_size = 1});
  const auto refusal = [](const PowerSGDOptions& options) {
    return message_of<c10::ValueError>([&] { PowerSGDState(nullptr, options); });
  };
  for (const auto& options : {PowerSGDOptions{.start_powerSGD_iter = 1},
                              PowerSGDOptions{.start_powerSGD_iter = 1, .use_error_feedback = false},
                              PowerSGDOptions{.start_powerSGD_iter = 0, .warm_start = false}}) {
    EXPECT_THAT(
        refusal(options),
        HasSubstr("Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, "
                  "because PowerSGD can only be applied after the first two iterations in DDP."));
  }
  PowerSGDState(nullptr, {.start_powerSGD_iter = 0, .use_error_feedback = false, .warm_start = false});
  EXPECT_THAT(refusal({.matrix_approximation_rank = 0}),
              HasSubstr("`matrix_approximation_rank` >= 1; it is 0"));
  EXPECT_THAT(refusal({.random_seed = -1}), HasSubstr("Seed must be between 0 and 2**32 - 1; it is -1"));
  EXPECT_THAT(refusal({.random_seed = int64_t{1} << 32}), HasSubstr("it is 4294967296"));

  PowerSGDState state(nullptr, {.matrix_approximation_rank = 5});
  EXPECT_THAT(message_of<c10::Error>([&] { state.set_state(c10::IValue(3)); }),
              HasSubstr("not a dictionary"));
  const auto copy = [&] { return state.get_state().toGenericDict().copy(); };
  auto incomplete = copy();
  EXPECT_EQ(incomplete.erase("iter"), 1u);
  EXPECT_THAT(message_of<c10::Error>([&] { state.set_state(incomplete); }), HasSubstr("it has no 'iter'"));
  auto bad_generator = copy();
  bad_generator.insert_or_assign("rng", torch::zeros({3}, at::kLong));
  EXPECT_THAT(message_of<c10::ValueError>([&] { state.set_state(bad_generator); }), HasSubstr("625 int64"));
  auto bad_rank = copy();
  bad_rank.insert_or_assign("matrix_approximation_rank", int64_t{0});
  EXPECT_THAT(message_of<c10::ValueError>([&] { state.set_state(bad_rank); }), HasSubstr("it is 0"));
  EXPECT_EQ(state.options().matrix_approximation_rank, 5) << "a bad state changes nothing";

  GradBucket sparse(0, torch::eye(3).to_sparse(), {torch::zeros({3, 3})}, true);
  EXPECT_THAT(message_of<c10::ValueError>([&] { powerSGD_hook(state, sparse); }), HasSubstr("dense"));
}

TEST(PowerSgd, AFailedIterationLeavesTheErrorsAndTheCountAsTheyWere) {
  testing::run_survivors(3, {1}, [](int rank) {
    auto world = init_process_group();
    const PowerSGDState state(nullptr, {.start_powerSGD_iter = 2});
    for (int iteration = 0; iteration < 4; ++iteration) kModel.reduce(state, powerSGD_hook, rank, iteration);
    const auto before = mean_errors(state, kModel.shapes.size());
    const auto errors = [&] { return state.get_state().toGenericDict().at("error_dict").toGenericDict(); };
    const auto own = errors();
    if (rank == 1) testing::die();
    EXPECT_THROW(kModel.reduce(state, powerSGD_hook, rank, 4), c10::Error);
    EXPECT_EQ(state.iter(), 4);
    for (const auto& entry : own) {
      EXPECT_TRUE(at::equal(errors().at(entry.key()).toTensor(), entry.value().toTensor()));
    }
  });
}

TEST(PowerSgd, DrawsNumpysNumbers) {
  // [np.random.RandomState(seed).randint(1_000_000_000) for _ in range(5)]
  const std::vector<std::pair<int64_t, std::vector<uint32_t>>> expected = {
      {0, {209652396, 398764591, 924231285, 404868288, 441365315}},
      {1, {717354021, 946286476, 784077896, 491263, 550290313}},
      {4294967295, {419326371, 479346978, 697429004, 269265991, 167655348}}};
  for (const auto& [seed, numbers] : expected) {
    hooks::internal::NumpyRandomState random(seed);
    for (uint32_t number : numbers) EXPECT_EQ(random.randint(1'000'000'000), number);
  }
  // A copy goes on as the original does, wherever that stands in its 624 words.
  hooks::internal::NumpyRandomState random(0);
  for (int i = 0; i < 999; ++i) {
    hooks::internal::NumpyRandomState copy(1);
    copy.set_state(random.get_state());
    EXPECT_EQ(random.randint(1'000'000'000), copy.randint(1'000'000'000));
  }
  EXPECT_EQ(random.randint(1'000'000'000), 36556993u);
}

}  // namespace
}  // namespace lockstep::powersgd_test
