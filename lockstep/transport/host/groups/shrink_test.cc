#include <array>
#include <atomic>
#include <barrier>
#include <functional>
#include <gmock/gmock.h>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/base/process/interrupt.h>
#include <lockstep/base/ranks.h>
#include <lockstep/transport/host/groups/shrink.h>
#include <lockstep/transport/host/testing/host_ranks.h>

// The agreement on membership with ranks as threads of one process, where ThreadSanitizer sees both sides.
// Here no rank can die, but members leave, stay away, or are interrupted; deaths are in
// collectives/groups/shrink_group_test.cc.
namespace lockstep::transport::shrink_test {
namespace {

using namespace std::chrono_literals;
using ::testing::AnyOf;
using ::testing::HasSubstr;

using Channel = std::shared_ptr<HostChannel>;

void on_ranks(int ranks, const std::function<void(const Channel&)>& body) {
  run_host_ranks(ranks, body, {.segment_bytes = size_t{8} << 20});
}

ShrunkChannels shrink_soon(const Channel& channel, const std::vector<int>& excluded = {},
                           std::chrono::nanoseconds timeout = 60s) {
  return shrink(*channel, excluded, /*with_control=*/true, Deadline::after(timeout));
}

/// One operation, in which each rank sees what all have given.
void exchange_ranks(const Channel& channel, const std::vector<int>& expected) {
  const auto mine = static_cast<uint64_t>(channel->members().transport_rank(channel->rank()));
  Announcement announcement;
  announcement.payload = &mine;
  announcement.payload_bytes = sizeof mine;
  channel->begin(Deadline::after(60s), false);
  channel->announce(announcement);
  channel->await_announcements();
  channel->commit();
  ASSERT_EQ(channel->size(), static_cast<int>(expected.size()));
  for (int rank = 0; rank < channel->size(); ++rank) {
    ASSERT_EQ(*static_cast<const uint64_t*>(channel->payload(rank)), static_cast<uint64_t>(expected[rank]));
  }
}

void expect_works(const ShrunkChannels& made, const std::vector<int>& survivors) {
  EXPECT_EQ(made.survivors, survivors);
  exchange_ranks(made.channel, survivors);
  exchange_ranks(made.control, survivors);
  exchange_ranks(made.channel, survivors);
}

FailureKind failure_of(const std::function<void()>& action, std::string* text = nullptr) {
  try {
    action();
  } catch (const ChannelError& error) {
    if (text != nullptr) *text = error.what();
    return error.kind();
  }
  ADD_FAILURE() << "should have thrown";
  return FailureKind::kNone;
}

/// Whether a rank takes part in the first round.
bool has_entered(const HostChannel& channel, int rank) {
  return channel.members().block(rank).recovery.records[1].round.load() == 1;
}

class ShrinkSizes : public ::testing::TestWithParam<int> {};

TEST_P(ShrinkSizes, LeavesOutThoseThatAreListed) {
  const int ranks = GetParam();
  std::vector<int> excluded, survivors;
  for (int rank = 0; rank < ranks; ++rank) (rank % 3 == 0 ? excluded : survivors).push_back(rank);
  on_ranks(ranks, [&](const Channel& channel) {
    if (channel->rank() % 3 == 0) return;
    expect_works(shrink_soon(channel, excluded), survivors);
  });
}

TEST_P(ShrinkSizes, LeavesOutThoseThatHaveLeft) {
  const int ranks = GetParam();
  std::vector<int> survivors;
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank % 2 == 1) survivors.push_back(rank);
  }
  on_ranks(ranks, [&](const Channel& channel) {
    if (channel->rank() % 2 == 0) return channel->leave();
    expect_works(shrink_soon(channel), survivors);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ShrinkSizes, ::testing::Values(2, 3, 5, 9, 70));

TEST(Shrink, GivesAllOfThemAFreshGroupAgainAndAgain) {
  for (const int ranks : {2, 3, 5}) {
    std::mutex mutex;
    std::map<int, std::set<size_t>> sizes;  // of what is in use, by rank
    std::barrier<> together(ranks);
    on_ranks(ranks, [&](Channel channel) {
      for (int round = 0; round < 40; ++round) {
        together.arrive_and_wait();  // abort() would also end what another rank has not finished
        channel->abort();
        auto made = shrink_soon(channel);
        expect_works(made, all_ranks(ranks));
        channel = std::move(made.channel);
        if (round < 20) continue;
        std::lock_guard lock(mutex);
        sizes[channel->rank()].insert(channel->transport().arena().bytes_in_use());
      }
    });
    // Old groups' memory is used again, once all members have closed them.
    for (const auto& [rank, seen] : sizes) EXPECT_LE(*seen.rbegin(), size_t{1} << 20) << "rank " << rank;
  }
}

TEST(Shrink, SameOldGroupMayBeShrunkTwice) {
  on_ranks(3, [](const Channel& channel) {
    const auto first = shrink_soon(channel);
    expect_works(first, {0, 1, 2});
    expect_works(shrink_soon(channel), {0, 1, 2});
    exchange_ranks(first.channel, {0, 1, 2});  // which is another group
  });
}

TEST(Shrink, DownToOne) {
  on_ranks(4, [](const Channel& channel) {
    const int rank = channel->rank();
    Channel current = channel;
    for (int size = 4; size > 1; --size) {
      const int last = size - 1;
      if (rank == last) return current->leave();
      auto made = shrink_soon(current);
      ASSERT_EQ(made.channel->size(), last);
      current = std::move(made.channel);
    }
    exchange_ranks(current, {0});
  });
}

TEST(Shrink, ListsMayDifferAndAllAreLeftOut) {
  on_ranks(5, [](const Channel& channel) {
    switch (channel->rank()) {
      case 0:
        return expect_works(shrink_soon(channel, {3}), {0, 1});
      case 1:
        return expect_works(shrink_soon(channel, {4, 2}), {0, 1});
      default: {
        // They call it too, and want all ranks.
        std::string text;
        EXPECT_EQ(failure_of([&] { shrink_soon(channel); }, &text), FailureKind::kLeftBehind);
        EXPECT_THAT(text, HasSubstr("ranks 0 and 1"));
        EXPECT_THAT(text, HasSubstr("went on without this rank"));
      }
    }
  });
}

TEST(Shrink, ThoseLeftOutAreToldWhereverTheyAre) {
  on_ranks(3, [](const Channel& channel) {
    if (channel->rank() < 2) {
      const auto made = shrink_soon(channel, {2});
      expect_works(made, {0, 1});
      return channel->leave();
    }
    // In an operation of the old group.
    std::string text;
    channel->begin(Deadline::after(60s), false);
    channel->announce({});
    EXPECT_EQ(failure_of([&] { channel->await_announcements(); }, &text), FailureKind::kPeerLeft);
    EXPECT_THAT(text, HasSubstr("has gone on in a smaller group (shrink_group), which this rank is not in"));
    EXPECT_EQ(failure_of([&] { shrink_soon(channel); }, &text), FailureKind::kLeftBehind);
  });
}

TEST(Shrink, RankThatStaysAwayIsNamedOnAllAndMayComeLater) {
  std::barrier<> given_up(3);
  on_ranks(3, [&](const Channel& channel) {
    if (channel->rank() != 2) {
      // One deadline ends the wait of all.
      std::string text;
      const auto timeout = channel->rank() == 0 ? 20ms : std::chrono::milliseconds(60s);
      while (channel->rank() == 0 && !has_entered(*channel, 1)) std::this_thread::yield();
      EXPECT_EQ(failure_of([&] { shrink_soon(channel, {}, timeout); }, &text), FailureKind::kTimeout);
      EXPECT_THAT(text, HasSubstr(channel->rank() == 0 ? "timed out after" : "rank 0 (pid "));
      EXPECT_THAT(text, HasSubstr("waiting for rank 2 (pid "));
    }
    given_up.arrive_and_wait();
    expect_works(shrink_soon(channel), {0, 1, 2});
  });
}

TEST(Shrink, DeadlinesThatPassAtAnyMomentLeaveAllWithTheSame) {
  // The deadlines of two ranks race with the third's coming; each attempt succeeds on all or on none.
  std::array<std::atomic<int>, 60> successes{};
  std::barrier<> together(3);
  on_ranks(3, [&](const Channel& channel) {
    Channel current = channel;
    for (int round = 0; round < 60; ++round) {
      together.arrive_and_wait();
      const auto timeout = std::chrono::microseconds(channel->rank() == 2 ? 10'000 : round * 10);
      try {
        auto made = shrink_soon(current, {}, timeout);
        ++successes[round];
        current = std::move(made.channel);
      } catch (const ChannelError& error) {
        EXPECT_EQ(error.kind(), FailureKind::kTimeout) << error.what();
      }
    }
    together.arrive_and_wait();  // or the last ones to fail would leave, and one that still waits go on alone
  });
  for (const auto& count : successes) EXPECT_THAT(count.load(), AnyOf(0, 3));
}

struct Stop : std::runtime_error, Interruption {
  Stop() : std::runtime_error("stop") {}
};
thread_local const HostChannel* stop_once_rank_0_is_in = nullptr;

TEST(Shrink, InterruptedRankIsNamedOnAllAndMayComeAgain) {
  set_interrupt_check([] {
    if (stop_once_rank_0_is_in != nullptr && has_entered(*stop_once_rank_0_is_in, 0)) throw Stop();
  });
  std::barrier<> given_up(3);
  on_ranks(3, [&](const Channel& channel) {
    if (channel->rank() == 1) {
      stop_once_rank_0_is_in = channel.get();  // and rank 2 is not there yet
      EXPECT_THROW(shrink_soon(channel), Stop);
      stop_once_rank_0_is_in = nullptr;
    } else if (channel->rank() == 0) {
      std::string text;
      const auto kind = failure_of([&] { shrink_soon(channel); }, &text);
      EXPECT_EQ(kind, FailureKind::kAborted) << text;
      EXPECT_THAT(text, HasSubstr("rank 1 (pid "));
    }
    given_up.arrive_and_wait();
    expect_works(shrink_soon(channel), {0, 1, 2});
  });
  set_interrupt_check(nullptr);
}

}  // namespace
}  // namespace lockstep::transport::shrink_test
