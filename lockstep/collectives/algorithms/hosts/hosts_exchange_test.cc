#include <algorithm>
#include <array>
#include <barrier>
#include <cstring>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/base/mix_bits.h>
#include <lockstep/collectives/algorithms/hosts/testing/exchanges.h>
#include <lockstep/collectives/algorithms/hosts/testing/plain_reduction.h>
#include <lockstep/collectives/algorithms/hosts/testing/wire_meter.h>

// Exchanges over pretended hosts.
namespace lockstep::collectives::internal::algorithms::hosts::hosts_exchange_test {
namespace {

using namespace std::chrono_literals;
using transport::FailureKind;
using transport::GroupChannel;
using Bytes = std::vector<std::byte>;

// Small ones, ones that are small on some ranks or hosts only, large ones.
constexpr size_t kSizes[] = {0, 1, 63, 64, 100, 1200, 5000, 8100, 9000, 40001};

TEST(ExchangeOverHosts, AllGatherBroadcastAndGatherBringWhatWasGiven) {
  for (const size_t chunk : {size_t{256}, size_t{4096}}) {
    const SmallChunks chunks(chunk);
    for (const auto& hosts : kHosts) {
      on_ranks(hosts, [&](GroupChannel& channel) {
        const auto ranks = static_cast<size_t>(channel.size());
        const int own = channel.rank();
        int round = 0;
        for (const size_t bytes : kSizes) {
          const bool in_arena = (++round + own) % 3 != 0;
          const Content mine(channel, own, 0, bytes, in_arena);
          const auto gathered =
              run_exchange(channel, signature_of(CollectiveKind::kAllGather),
                           {.gives = {mine.piece()}, .takes = std::vector<size_t>(ranks, bytes)});
          for (size_t from = 0; from < ranks; ++from) {
            EXPECT_EQ(gathered[from], Content::of(static_cast<int>(from), 0, bytes))
                << "all_gather " << bytes;
          }
          const int root = round % channel.size();
          Exchange broadcast{.gives = {}, .takes = std::vector<size_t>(ranks, 0)};
          if (own == root) {
            broadcast.gives = {mine.piece()};
          } else {
            broadcast.takes[root] = bytes;
          }
          const auto sent = run_exchange(channel, signature_of(CollectiveKind::kBroadcast, root), broadcast);
          if (own != root) {
            EXPECT_EQ(sent[root], Content::of(root, 0, bytes)) << "broadcast " << bytes;
          }
          const auto to_root = run_exchange(
              channel, signature_of(CollectiveKind::kGather, root),
              {.gives = {mine.piece()}, .takes = std::vector<size_t>(ranks, own == root ? bytes : 0)});
          for (size_t from = 0; from < ranks && own == root; ++from) {
            EXPECT_EQ(to_root[from], Content::of(static_cast<int>(from), 0, bytes)) << "gather " << bytes;
          }
        }
      });
    }
  }
}

/// Sizes that differ by pair, some of them zero.
size_t uneven(int from, int to, size_t most) {
  const uint64_t bits = mix_bits(static_cast<uint64_t>(from) * 64 + static_cast<uint64_t>(to) + most);
  return bits % 4 == 0 ? 0 : bits % (most + 1);
}

TEST(ExchangeOverHosts, AllToAllAndScatterBringEachPairItsPiece) {
  for (const size_t chunk : {size_t{256}, size_t{4096}}) {
    const SmallChunks chunks(chunk);
    for (const auto& hosts : kHosts) {
      on_ranks(hosts, [&](GroupChannel& channel) {
        const int ranks = channel.size();
        const int own = channel.rank();
        int round = 0;
        for (const size_t most : kSizes) {
          const bool in_arena = (++round + own) % 3 != 0;
          std::vector<std::unique_ptr<Content>> pieces;
          Exchange all{.gives = {}, .takes = {}, .compare_sizes = true};
          for (int other = 0; other < ranks; ++other) {
            pieces.push_back(
                std::make_unique<Content>(channel, own, other, uneven(own, other, most), in_arena));
            all.gives.push_back(pieces.back()->piece());
            all.takes.push_back(uneven(other, own, most));
          }
          const auto come = run_exchange(channel, signature_of(CollectiveKind::kAllToAll), all);
          for (int from = 0; from < ranks; ++from) {
            EXPECT_EQ(come[from], Content::of(from, own, uneven(from, own, most))) << "all_to_all " << most;
          }
          const int root = round % ranks;
          pieces.clear();
          Exchange scatter{.gives = {}, .takes = std::vector<size_t>(ranks, 0)};
          scatter.takes[root] = most;
          for (int to = 0; to < ranks && own == root; ++to) {
            pieces.push_back(std::make_unique<Content>(channel, own, to, most, in_arena));
            scatter.gives.push_back(pieces.back()->piece());
          }
          const auto part = run_exchange(channel, signature_of(CollectiveKind::kScatter, root), scatter);
          EXPECT_EQ(part[root], Content::of(root, own, most)) << "scatter " << most;
        }
      });
    }
  }
}

TEST(ExchangeOverHosts, SmallOnesTakeTheMessagesOfABarrier) {
  for (const Hosts& hosts :
       {Hosts{0, 0, 1, 1}, {0, 1, 1, 1}, {0, 1, 0}, {0, 1, 2, 3}, {0, 1, 2, 3, 4, 5, 6, 7}}) {
    WireMeter meter(hosts);
    meter.on_ranks([&](GroupChannel& channel) {
      const auto ranks = static_cast<size_t>(channel.size());
      const int own = channel.rank();
      const size_t hosts_met = channel.layout().hosts.size();
      const size_t barrier = meter.measure([&] { hosts::barrier(channel, terms()); }).messages;
      EXPECT_EQ(barrier, hosts_met <= 4 ? hosts_met * (hosts_met - 1) : 8 * 3);
      for (const size_t bytes : {size_t{0}, size_t{1}, size_t{4000}}) {
        const Content mine(channel, own, 0, bytes, false);
        const Exchange all_gather{.gives = {mine.piece()}, .takes = std::vector<size_t>(ranks, bytes)};
        Exchange gather = all_gather;
        if (own != 1) gather.takes.assign(ranks, 0);
        Exchange broadcast{.gives = {}, .takes = std::vector<size_t>(ranks, 0)};
        if (own == 1) broadcast.gives = {mine.piece()};
        if (own != 1) broadcast.takes[1] = bytes;

        const size_t part = bytes / ranks;
        std::vector<std::unique_ptr<Content>> pieces;
        Exchange all_to_all{.gives = {}, .takes = std::vector<size_t>(ranks, part), .compare_sizes = true};
        for (int to = 0; to < channel.size(); ++to) {
          pieces.push_back(std::make_unique<Content>(channel, own, to, part, true));
          all_to_all.gives.push_back(pieces.back()->piece());
        }
        Exchange scatter{.gives = {}, .takes = std::vector<size_t>(ranks, 0)};
        scatter.takes[1] = part;
        if (own == 1) scatter.gives = all_to_all.gives;

        const auto measured = [&](CollectiveKind kind, const Exchange& what) {
          const int root = &what == &all_gather || &what == &all_to_all ? -1 : 1;
          std::vector<Bytes> come;
          const auto sent =
              meter.measure([&] { come = run_exchange(channel, signature_of(kind, root), what); });
          for (int from = 0; from < channel.size(); ++from) {
            const bool each = &what == &all_to_all || &what == &scatter;
            EXPECT_EQ(come[from], Content::of(from, each ? own : 0, what.takes[from]));
          }
          return sent.messages;
        };
        EXPECT_EQ(measured(CollectiveKind::kAllGather, all_gather), barrier) << bytes;
        EXPECT_EQ(measured(CollectiveKind::kGather, gather), barrier) << bytes;
        EXPECT_EQ(measured(CollectiveKind::kBroadcast, broadcast), barrier) << bytes;
        EXPECT_EQ(measured(CollectiveKind::kAllToAll, all_to_all), barrier) << bytes;
        EXPECT_EQ(measured(CollectiveKind::kScatter, scatter), barrier) << bytes;
      }
    });
  }
}

TEST(ExchangeOverHosts, MoreThanEightMembersOnAHost) {
  Hosts hosts(11, 0);
  hosts.insert(hosts.end(), {1, 1, 0, 1});
  on_ranks(hosts, [](GroupChannel& channel) {
    const int own = channel.rank();
    for (const size_t bytes : {size_t{10}, size_t{1000}, size_t{5000}}) {
      std::vector<std::unique_ptr<Content>> pieces;
      Exchange all{.gives = {}, .takes = {}, .compare_sizes = true};
      for (int other = 0; other < channel.size(); ++other) {
        pieces.push_back(std::make_unique<Content>(channel, own, other, bytes, own % 2 == 0));
        all.gives.push_back(pieces.back()->piece());
        all.takes.push_back(bytes);
      }
      const auto come = run_exchange(channel, signature_of(CollectiveKind::kAllToAll), all);
      const auto same = run_exchange(channel, signature_of(CollectiveKind::kAllGather),
                                     {.gives = {pieces.front()->piece()}, .takes = all.takes});
      for (int from = 0; from < channel.size(); ++from) {
        EXPECT_EQ(come[from], Content::of(from, own, bytes)) << bytes;
        EXPECT_EQ(same[from], Content::of(from, 0, bytes)) << bytes;
      }
    }
  });
}

TEST(ExchangeOverHosts, SizesThatDifferAreNamedOnAllRanks) {
  for (const auto& hosts : kHosts) {
    const auto ranks = static_cast<int>(hosts.size());
    for (int from = 0; from < ranks; ++from) {
      const int to =
          (from + 1 + from / 2) % ranks == from ? (from + 1) % ranks : (from + 1 + from / 2) % ranks;
      const size_t bytes = std::array<size_t, 3>{2000, 20, 30000}[from % 3];
      const auto texts = mismatch_texts(hosts, [&](GroupChannel& channel) {
        const Bytes memory(100000);
        Exchange all{.gives = {}, .takes = std::vector<size_t>(ranks, bytes), .compare_sizes = true};
        for (int other = 0; other < ranks; ++other) {
          // The second pair that differs is not named.
          const bool differs = channel.rank() == from && other == to;
          const bool differs_later = channel.rank() == ranks - 1 && other == ranks - 1 && from < ranks - 1;
          all.gives.push_back({memory.data(), differs ? bytes - 1 : differs_later ? 7u : bytes});
        }
        hosts::exchange(channel, terms(), signature_of(CollectiveKind::kAllToAll), all,
                        [](const auto&) { FAIL() << "data were moved"; });
      });
      EXPECT_EQ(
          texts,
          (std::set<std::string>{"rank " + std::to_string(from) + " sends " + std::to_string(bytes - 1) +
                                 " bytes to rank " + std::to_string(to) + ", which expects " +
                                 std::to_string(bytes) + "; each pair's split sizes must agree"}));
    }
  }
}

TEST(ExchangeOverHosts, AnAbortFailsItOnAllRanksAndBringsNothing) {
  for (const auto& hosts : kHosts) {
    for (const size_t bytes : {size_t{100}, size_t{100000}}) {
      on_ranks(hosts, [&](GroupChannel& channel) {
        if (channel.rank() == 1) {
          hosts::barrier(channel, terms());
          return channel.abort();
        }
        const Content mine(channel, channel.rank(), 0, bytes, channel.rank() % 2 == 0);
        const Exchange all{.gives = {mine.piece()}, .takes = std::vector<size_t>(channel.size(), bytes)};
        const auto call = [&] {
          hosts::exchange(channel, terms(), signature_of(CollectiveKind::kAllGather), all,
                          [](const auto&) { FAIL() << "rank 1 has given nothing"; });
        };
        failure_of(channel, call, FailureKind::kAborted);
      });
    }
  }
}

TEST(GroupsOverHosts, TwoRunAtATimeAndManyOperationsInARow) {
  const SmallChunks chunks(1024);
  for (const auto& hosts : kHosts) {
    const auto ranks = static_cast<int>(hosts.size());
    std::vector<uint64_t> words(ranks);
    std::barrier all_known(ranks);
    const auto work = [](GroupChannel& channel, uint64_t seed) {
      for (uint64_t round = 0; round < 30; ++round) {
        const auto count = static_cast<int64_t>(mix_bits(seed * 100 + round) % 6000);
        const PlainReduction values{at::kFloat, ReduceOperation::kSum, channel.size(), round};
        const at::Tensor data = values.tensor(channel.rank(), count);
        const auto signature = Signature::of(CollectiveKind::kAllReduce, data).with(ReduceOperation::kSum);
        hosts::reduce(channel, terms(), signature, data.mutable_data_ptr(), BufferOwner::kOperation);
        EXPECT_EQ(std::memcmp(data.const_data_ptr(), values.expected(count).const_data_ptr(), data.nbytes()),
                  0);
        const Content mine(channel, channel.rank(), 0, count, round % 2 == 0);
        const auto all =
            run_exchange(channel, signature_of(CollectiveKind::kAllGather),
                         {.gives = {mine.piece()}, .takes = std::vector<size_t>(channel.size(), count)});
        for (int from = 0; from < channel.size(); ++from) EXPECT_EQ(all[from], Content::of(from, 0, count));
        hosts::barrier(channel, terms());
      }
    };
    testing::run_rank_threads(hosts, [&](const std::shared_ptr<GroupChannel>& channel) {
      const auto exchange = [&](uint64_t own) {
        words[channel->rank()] = own;
        all_known.arrive_and_wait();
        return words;
      };
      // The other one has its members in the opposite order.
      std::vector<int> members(ranks);
      std::iota(members.rbegin(), members.rend(), 0);
      const auto reversed = [&](uint64_t own) {
        auto all = exchange(own);
        std::reverse(all.begin(), all.end());
        return all;
      };
      const auto other = GroupChannel::open(channel->host().members().shared_transport(), members, reversed,
                                            Deadline::after(60s));
      std::thread beside([&] { work(*other, 2); });
      work(*channel, 1);
      beside.join();
    });
  }
}

}  // namespace
}  // namespace lockstep::collectives::internal::algorithms::hosts::hosts_exchange_test
