#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <exception>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/collectives/algorithms/hosts/testing/plain_reduction.h>
#include <lockstep/collectives/algorithms/hosts/testing/pretended_hosts.h>
#include <lockstep/testing/long_run.h>

// Reductions and barriers over pretended hosts.
namespace lockstep::collectives::internal::algorithms::hosts::hosts_test {
namespace {

using transport::FailureKind;
using transport::GroupChannel;

const std::vector<Hosts> kHosts = {{0, 0, 1, 1},       {0, 1, 1, 1}, {0, 0, 1},          {0, 1, 2, 3},
                                   {1, 0, 1, 0, 0, 2}, {0, 1, 2},    {0, 1, 2, 0, 1, 2}, {0, 0, 0, 1}};

struct Reducing {
  PlainReduction values;
  int64_t count = 0;
  int root = -1;
  Memory memory = Memory::kElsewhere;
};

/// Runs one reduction and checks the result, and that what is not to be changed is not.
void check(GroupChannel& channel, const Reducing& what) {
  const at::Tensor input = what.values.tensor(channel.rank(), what.count);
  const at::Tensor data = placed(channel, input, what.memory);
  const auto kind = what.root < 0 ? CollectiveKind::kAllReduce : CollectiveKind::kReduce;
  hosts::reduce(channel, terms(), Signature::of(kind, data, what.root).with(what.values.operation),
                data.mutable_data_ptr(), BufferOwner::kUser);
  const bool gets_result = what.root < 0 || what.root == channel.rank();
  const at::Tensor expected = gets_result ? what.values.expected(what.count) : input;
  EXPECT_TRUE(same_bits(data, expected))
      << c10::toString(what.values.dtype) << ' ' << to_string(what.values.operation) << ' ' << what.count
      << " root " << what.root << " memory " << static_cast<int>(what.memory) << " rank " << channel.rank();
}

constexpr ReduceOperation kOperations[] = {
    ReduceOperation::kSum, ReduceOperation::kAverage, ReduceOperation::kProduct, ReduceOperation::kMin,
    ReduceOperation::kMax, ReduceOperation::kBitAnd,  ReduceOperation::kBitOr,   ReduceOperation::kBitXor};
const std::vector<at::ScalarType> kTypes = {at::kBool,
                                            at::kChar,
                                            at::kShort,
                                            at::kInt,
                                            at::kLong,
                                            at::kByte,
                                            at::ScalarType::UInt16,
                                            at::ScalarType::UInt32,
                                            at::ScalarType::UInt64,
                                            at::kHalf,
                                            at::kBFloat16,
                                            at::kFloat,
                                            at::kDouble};

TEST(ReduceOverHosts, AllTypesAndOperationsGiveTheResultOfPlainArithmetic) {
  const SmallChunks chunks(512);
  for (const Hosts& hosts : kHosts) {
    on_ranks(hosts, [](GroupChannel& channel) {
      uint64_t seed = 0;
      for (const at::ScalarType type : kTypes) {
        for (const ReduceOperation operation : kOperations) {
          if (!is_supported(type, operation)) continue;
          const PlainReduction values{type, operation, channel.size(), ++seed};
          const int root = seed % 3 == 0 ? static_cast<int>(seed) % channel.size() : -1;
          check(channel, {values, 100, root});
          check(channel, {values, 9001, root, static_cast<Memory>(seed % 3)});
        }
      }
    });
  }
}

TEST(ReduceOverHosts, SizesAroundTheLimitsOfPayloadsAndChunks) {
  const SmallChunks chunks(1024);
  const auto payload = static_cast<int64_t>(transport::HostChannel::kPayloadBytes);
  for (const Hosts& hosts : kHosts) {
    on_ranks(hosts, [&](GroupChannel& channel) {
      uint64_t seed = 100, turn = 0;
      for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kByte}) {
        ++turn;
        const auto fits = payload / static_cast<int64_t>(c10::elementSize(type));
        for (const int64_t count :
             {int64_t{0}, int64_t{1}, int64_t{3}, fits - 1, fits, fits + 1, 2 * fits - 1, 2 * fits,
              2 * fits + 1, 4 * fits + 7, 8 * fits, 16 * fits + 33}) {
          const PlainReduction values{type, ReduceOperation::kSum, channel.size(), ++seed};
          for (const Memory memory : {Memory::kArena, Memory::kElsewhere, Memory::kMixed}) {
            // Each count has one memory with each type; the long run takes all with each.
            if (!testing::long_run() && memory != static_cast<Memory>((seed + turn) % 3)) continue;
            check(channel, {values, count, -1, memory});
            check(channel, {values, count, static_cast<int>(seed) % channel.size(), memory});
          }
        }
      }
    });
  }
}

TEST(ReduceOverHosts, EachAlgorithmWorksWithAnyNumberOfHosts) {
  for (const auto algorithm : lockstep::hosts::kHostAlgorithms) {
    const Forced forced(algorithm);
    for (const int64_t count : {4097, 12345}) {
      const size_t chunk = count < 5000 ? 64 : 4096;
      const SmallChunks chunks(chunk);
      std::vector<Hosts> all = kHosts;
      for (const int hosts : {2, 5, 8}) all.push_back(one_rank_each(hosts));
      if (testing::long_run()) all.push_back(one_rank_each(16));
      for (const Hosts& hosts : all) {
        on_ranks(hosts, [&](GroupChannel& channel) {
          uint64_t seed = chunk;
          for (const auto operation : {ReduceOperation::kSum, ReduceOperation::kAverage}) {
            for (const at::ScalarType type : {at::kFloat, at::kHalf}) {
              const PlainReduction values{type, operation, channel.size(), ++seed};
              check(channel, {values, count, -1, static_cast<Memory>(seed % 3)});
              check(channel, {values, count, static_cast<int>(seed) % channel.size(), Memory::kMixed});
            }
          }
        });
      }
    }
  }
}

TEST(ReduceOverHosts, ChunksOfTheUsualSize) {
  for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, Hosts{0, 1}, Hosts{0, 1, 2, 0}}) {
    on_ranks(hosts, [](GroupChannel& channel) {
      const PlainReduction values{at::kFloat, ReduceOperation::kSum, channel.size(), 1};
      for (const Memory memory : {Memory::kArena, Memory::kMixed}) {
        check(channel, {values, 5 * (int64_t{1} << 19) + 3, -1, memory});
      }
    });
  }
}

TEST(ReduceOverHosts, HostsBeyondEightMembersAndSixteenHosts) {
  const SmallChunks chunks(512);
  Hosts uneven(11, 0);
  uneven.insert(uneven.end(), {1, 1, 0, 1});
  for (const Hosts& hosts : {uneven, one_rank_each(16)}) {
    on_ranks(hosts, [](GroupChannel& channel) {
      uint64_t seed = 7;
      for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kInt}) {
        for (const auto operation : {ReduceOperation::kSum, ReduceOperation::kMax}) {
          const PlainReduction values{type, operation, channel.size(), ++seed};
          check(channel, {values, 1000, -1});
          check(channel, {values, 20000, -1, static_cast<Memory>(seed % 3)});
          check(channel, {values, 20000, channel.size() - 1});
        }
      }
    });
  }
}

double furthest(const at::Tensor& a, const at::Tensor& exact) {
  const at::Tensor values = a.to(at::kDouble);
  double most = 0;
  for (int64_t i = 0; i < values.numel(); ++i) {
    most = std::max(most, std::abs(values.const_data_ptr<double>()[i] - exact.const_data_ptr<double>()[i]));
  }
  return most;
}

TEST(ReduceOverHosts, AllRanksHoldTheSameBitsNearTheExactSum) {
  const SmallChunks chunks(1024);
  for (const auto algorithm : lockstep::hosts::kHostAlgorithms) {
    const Forced forced(algorithm);
    for (const Hosts& hosts :
         {Hosts{0, 0, 1, 1}, Hosts{0, 1, 2, 0, 1, 3}, Hosts{2, 1, 1, 0}, one_rank_each(7)}) {
      for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
        for (const int64_t count : {int64_t{500}, int64_t{30001}}) {
          std::vector<at::Tensor> results(hosts.size());
          at::Tensor exact = at::zeros({count}, at::kDouble);
          for (size_t rank = 0; rank < hosts.size(); ++rank) {
            exact.add_(noise(static_cast<int>(rank), count, type).to(at::kDouble));
          }
          on_ranks(hosts, [&](GroupChannel& channel) {
            const at::Tensor data = noise(channel.rank(), count, type);
            const auto signature =
                Signature::of(CollectiveKind::kAllReduce, data).with(ReduceOperation::kSum);
            hosts::reduce(channel, terms(), signature, data.mutable_data_ptr(), BufferOwner::kUser);
            results[channel.rank()] = data;
          });
          for (const auto& result : results) EXPECT_TRUE(same_bits(result, results[0]));
          // Half a unit in the last place of the largest values, for each fold.
          const double bound = 1000.0 * static_cast<double>(hosts.size() * hosts.size()) /
                               (type == at::kFloat ? 1 << 24 : 256);
          EXPECT_LT(furthest(results[0], exact), bound);
        }
      }
    }
  }
}

TEST(ReduceOverHosts, FoldsInTheOrderOfHostsAndRanks) {
  const SmallChunks chunks(1024);
  const Hosts hosts = {1, 0, 1, 0};  // stand in the order of their first ranks: {0, 2}, {1, 3}
  constexpr int64_t kCount = 5000;
  const ReduceKernels& kernels = reduce_kernels(at::kFloat, ReduceOperation::kSum);
  std::vector<at::Tensor> inputs;
  for (int rank = 0; rank < 4; ++rank) inputs.push_back(noise(rank, kCount, at::kFloat));
  const auto sum = [&](const at::Tensor& a, const at::Tensor& b) {
    at::Tensor result = at::empty({kCount}, at::kFloat);
    void* to = result.mutable_data_ptr();
    const void* const from[] = {a.const_data_ptr(), b.const_data_ptr()};
    kernels.reduce(&to, 1, from, 2, a.numel());
    return result;
  };
  const at::Tensor expected = sum(sum(inputs[0], inputs[2]), sum(inputs[1], inputs[3]));
  on_ranks(hosts, [&](GroupChannel& channel) {
    const at::Tensor data = inputs[channel.rank()].clone();
    const auto signature = Signature::of(CollectiveKind::kAllReduce, data).with(ReduceOperation::kSum);
    hosts::reduce(channel, terms(), signature, data.mutable_data_ptr(), BufferOwner::kUser);
    EXPECT_TRUE(same_bits(data, expected));
  });
}

/// Numbers of which the sum of two is infinite, and which are averaged without rounding.
void check_averages_of_large_numbers(GroupChannel& channel) {
  const std::vector<std::pair<at::ScalarType, double>> numbers = {{at::kHalf, 60000},
                                                                  {at::kBFloat16, std::ldexp(1, 127)},
                                                                  {at::kFloat, std::ldexp(1, 127)},
                                                                  {at::kDouble, std::ldexp(1, 1023)}};
  for (const auto& [type, number] : numbers) {
    for (const int64_t count : {100, 10000}) {
      const at::Tensor data = at::full({count}, number, type);
      const auto signature = Signature::of(CollectiveKind::kAllReduce, data).with(ReduceOperation::kAverage);
      hosts::reduce(channel, terms(), signature, data.mutable_data_ptr(), BufferOwner::kUser);
      EXPECT_TRUE(same_bits(data, at::full({count}, number, type))) << c10::toString(type) << ' ' << count;
    }
  }
}

TEST(ReduceOverHosts, TheAverageOfLargeNumbersIsFinite) {
  Hosts uneven(11, 0);
  uneven.insert(uneven.end(), {1, 1, 0, 1});
  for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, Hosts{0, 1, 2}, uneven}) {
    on_ranks(hosts, check_averages_of_large_numbers);
  }
  for (const auto algorithm : lockstep::hosts::kHostAlgorithms) {
    const Forced forced(algorithm);
    on_ranks({0, 1, 2, 0, 3}, check_averages_of_large_numbers);
  }
}

TEST(ReduceOverHosts, ComplexNumbersAreReducedAsPairs) {
  on_ranks({0, 1, 1}, [](GroupChannel& channel) {
    const PlainReduction values{at::kFloat, ReduceOperation::kSum, channel.size(), 1};
    for (const int64_t count : {10, 6000}) {
      const at::Tensor data = at::view_as_complex(values.tensor(channel.rank(), 2 * count).view({count, 2}));
      const auto signature = Signature::of(CollectiveKind::kAllReduce, data).with(ReduceOperation::kSum);
      hosts::reduce(channel, terms(), signature, data.mutable_data_ptr(), BufferOwner::kUser);
      EXPECT_TRUE(same_bits(at::view_as_real(data), values.expected(2 * count).view({count, 2})));
    }
  });
}

TEST(BarrierOverHosts, NoRankPassesBeforeAllHaveCome) {
  for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, Hosts{0, 1, 1}, one_rank_each(5), one_rank_each(16)}) {
    std::atomic<size_t> come{0};
    on_ranks(hosts, [&](GroupChannel& channel) {
      for (size_t round = 1; round <= 50; ++round) {
        come.fetch_add(1);
        hosts::barrier(channel, terms());
        EXPECT_GE(come.load(), round * hosts.size());
      }
    });
  }
}

TEST(AgreementOverHosts, AllRanksHearWhoCalledWhat) {
  for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, Hosts{0, 1, 1, 0}, one_rank_each(6), Hosts{0, 0, 0, 1}}) {
    for (const int64_t count : {10, 10000}) {
      for (int other = 0; other < 4; ++other) {
        const auto texts = mismatch_texts(hosts, [&](GroupChannel& channel) {
          if (channel.rank() == other) return hosts::barrier(channel, terms());
          const at::Tensor data = at::ones({count});
          const auto signature = Signature::of(CollectiveKind::kAllReduce, data).with(ReduceOperation::kSum);
          const auto untouched = [&] { EXPECT_TRUE(same_bits(data, at::ones({count}))); };
          try {
            hosts::reduce(channel, terms(), signature, data.mutable_data_ptr(), BufferOwner::kUser);
          } catch (...) {
            untouched();
            throw;
          }
        });
        ASSERT_EQ(texts.size(), 1u) << *texts.begin() << '\n' << *texts.rbegin();
        EXPECT_NE(texts.begin()->find("rank " + std::to_string(other) + ": barrier()"), std::string::npos)
            << *texts.begin();
        EXPECT_NE(texts.begin()->find(": all_reduce(SUM, Float [" + std::to_string(count) + "])"),
                  std::string::npos)
            << *texts.begin();
      }
    }
  }
}

TEST(AgreementOverHosts, WholeHostsThatDifferAreNamedTogether) {
  const auto texts = mismatch_texts({0, 1, 0, 1, 2}, [&](GroupChannel& channel) {
    if (channel.layout().host() == 1) return hosts::barrier(channel, terms());
    const at::Tensor data = at::ones({3});
    const auto signature = Signature::of(CollectiveKind::kAllReduce, data).with(ReduceOperation::kMax);
    hosts::reduce(channel, terms(), signature, data.mutable_data_ptr(), BufferOwner::kUser);
  });
  EXPECT_EQ(texts, (std::set<std::string>{"the ranks called different operations: ranks 0, 2 and 4: "
                                          "all_reduce(MAX, Float [3]); ranks 1 and 3: barrier()"}));
}

TEST(ReduceOverHosts, AnAbortFailsItOnAllRanksAndNothingChangesAfterwards) {
  const SmallChunks chunks(4096);
  for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, Hosts{0, 1, 2}}) {
    on_ranks(hosts, [](GroupChannel& channel) {
      const at::Tensor data = placed(channel, at::ones({100000}), true);
      const auto signature = Signature::of(CollectiveKind::kAllReduce, data).with(ReduceOperation::kSum);
      if (channel.rank() == 1) {
        hosts::barrier(channel, terms());
        return channel.abort();
      }
      const auto reduce = [&] {
        hosts::reduce(channel, terms(), signature, data.mutable_data_ptr(), BufferOwner::kUser);
      };
      failure_of(channel, reduce, FailureKind::kAborted);
      const at::Tensor after = data.clone();
      while (!channel.failed()) std::this_thread::yield();
      EXPECT_TRUE(same_bits(data, after));
    });
  }
}

TEST(ReduceOverHosts, AnErrorInAnyPhaseLeavesResultsOrMemoryThatNoRankChangesAnyMore) {
  constexpr int64_t kCount = 100000;
  const SmallChunks chunks(4096);
  for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, Hosts{0, 1, 2}, Hosts{0, 0, 1}}) {
    std::vector<std::string> places;
    for (const char* place : {"announce", "finish"}) {
      for (size_t pass = 1; pass <= hosts.size(); ++pass) {
        places.push_back(std::string(place) + "=error(no memory)@" + std::to_string(pass));
      }
    }
    for (const int pass : {1, 2, 7, 20}) {
      places.push_back("reduce=error(no memory)@" + std::to_string(pass));
    }
    for (const std::string& place : places) {
      // All in the arena is for ranks as processes (after_error_test.cc): threads see each other's detached memory.
      for (const Memory memory : {Memory::kElsewhere, Memory::kMixed}) {
        std::barrier all(std::ssize(hosts));
        std::atomic<int> failures{0};
        on_ranks(hosts, [&](GroupChannel& channel) {
          const PlainReduction values{at::kFloat, ReduceOperation::kSum, channel.size(), 1};
          const at::Tensor data = placed(channel, values.tensor(channel.rank(), kCount), memory);
          const auto signature = Signature::of(CollectiveKind::kAllReduce, data).with(ReduceOperation::kSum);
          at::Tensor expected = values.expected(kCount);
          all.arrive_and_wait();  // making the group passes the places, too
          if (channel.rank() == 0) failpoint::configure(place);
          all.arrive_and_wait();
          try {
            hosts::reduce(channel, terms(), signature, data.mutable_data_ptr(), BufferOwner::kUser);
          } catch (const std::exception&) {
            failures += 1;
            channel.abort();
            channel.release_after_close([data] {});
            expected = data.fill_(777).clone();
          }
          all.arrive_and_wait();  // all have left the operation
          if (channel.rank() == 0) failpoint::configure("");
          EXPECT_TRUE(same_bits(data, expected)) << place << ", rank " << channel.rank();
        });
        EXPECT_GT(failures, 0) << place;
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::collectives::internal::algorithms::hosts::hosts_test
