#include <numeric>
#include <set>
#include <string>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/view_as_complex.h>
#include <c10/util/ScopeExit.h>
#include <gtest/gtest.h>

#include <lockstep/base/mix_bits.h>
#include <lockstep/collectives/algorithms/hosts/testing/exchanges.h>
#include <lockstep/collectives/algorithms/hosts/testing/plain_reduction.h>
#include <lockstep/collectives/algorithms/hosts/testing/wire_meter.h>

// reduce_scatter over pretended hosts, with ranks as threads of one process.
namespace lockstep::collectives::internal::algorithms::hosts::hosts_reduce_scatter_test {
namespace {

using transport::FailureKind;
using transport::GroupChannel;

/// By rank: elements of the piece that it receives.
using Counts = std::vector<int64_t>;

at::Tensor piece_for(const at::Tensor& input, const Counts& counts, int rank) {
  return input.narrow(0, std::accumulate(counts.begin(), counts.begin() + rank, int64_t{0}), counts[rank]);
}

/// Piece `rank` of `input`, reduced over all ranks, in `output`.
void scatter(GroupChannel& channel, ReduceOperation operation, const Counts& counts, const at::Tensor& input,
             const at::Tensor& output) {
  const bool equal = counts == Counts(counts.size(), counts.front());
  Exchange parts{
      .gives = {}, .takes = std::vector<size_t>(channel.size(), output.nbytes()), .compare_sizes = !equal};
  for (int to = 0; to < channel.size(); ++to) {
    const at::Tensor piece = piece_for(input, counts, to);
    parts.gives.push_back({piece.const_data_ptr(), piece.nbytes()});
  }
  const Signature signature = equal
                                  ? Signature::of(CollectiveKind::kReduceScatterTensor, output)
                                  : Signature::of_dtype(CollectiveKind::kReduceScatter, output.scalar_type());
  hosts::reduce_scatter(channel, terms(), signature.with(operation), parts, output.mutable_data_ptr());
}

/// Once to other memory, once in place.
void check(GroupChannel& channel, const PlainReduction& values, const Counts& counts, Memory memory) {
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  const int own = channel.rank();
  const at::Tensor before = values.tensor(own, total);
  const at::Tensor expected = piece_for(values.expected(total), counts, own);
  const std::string what = std::string(c10::toString(values.dtype)) + ' ' + to_string(values.operation) +
                           " counts " + std::to_string(counts.front()) + "… memory " +
                           std::to_string(static_cast<int>(memory)) + " rank " + std::to_string(own);
  const at::Tensor input = placed(channel, before, memory);
  const at::Tensor output = at::empty({counts[own]}, input.options());
  scatter(channel, values.operation, counts, input, output);
  EXPECT_TRUE(same_bits(output, expected)) << what;
  EXPECT_TRUE(same_bits(input, before)) << what;

  scatter(channel, values.operation, counts, input, piece_for(input, counts, own));
  const at::Tensor after = before.clone();
  piece_for(after, counts, own).copy_(expected);
  EXPECT_TRUE(same_bits(input, after)) << what << " in place";
}

constexpr ReduceOperation kOperations[] = {ReduceOperation::kSum, ReduceOperation::kAverage,
                                           ReduceOperation::kProduct, ReduceOperation::kMax,
                                           ReduceOperation::kBitXor};
constexpr at::ScalarType kTypes[] = {at::kBool, at::kByte,     at::kInt,   at::kLong,
                                     at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};

TEST(ReduceScatterOverHosts, AllTypesAndOperationsGiveTheResultOfPlainArithmetic) {
  const SmallChunks chunks(1024);
  for (const Hosts& hosts : kHosts) {
    on_ranks(hosts, [](GroupChannel& channel) {
      uint64_t seed = 0;
      for (const at::ScalarType type : kTypes) {
        for (const ReduceOperation operation : kOperations) {
          if (!is_supported(type, operation)) continue;
          const PlainReduction values{type, operation, channel.size(), ++seed};
          for (const int64_t count : {20, 2503}) {
            check(channel, values, Counts(channel.size(), count), static_cast<Memory>(seed % 3));
          }
        }
      }
    });
  }
}

TEST(ReduceScatterOverHosts, PiecesOfAllSizesAlsoNone) {
  for (const size_t chunk : {size_t{256}, size_t{4096}}) {
    const SmallChunks chunks(chunk);
    for (const Hosts& hosts : kHosts) {
      on_ranks(hosts, [](GroupChannel& channel) {
        uint64_t seed = 50;
        for (const int64_t most : {0, 1, 30, 300, 700, 5000}) {
          const PlainReduction values{at::kFloat, ReduceOperation::kSum, channel.size(), ++seed};
          Counts counts;
          for (int rank = 0; rank < channel.size(); ++rank) {
            const uint64_t bits = mix_bits(seed * 64 + static_cast<uint64_t>(rank));
            counts.push_back(bits % 4 == 0 ? 0 : static_cast<int64_t>(bits % (most + 1)));
          }
          Counts one(channel.size(), 0);
          one[seed % one.size()] = most;
          for (const Memory memory : {Memory::kArena, Memory::kElsewhere, Memory::kMixed}) {
            check(channel, values, counts, memory);
            check(channel, values, one, memory);
            check(channel, values, Counts(channel.size(), most), memory);
          }
        }
      });
    }
  }
}

TEST(ReduceScatterOverHosts, SizesAroundTheLimitOfSmallOnes) {
  const auto payload = static_cast<int64_t>(transport::HostChannel::kPayloadBytes);
  for (const Hosts& hosts : kHosts) {
    on_ranks(hosts, [&](GroupChannel& channel) {
      const PlainReduction values{at::kByte, ReduceOperation::kSum, channel.size(), 1};
      const int64_t fits = payload / channel.size();
      for (const int64_t count : {fits - 100, fits - 32, fits - 20, fits - 8, fits, fits + 1}) {
        check(channel, values, Counts(channel.size(), count), Memory::kMixed);
      }
    });
  }
}

TEST(ReduceScatterOverHosts, ChunksOfTheUsualSize) {
  for (const Hosts& hosts : {Hosts{0, 0, 1, 1}, {0, 1}, {0, 1, 2, 0}}) {
    on_ranks(hosts, [](GroupChannel& channel) {
      const PlainReduction values{at::kFloat, ReduceOperation::kSum, channel.size(), 1};
      for (const Memory memory : {Memory::kArena, Memory::kMixed}) {
        for (const int64_t count : {10'001, 100'003, 600'001}) {
          check(channel, values, Counts(channel.size(), count), memory);
        }
      }
    });
  }
}

TEST(ReduceScatterOverHosts, MoreThanEightMembersOnAHost) {
  const SmallChunks chunks(512);
  Hosts hosts(11, 0);
  hosts.insert(hosts.end(), {1, 1, 0, 1});
  on_ranks(hosts, [](GroupChannel& channel) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kInt}) {
      const PlainReduction values{type, ReduceOperation::kSum, channel.size(), 3};
      for (const int64_t count : {10, 1000}) {
        check(channel, values, Counts(channel.size(), count), Memory::kMixed);
      }
    }
  });
}

at::Tensor sum(const std::vector<at::Tensor>& inputs) {
  at::Tensor result = at::empty_like(inputs.front());
  void* to = result.mutable_data_ptr();
  std::vector<const void*> from;
  for (const at::Tensor& input : inputs) from.push_back(input.const_data_ptr());
  reduce_kernels(at::kFloat, ReduceOperation::kSum).reduce(&to, 1, from.data(), from.size(), result.numel());
  return result;
}

TEST(ReduceScatterOverHosts, FoldsInTheOrderOfHostsAndRanks) {
  const SmallChunks chunks(1024);
  const Hosts hosts = {1, 0, 1, 0};  // stand in the order of their first ranks: {0, 2}, {1, 3}
  for (const int64_t count : {100, 5000}) {
    std::vector<at::Tensor> inputs;
    for (int rank = 0; rank < 4; ++rank) inputs.push_back(noise(rank, 4 * count, at::kFloat));
    const at::Tensor expected =
        count == 100 ? sum(inputs) : sum({sum({inputs[0], inputs[2]}), sum({inputs[1], inputs[3]})});
    on_ranks(hosts, [&](GroupChannel& channel) {
      const Counts counts(4, count);
      for (const Memory memory : {Memory::kArena, Memory::kElsewhere}) {
        const at::Tensor output = at::empty({count}, at::kFloat);
        scatter(channel, ReduceOperation::kSum, counts, placed(channel, inputs[channel.rank()], memory),
                output);
        EXPECT_TRUE(same_bits(output, piece_for(expected, counts, channel.rank())));
      }
    });
  }
}

TEST(ReduceScatterOverHosts, TheAverageOfLargeHalvesIsFinite) {
  on_ranks({0, 0, 1, 1}, [](GroupChannel& channel) {
    for (const int64_t count : {100, 10000}) {
      const at::Tensor input = at::full({4 * count}, 60000, at::kHalf);
      const at::Tensor output = at::empty({count}, at::kHalf);
      scatter(channel, ReduceOperation::kAverage, Counts(4, count), input, output);
      EXPECT_TRUE(same_bits(output, at::full({count}, 60000, at::kHalf)));
    }
  });
}

TEST(ReduceScatterOverHosts, ComplexNumbersAreReducedAsPairs) {
  on_ranks({0, 1, 1}, [](GroupChannel& channel) {
    const PlainReduction values{at::kFloat, ReduceOperation::kSum, channel.size(), 1};
    for (const int64_t count : {10, 6000}) {
      const auto complex = [&](const at::Tensor& pairs) {
        return at::view_as_complex(pairs.view({3 * count, 2}));
      };
      const at::Tensor input = complex(values.tensor(channel.rank(), 6 * count));
      const at::Tensor output = at::empty({count}, input.options());
      scatter(channel, ReduceOperation::kSum, Counts(3, count), input, output);
      const at::Tensor expected = complex(values.expected(6 * count));
      EXPECT_TRUE(same_bits(output, piece_for(expected, Counts(3, count), channel.rank())));
    }
  });
}

TEST(ReduceScatterOverHosts, EachHostSendsOnePartialToEachRankOfTheOthers) {
  for (const Hosts& hosts : kHosts) {
    WireMeter meter(hosts);
    meter.on_ranks([&](GroupChannel& channel) {
      const size_t ranks = hosts.size();
      const size_t others = channel.layout().hosts.size() - 1;
      const int64_t count = 50'000;
      const PlainReduction values{at::kFloat, ReduceOperation::kSum, channel.size(), 1};
      for (const Memory memory : {Memory::kArena, Memory::kElsewhere}) {
        const at::Tensor input =
            placed(channel, values.tensor(channel.rank(), count * channel.size()), memory);
        const at::Tensor output = at::empty({count}, at::kFloat);
        const auto sent = meter.measure(
            [&] { scatter(channel, ReduceOperation::kSum, Counts(ranks, count), input, output); });
        const size_t partials = ranks * others * output.nbytes();
        EXPECT_GE(sent.bytes, partials);
        EXPECT_LT(sent.bytes, partials + ranks * others * 1000);  // the agreement
      }
    });
  }
}

TEST(ReduceScatterOverHosts, SmallOnesTakeTheMessagesOfABarrier) {
  for (const Hosts& hosts : kHosts) {
    WireMeter meter(hosts);
    meter.on_ranks([&](GroupChannel& channel) {
      const size_t barrier = meter.measure([&] { hosts::barrier(channel, terms()); }).messages;
      const PlainReduction values{at::kFloat, ReduceOperation::kSum, channel.size(), 1};
      for (const bool equal : {true, false}) {
        Counts counts(channel.size(), 1000 / channel.size());
        if (!equal) counts.front() = 0;
        const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
        const at::Tensor input = values.tensor(channel.rank(), total);
        const at::Tensor output = at::empty({counts[channel.rank()]}, at::kFloat);
        const auto sent =
            meter.measure([&] { scatter(channel, ReduceOperation::kSum, counts, input, output); });
        EXPECT_EQ(sent.messages, barrier);
        EXPECT_TRUE(same_bits(output, piece_for(values.expected(total), counts, channel.rank())));
      }
    });
  }
}

TEST(ReduceScatterOverHosts, SizesThatDifferAreNamedAndNothingChanges) {
  for (const Hosts& hosts : kHosts) {
    for (const int64_t count : {10, 1000, 30000}) {
      const auto texts = mismatch_texts(hosts, [&](GroupChannel& channel) {
        Counts counts(channel.size(), count);
        counts.back() = count + 1;
        // Rank 0 gives rank 1 less than that expects.
        if (channel.rank() == 0) counts[1] = count - 1;
        const at::Tensor input =
            at::full({std::accumulate(counts.begin(), counts.end(), int64_t{0})}, 1, at::kFloat);
        const at::Tensor output = at::full({counts[channel.rank()]}, 5, at::kFloat);
        const auto unchanged = c10::make_scope_exit(
            [&] { EXPECT_TRUE(same_bits(output, at::full({counts[channel.rank()]}, 5, at::kFloat))); });
        scatter(channel, ReduceOperation::kSum, counts, input, output);
      });
      EXPECT_EQ(texts, (std::set<std::string>{"rank 0 sends " + std::to_string(4 * (count - 1)) +
                                              " bytes to rank 1, which expects " + std::to_string(4 * count) +
                                              "; each pair's split sizes must agree"}));
    }
  }
}

TEST(ReduceScatterOverHosts, AnAbortFailsItOnAllRanksAndNothingChanges) {
  const SmallChunks chunks(4096);
  for (const Hosts& hosts : kHosts) {
    for (const int64_t count : {10, 50000}) {
      on_ranks(hosts, [&](GroupChannel& channel) {
        if (channel.rank() == 1) {
          hosts::barrier(channel, terms());
          return channel.abort();
        }
        const at::Tensor input = at::full({count * channel.size()}, 1, at::kFloat);
        const at::Tensor output = at::full({count}, 5, at::kFloat);
        const auto call = [&] {
          scatter(channel, ReduceOperation::kSum, Counts(channel.size(), count), input, output);
        };
        failure_of(channel, call, FailureKind::kAborted);
        EXPECT_TRUE(same_bits(output, at::full({count}, 5, at::kFloat)));
      });
    }
  }
}

}  // namespace
}  // namespace lockstep::collectives::internal::algorithms::hosts::hosts_reduce_scatter_test
