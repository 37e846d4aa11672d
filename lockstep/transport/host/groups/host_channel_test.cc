#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/transport/host/groups/host_channel.h>
#include <lockstep/transport/host/testing/failure_of.h>
#include <lockstep/transport/host/testing/host_ranks.h>

// The protocol with ranks as threads of one process, where ThreadSanitizer sees both sides. What needs real
// processes (deaths, forks, sockets) is tested in collectives/failure_test.cc.
namespace lockstep::transport::host_channel_test {
namespace {

using namespace std::chrono_literals;
using Flag = HostChannel::Flag;

void on_ranks(int ranks, const std::function<void(HostChannel&)>& body) {
  run_host_ranks(ranks, [&](const std::shared_ptr<HostChannel>& channel) { body(*channel); });
}

Announcement announce_value(uint64_t digest, const uint64_t& value) {
  Announcement announcement;
  announcement.digest = digest;
  announcement.payload = &value;
  announcement.payload_bytes = sizeof value;
  return announcement;
}

class SumCombiner final : public PayloadCombiner {
 public:
  void combine(void* partial, const std::vector<const void*>& inputs) const override { sum(partial, inputs); }
  void finish(void* result, const std::vector<const void*>& partials) const override {
    sum(result, partials);
  }

 private:
  static void sum(void* output, const std::vector<const void*>& inputs) {
    uint64_t total = 0;
    for (const void* input : inputs) total += *static_cast<const uint64_t*>(input);
    *static_cast<uint64_t*>(output) = total;
  }
};

class HostChannelSizes : public ::testing::TestWithParam<int> {};

TEST_P(HostChannelSizes, AnnouncementsCarryPayloadsInEveryOperation) {
  const auto ranks = static_cast<uint64_t>(GetParam());
  on_ranks(GetParam(), [ranks](HostChannel& channel) {
    const SumCombiner combiner;
    for (uint64_t round = 1; round <= 300; ++round) {
      const uint64_t mine = round * 1000 + channel.rank();
      channel.begin(Deadline::after(60s), round % 2 == 0);
      channel.announce(announce_value(round, mine));
      channel.await_announcements(&combiner);
      channel.commit();
      uint64_t sum = 0;
      for (uint64_t rank = 0; rank < ranks; ++rank) {
        const auto seen = *static_cast<const uint64_t*>(channel.payload(static_cast<int>(rank)));
        ASSERT_EQ(seen, round * 1000 + rank);
        sum += seen;
      }
      if (ranks > HostChannel::kFlatRanks) {
        ASSERT_EQ(*static_cast<const uint64_t*>(channel.combined_payload()), sum);
      }
    }
  });
}

TEST_P(HostChannelSizes, FlagsPublishWhatWasWrittenBefore) {
  const int ranks = GetParam();
  on_ranks(ranks, [ranks](HostChannel& channel) {
    Arena& arena = channel.transport().arena();
    auto* values = reinterpret_cast<int*>(arena.allocate(sizeof(int) * ranks));
    for (int round = 1; round <= 100; ++round) {
      channel.begin(Deadline::after(60s), false);
      Announcement announcement;
      announcement.memory = arena.find(values, sizeof(int) * ranks);
      channel.announce(announcement);
      channel.await_announcements();
      ASSERT_TRUE(channel.all_have_memory());
      // Each rank writes into all ranks' memory, each at its own place.
      for (int rank = 0; rank < ranks; ++rank) {
        reinterpret_cast<int*>(channel.memory(rank))[channel.rank()] = round * 100 + channel.rank();
      }
      channel.publish(Flag::kDone, channel.sequence());
      channel.await_all(Flag::kDone, channel.sequence());
      channel.commit();
      for (int rank = 0; rank < ranks; ++rank) ASSERT_EQ(values[rank], round * 100 + rank);
    }
  });
}

TEST_P(HostChannelSizes, DifferentDigestsFailOnEveryRank) {
  on_ranks(GetParam(), [](HostChannel& channel) {
    const uint64_t value = 0;
    const uint64_t digest = channel.rank() == channel.size() - 1 && channel.size() > 1 ? 2 : 1;
    channel.begin(Deadline::after(60s), false);
    channel.announce(announce_value(digest, value));
    if (channel.size() == 1) return channel.await_announcements();
    failure_of([&] { channel.await_announcements(); }, FailureKind::kMismatch);
    EXPECT_TRUE(channel.failed());
    failure_of([&] { channel.begin(Deadline::after(60s), false); }, FailureKind::kMismatch);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, HostChannelSizes, ::testing::Values(1, 2, 3, 8, 9, 17));

TEST(HostChannel, LateRankIsNamedByAllAtTheTimeout) {
  on_ranks(3, [](HostChannel& channel) {
    const uint64_t value = 0;
    if (channel.rank() == 2) {
      // Comes only after the others have given up.
      while (!channel.failed()) std::this_thread::yield();
      failure_of([&] { channel.begin(Deadline::after(60s), false); }, FailureKind::kTimeout);
      return;
    }
    channel.begin(Deadline::after(200ms), false);
    channel.announce(announce_value(1, value));
    const auto text = failure_of([&] { channel.await_announcements(); }, FailureKind::kTimeout);
    EXPECT_NE(text.find("rank 2"), std::string::npos) << text;
  });
}

TEST(HostChannel, LeavingEarlyFailsThoseWhoStay) {
  on_ranks(2, [](HostChannel& channel) {
    if (channel.rank() == 1) return;  // destroys its channel
    const uint64_t value = 0;
    channel.begin(Deadline::after(60s), false);
    channel.announce(announce_value(1, value));
    const auto text = failure_of([&] { channel.await_announcements(); }, FailureKind::kPeerLeft);
    EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
  });
}

TEST(HostChannel, LeavingAfterTheLastOperationDisturbsNoMember) {
  for (int repetition = 0; repetition < 50; ++repetition) {
    on_ranks(3, [](HostChannel& channel) {
      const uint64_t value = channel.rank();
      channel.begin(Deadline::after(60s), false);
      channel.announce(announce_value(1, value));
      channel.await_announcements();
      channel.commit();
    });
  }
}

TEST(HostChannel, AbortFromAnotherThreadEndsTheWaitEverywhere) {
  on_ranks(3, [](HostChannel& channel) {
    const uint64_t value = 0;
    std::thread other;
    if (channel.rank() == 1) other = std::thread([&] { channel.abort(); });
    if (channel.rank() != 2) {
      const auto text = failure_of(
          [&] {
            channel.begin(Deadline::after(60s), false);
            channel.announce(announce_value(1, value));
            channel.await_announcements();
          },
          FailureKind::kAborted);
      EXPECT_NE(text.find("aborted by rank 1"), std::string::npos) << text;
    }
    if (other.joinable()) other.join();
    while (!channel.failed()) std::this_thread::yield();
  });
}

// At a timeout that races with the last arrival, all ranks must agree on what happened.
TEST(HostChannel, TimeoutsAndArrivalsNeverDisagree) {
  for (int repetition = 0; repetition < 400; ++repetition) {
    std::atomic<int> succeeded{0};
    std::atomic<int> failed{0};
    on_ranks(3, [&](HostChannel& channel) {
      const uint64_t value = 0;
      try {
        channel.begin(Deadline::after(std::chrono::microseconds(300 + 2 * repetition)), false);
        // The late one arrives about when the others give up.
        if (channel.rank() == repetition % 3) std::this_thread::sleep_for(300us);
        channel.announce(announce_value(1, value));
        channel.await_announcements();
        if (repetition % 2 == 0) {
          channel.publish(Flag::kDone, channel.sequence());
          channel.await_all(Flag::kDone, channel.sequence());
        }
        channel.commit();
        ++succeeded;
      } catch (const ChannelError&) {
        ++failed;
      }
      while (succeeded + failed < 3) std::this_thread::yield();
    });
    EXPECT_TRUE(succeeded == 3 || failed == 3) << succeeded << " succeeded, " << failed << " failed";
  }
}

// The last arrival falls between the look at the flags and the decision of the one that gives up.
TEST(HostChannel, ArrivalWhileAnotherRankGivesUpIsDecidedOnce) {
  failpoint::configure("give_up=delay(60)");
  for (int repetition = 0; repetition < 5; ++repetition) {
    std::atomic<int> succeeded{0};
    on_ranks(2, [&](HostChannel& channel) {
      const uint64_t value = 0;
      try {
        channel.begin(Deadline::after(channel.rank() == 0 ? 1ms : 60s), false);
        if (channel.rank() == 1) std::this_thread::sleep_for(20ms);
        channel.announce(announce_value(1, value));
        channel.await_announcements();
        channel.commit();
        ++succeeded;
      } catch (const ChannelError& error) {
        EXPECT_EQ(static_cast<int>(error.kind()), static_cast<int>(FailureKind::kTimeout)) << error.what();
      }
    });
    EXPECT_TRUE(succeeded == 0 || succeeded == 2) << succeeded << " of 2 succeeded";
  }
  failpoint::configure("");
}

TEST(WaitPolicy, SpinsOnlyOnCoresThatNoOtherThreadNeeds) {
  EXPECT_GE(choose_wait_policy(2, 2, false).spins, 100);
  EXPECT_LT(choose_wait_policy(4, 2, false).spins, 100);
  EXPECT_GT(choose_wait_policy(4, 2, false).yields, 0);
  EXPECT_EQ(choose_wait_policy(2, 2, true).spins, 0);
  EXPECT_GT(choose_wait_policy(2, 8, true).spins, 0);
}

}  // namespace
}  // namespace lockstep::transport::host_channel_test
