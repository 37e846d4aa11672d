#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <lockstep/base/mix_bits.h>
#include <lockstep/collectives/algorithms/hosts/testing/pretended_hosts.h>

// Reductions over pretended hosts whose messages are encoded.
namespace lockstep::collectives::internal::algorithms::hosts::encoded_test {
namespace {

using transport::GroupChannel;

const std::vector<Hosts> kHosts = {{0, 1},       {0, 0, 1},          {1, 0, 1, 0, 0},
                                   {0, 1, 2},    {0, 1, 2, 0, 1, 2}, {0, 1, 2, 3, 3, 1, 1},
                                   {3, 1, 2, 0}, one_rank_each(8),   {0, 1, 2, 3, 4, 5, 6, 7, 0, 5}};

/// Between −1 and 1.
at::Tensor values_of(int rank, int64_t count) {
  at::Tensor values = at::empty({count}, at::kFloat);
  auto* data = values.mutable_data_ptr<float>();
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t bits = mix_bits(static_cast<uint64_t>(rank) << 32 ^ static_cast<uint64_t>(i));
    data[i] = std::ldexp(static_cast<float>(bits >> 40), -23) - 1;
  }
  return values;
}

/// One kind of reduction of values_of() all ranks, in float64, and how far from it the result may be.
class Exact {
 public:
  Exact(const Hosts& hosts, int64_t count, ReduceOperation operation)
      : count_(static_cast<size_t>(count)),
        ranks_(static_cast<double>(hosts.size())),
        divisor_(operation == ReduceOperation::kAverage ? ranks_ : 1),
        partials_(*std::max_element(hosts.begin(), hosts.end()) + 1, std::vector<double>(count_)),
        sum_(count_),
        magnitude_(count_) {
    for (size_t rank = 0; rank < hosts.size(); ++rank) {
      const at::Tensor values = values_of(static_cast<int>(rank), count);
      for (size_t i = 0; i < count_; ++i) partials_[hosts[rank]][i] += values.const_data_ptr<float>()[i];
    }
    for (const auto& partial : partials_) {
      for (size_t i = 0; i < count_; ++i) {
        sum_[i] += partial[i];
        magnitude_[i] += std::abs(partial[i]);
      }
      host_steps_ += largest(partial);
    }
    largest_sum_ = largest(sum_);
  }

  double operator[](size_t i) const { return sum_[i] / divisor_; }

  /// bfloat16 has 8 significant bits: each partial is rounded by a 256th at most, and pairwise so is the sum of these.
  double bf16_bound(size_t i, bool pairwise) const {
    double bound = magnitude_[i] / 256;
    if (pairwise) bound += (std::abs(sum_[i]) + bound) / 256;
    return (bound + float_bound()) / divisor_;
  }

  /// Each partial is rounded by half of its block's scale at most, and pairwise so is the sum of these. A scale is a
  /// 127th of the block's largest magnitude. With `steps` reductions of the same values, each of which adds what the
  /// last one has lost, the mean of the results has lost a share of one rounding; and what is encoded is larger by
  /// that error: with e ≤ (m + e)/254, e ≤ m/253.
  double int8_bound(bool pairwise, int steps = 1) const {
    const double halves = steps == 1 ? 254 : 253;
    double bound = host_steps_ / halves;
    // What is decoded in one step differs from the partial by the errors before and after.
    if (pairwise) bound += (largest_sum_ + (steps == 1 ? 1 : 2) * bound) / halves;
    // The codec divides and multiplies by the scale in float32.
    return (bound * 1.0001 / steps + float_bound()) / divisor_;
  }

 private:
  static double largest(const std::vector<double>& values) {
    double most = 0;
    for (const double value : values) most = std::max(most, std::abs(value));
    return most;
  }
  /// Additions in float32 of numbers below the number of ranks: one for each rank, for its host's partial with the
  /// error of the step before, and for the decoded ones; at the end the division.
  double float_bound() const { return (3 * ranks_ + 1) * ranks_ * std::ldexp(1, -24); }

  const size_t count_;
  const double ranks_;
  const double divisor_;
  std::vector<std::vector<double>> partials_;
  std::vector<double> sum_;
  std::vector<double> magnitude_;
  double host_steps_ = 0;  // of each host's partial the largest magnitude, added up
  double largest_sum_ = 0;
};

struct Encoded {
  HostCompression compression = HostCompression::kInt8;
  ReduceOperation operation = ReduceOperation::kSum;
  int root = -1;
};

void run(GroupChannel& channel, const at::Tensor& data, const Encoded& what,
         ErrorFeedback* feedback = nullptr) {
  const auto kind = what.root < 0 ? CollectiveKind::kAllReduce : CollectiveKind::kReduce;
  const Signature signature =
      Signature::of(kind, data, what.root).with(what.operation, false, what.compression);
  ASSERT_EQ(signature.compression(), what.compression);
  hosts::reduce(channel, {.deadline = terms().deadline, .feedback = feedback}, signature,
                data.mutable_data_ptr(), BufferOwner::kUser);
}

/// By rank, what each has after the reduction.
std::vector<at::Tensor> reduced(const Hosts& hosts, int64_t count, const Encoded& what) {
  std::vector<at::Tensor> results(hosts.size());
  on_ranks(hosts, [&](GroupChannel& channel) {
    // In the arena on all ranks, on some, or on none.
    const bool in_arena = count % 3 == 0 || (count % 3 == 1 && channel.rank() % 2 == 0);
    const at::Tensor data = placed(channel, values_of(channel.rank(), count), in_arena);
    run(channel, data, what);
    results[channel.rank()] = data.clone();
  });
  return results;
}

int number_of_hosts(const Hosts& hosts) {
  return *std::max_element(hosts.begin(), hosts.end()) + 1;
}

/// Of the errors, each as a part of what it may be.
double largest_error(const at::Tensor& result, const Exact& exact, HostCompression compression,
                     bool pairwise) {
  double most = 0;
  for (int64_t i = 0; i < result.numel(); ++i) {
    const double bound =
        compression == HostCompression::kBf16 ? exact.bf16_bound(i, pairwise) : exact.int8_bound(pairwise);
    most = std::max(most, std::abs(result.const_data_ptr<float>()[i] - exact[i]) / bound);
  }
  return most;
}

void check_bits_and_bounds(const Hosts& hosts, int64_t count, bool pairwise) {
  for (const auto compression : {HostCompression::kBf16, HostCompression::kInt8}) {
    for (const auto operation : {ReduceOperation::kSum, ReduceOperation::kAverage}) {
      const auto results = reduced(hosts, count, {compression, operation});
      for (const auto& result : results) EXPECT_TRUE(same_bits(result, results[0]));
      const double error = largest_error(results[0], Exact(hosts, count, operation), compression, pairwise);
      EXPECT_LE(error, 1) << number_of_hosts(hosts) << " hosts, " << count << ' ' << to_string(compression);
      EXPECT_GT(error, 0.1) << "it was not encoded";
    }
  }
}

TEST(EncodedReduction, AllRanksHoldTheSameBitsWithinTheCodecsBound) {
  for (const Hosts& hosts : kHosts) {
    // Elements beside blocks, lines and segments; with the larger chunks several segments, with the smaller ones many.
    for (const int64_t count : {4097, 30001, 100005}) {
      const SmallChunks chunks(count < 10000 ? 512 : 4096);
      check_bits_and_bounds(hosts, count, number_of_hosts(hosts) > 2);
    }
  }
}

TEST(EncodedReduction, EachFormWorksWithAnyNumberOfHosts) {
  const SmallChunks chunks(1024);
  for (const auto algorithm : {HostAlgorithm::kDirect, HostAlgorithm::kPairwise}) {
    const Forced forced(algorithm);
    for (const Hosts& hosts : {Hosts{0, 1, 1, 0}, Hosts{0, 1, 2, 0, 2}, one_rank_each(5)}) {
      check_bits_and_bounds(hosts, 12345, algorithm == HostAlgorithm::kPairwise);
    }
  }
}

TEST(EncodedReduction, ChunksOfTheUsualSize) {
  for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, Hosts{0, 1, 2, 0}}) {
    check_bits_and_bounds(hosts, 5 * (int64_t{1} << 18) + 3, number_of_hosts(hosts) > 2);
  }
}

TEST(EncodedReduction, ARootGetsTheBitsOfAnAllReduce) {
  const SmallChunks chunks(2048);
  constexpr int64_t kCount = 20011;
  for (const Hosts& hosts : kHosts) {
    for (const auto compression : {HostCompression::kBf16, HostCompression::kInt8}) {
      const at::Tensor all = reduced(hosts, kCount, {compression})[0];
      for (const int root : {0, static_cast<int>(hosts.size()) - 1}) {
        const auto results = reduced(hosts, kCount, {.compression = compression, .root = root});
        for (size_t rank = 0; rank < hosts.size(); ++rank) {
          const bool is_root = static_cast<int>(rank) == root;
          EXPECT_TRUE(same_bits(results[rank], is_root ? all : values_of(static_cast<int>(rank), kCount)));
        }
      }
    }
  }
}

TEST(EncodedReduction, ANanIsOneOnAllRanks) {
  const SmallChunks chunks(2048);
  for (const Hosts& hosts : {Hosts{0, 1}, Hosts{0, 1, 2, 1}}) {
    for (const auto compression : {HostCompression::kBf16, HostCompression::kInt8}) {
      on_ranks(hosts, [&](GroupChannel& channel) {
        const at::Tensor data = values_of(channel.rank(), 10000);
        if (channel.rank() == 1) {
          data.mutable_data_ptr<float>()[7777] = std::numeric_limits<float>::quiet_NaN();
        }
        run(channel, data, {compression, ReduceOperation::kAverage});
        EXPECT_TRUE(std::isnan(data.const_data_ptr<float>()[7777]));
        EXPECT_FALSE(std::isnan(data.const_data_ptr<float>()[0]));
      });
    }
  }
}

TEST(EncodedReduction, TheAverageOfLargeNumbersIsFinite) {
  const SmallChunks chunks(2048);
  const float number = std::ldexp(1.0f, 127);
  for (const Hosts& hosts : {Hosts{0, 1}, Hosts{0, 1, 2, 1}}) {
    for (const auto compression : {HostCompression::kBf16, HostCompression::kInt8}) {
      on_ranks(hosts, [&](GroupChannel& channel) {
        const at::Tensor data = at::full({10000}, number, at::kFloat);
        run(channel, data, {compression, ReduceOperation::kAverage});
        for (int64_t i = 0; i < data.numel(); ++i) {
          ASSERT_NEAR(data.const_data_ptr<float>()[i] / number, 1, 1e-5) << i;
        }
      });
    }
  }
}

/// How far the mean of the results is from what is exact, if the same values are reduced again and again.
double error_of_mean(const Hosts& hosts, int64_t count, const Encoded& what, int steps, bool keeping) {
  std::vector<double> sums(static_cast<size_t>(count));
  on_ranks(hosts, [&](GroupChannel& channel) {
    ErrorFeedback feedback;
    for (int step = 0; step < steps; ++step) {
      const at::Tensor data = values_of(channel.rank(), count);
      run(channel, data, what, keeping ? &feedback : nullptr);
      if (channel.rank() != 0) continue;
      for (int64_t i = 0; i < count; ++i) sums[i] += data.const_data_ptr<float>()[i];
    }
  });
  const Exact exact(hosts, count, what.operation);
  double most = 0;
  for (size_t i = 0; i < sums.size(); ++i) most = std::max(most, std::abs(sums[i] / steps - exact[i]));
  return most;
}

TEST(EncodedReduction, ErrorFeedbackBringsTheMeanToWhatIsExact) {
  const SmallChunks chunks(2048);
  constexpr int kSteps = 40;
  constexpr int64_t kCount = 20011;
  for (const Hosts& hosts : kHosts) {
    for (const auto operation : {ReduceOperation::kSum, ReduceOperation::kAverage}) {
      const Encoded what{HostCompression::kInt8, operation};
      const double bound = Exact(hosts, kCount, operation).int8_bound(number_of_hosts(hosts) > 2, kSteps);
      EXPECT_LE(error_of_mean(hosts, kCount, what, kSteps, true), bound) << number_of_hosts(hosts);
      // Without it the same error is made each time.
      EXPECT_GT(error_of_mean(hosts, kCount, what, 2, false), 3 * bound);
    }
  }
}

}  // namespace
}  // namespace lockstep::collectives::internal::algorithms::hosts::encoded_test
