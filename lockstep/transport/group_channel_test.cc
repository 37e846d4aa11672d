#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <gmock/gmock.h>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/base/process/interrupt.h>
#include <lockstep/testing/thread_ranks.h>
#include <lockstep/transport/group_channel.h>
#include <lockstep/transport/host/testing/failure_of.h>
#include <lockstep/transport/host/testing/group_operation.h>
#include <lockstep/transport/wire/thread_engine.h>

// Groups over pretended hosts, with ranks as threads of one process, where ThreadSanitizer sees both sides.
namespace lockstep::transport::group_channel_test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Channel = std::shared_ptr<GroupChannel>;

void on_hosts(const std::vector<int>& host_of, const std::function<void(GroupChannel&)>& body) {
  testing::run_rank_threads(host_of, [&](const Channel& channel) { body(*channel); });
}

std::vector<int> others(const GroupChannel& channel) {
  std::vector<int> ranks;
  for (int rank = 0; rank < channel.size(); ++rank) {
    if (channel.layout().host_of[rank] != channel.layout().host()) ranks.push_back(rank);
  }
  return ranks;
}

/// One operation, in which each rank tells all on other hosts its number.
void exchange_with_others(GroupChannel& channel, uint64_t round) {
  begin(channel);
  const uint64_t mine = 1000 * round + static_cast<uint64_t>(channel.rank());
  std::vector<uint64_t> theirs(channel.size());
  std::vector<wire::Handle> requests;
  for (const int rank : others(channel)) {
    requests.push_back(channel.receive(rank, &theirs[rank], sizeof mine));
    requests.push_back(channel.send(rank, &mine, sizeof mine));
  }
  channel.await(requests);
  finish(channel);
  for (const int rank : others(channel)) ASSERT_EQ(theirs[rank], 1000 * round + static_cast<uint64_t>(rank));
}

/// Throws why no message comes: at once, where the group has failed already.
void receive_message(GroupChannel& channel, int from, std::chrono::nanoseconds timeout) {
  MessageChannel& messages = channel.messages();
  uint64_t memory = 0;
  const auto receiving = messages.receive(&memory, {sizeof memory, 1}, from, 0, Deadline::after(timeout));
  EXPECT_TRUE(messages.wait(receiving));
  std::rethrow_exception(messages.error(receiving));
}

/// A wait for one message from `from`, which does not come.
void receive_nothing(GroupChannel& channel, int from, std::chrono::nanoseconds timeout = 60s) {
  uint64_t memory = 42;
  begin(channel, timeout);
  channel.await({channel.receive(from, &memory, sizeof memory)});
  finish(channel);
}

class GroupChannelHosts : public ::testing::TestWithParam<std::vector<int>> {};

TEST_P(GroupChannelHosts, PassMessagesInEveryOperation) {
  on_hosts(GetParam(), [](GroupChannel& channel) {
    EXPECT_TRUE(channel.spans_hosts());
    EXPECT_EQ(channel.host().size(), static_cast<int>(channel.layout().neighbours().size()));
    EXPECT_EQ(channel.host().rank(), channel.layout().place());
    for (uint64_t round = 1; round <= 100; ++round) exchange_with_others(channel, round);
  });
}

TEST_P(GroupChannelHosts, MessagesOfAPairMatchInOrder) {
  on_hosts(GetParam(), [](GroupChannel& channel) {
    constexpr size_t kMessages = 20;
    begin(channel);
    std::vector<std::vector<size_t>> incoming(channel.size()), outgoing(channel.size());
    std::vector<wire::Handle> requests;
    for (const int rank : others(channel)) {
      incoming[rank].resize(kMessages * 3000);
      for (size_t i = 0; i < kMessages * 3000; ++i) outgoing[rank].push_back(i * 100 + channel.rank());
      // From one word to 24,000 bytes, so that some messages wait for their receives.
      for (size_t i = 0; i < kMessages; ++i) {
        const size_t bytes = sizeof(size_t) * (1 + i * 150);
        requests.push_back(channel.send(rank, &outgoing[rank][i * 3000], bytes));
        requests.push_back(channel.receive(rank, &incoming[rank][i * 3000], bytes));
      }
    }
    channel.await(requests);
    finish(channel);
    for (const int rank : others(channel)) {
      for (size_t i = 0; i < kMessages; ++i) {
        for (size_t word = i * 3000; word < i * 3000 + 1 + i * 150; ++word) {
          ASSERT_EQ(incoming[rank][word], word * 100 + rank);
        }
      }
    }
  });
}

TEST_P(GroupChannelHosts, ALateRankIsNamedWithItsHost) {
  const std::vector<int>& hosts = GetParam();
  const int late = static_cast<int>(hosts.size()) - 1;
  const std::string name = "rank " + std::to_string(late) + " (pid " + std::to_string(::getpid()) +
                           " on host-" + std::to_string(hosts[late]) + ")";
  on_hosts(hosts, [&](GroupChannel& channel) {
    const bool beside_it = channel.layout().host() == channel.layout().host_of[late];
    if (channel.rank() == late) {
      while (!channel.failed()) std::this_thread::yield();
      failure_of([&] { begin(channel); }, FailureKind::kTimeout);
      return;
    }
    // Its neighbours have more time than those on other hosts, whose word they take.
    const auto text = failure_of(
        [&] {
          if (beside_it) return begin(channel);
          receive_nothing(channel, late, 300ms);
        },
        FailureKind::kTimeout);
    EXPECT_THAT(text, HasSubstr("waiting for " + name));
    EXPECT_THAT(text, HasSubstr("timed out"));
  });
}

TEST_P(GroupChannelHosts, AFailureOnOneHostIsThatOfAll) {
  on_hosts(GetParam(), [](GroupChannel& channel) {
    // The last host's ranks refuse what they have announced; the others wait for messages of that host.
    const int last = static_cast<int>(channel.layout().hosts.size()) - 1;
    const int first_there = channel.layout().hosts[last].front();
    const auto text = failure_of(
        [&] {
          if (channel.layout().host() != last) return receive_nothing(channel, first_there);
          begin(channel);
          channel.refuse("the sizes differ");
        },
        FailureKind::kMismatch);
    EXPECT_EQ(text, "the sizes differ");
    EXPECT_TRUE(channel.failed());
    EXPECT_EQ(failure_of([&] { channel.host().begin(Deadline::after(60s), false); }, FailureKind::kMismatch),
              text);
  });
}

TEST_P(GroupChannelHosts, AnAbortFromAnotherThreadEndsAllWaits) {
  on_hosts(GetParam(), [](GroupChannel& channel) {
    std::thread other;
    if (channel.rank() == 0) other = std::thread([&] { channel.abort(); });
    const auto text = failure_of(
        [&] {
          for (uint64_t round = 1;; ++round) exchange_with_others(channel, round);
        },
        FailureKind::kAborted);
    EXPECT_THAT(text, StartsWith("aborted by rank 0 (pid "));
    if (other.joinable()) other.join();
  });
}

TEST_P(GroupChannelHosts, LeavingEarlyFailsThoseWhoStay) {
  const int leaver = static_cast<int>(GetParam().size()) - 1;
  on_hosts(GetParam(), [&](GroupChannel& channel) {
    exchange_with_others(channel, 1);
    if (channel.rank() == leaver) return channel.leave();
    const bool beside_it = channel.layout().host() == channel.layout().host_of[leaver];
    const auto text = failure_of(
        [&] {
          if (beside_it) return begin(channel);
          receive_nothing(channel, leaver);
        },
        FailureKind::kPeerLeft);
    EXPECT_THAT(text, HasSubstr("rank " + std::to_string(leaver) + " (pid "));
    EXPECT_THAT(text, HasSubstr("has left the group"));
  });
}

TEST_P(GroupChannelHosts, LeavingAfterTheLastOperationDisturbsNoRank) {
  for (int repetition = 0; repetition < 10; ++repetition) {
    on_hosts(GetParam(), [](GroupChannel& channel) { exchange_with_others(channel, 1); });
  }
}

INSTANTIATE_TEST_SUITE_P(Hosts, GroupChannelHosts,
                         ::testing::Values(std::vector<int>{0, 1}, std::vector<int>{0, 0, 1, 1},
                                           std::vector<int>{0, 1, 0, 1}, std::vector<int>{1, 0, 0, 0},
                                           std::vector<int>{2, 0, 1, 0, 0, 2},
                                           std::vector<int>{0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2}));

TEST(GroupChannel, OnOneHostItIsTheHostsChannel) {
  on_hosts({3, 3, 3}, [](GroupChannel& channel) {
    EXPECT_FALSE(channel.spans_hosts());
    EXPECT_EQ(channel.host().size(), 3);
    EXPECT_EQ(channel.host().rank(), channel.rank());
  });
}

TEST(GroupChannel, ALeaverIsNoticedByARankThatHasHadNoMessagesWithIt) {
  on_hosts({0, 0, 1, 1}, [](GroupChannel& channel) {
    if (channel.rank() == 3) return channel.leave();
    if (channel.rank() != 0) {
      while (!channel.failed()) std::this_thread::yield();
      return;
    }
    channel.host().begin(Deadline::after(60s), false);
    uint64_t memory = 0;
    const auto text = failure_of([&] { channel.await({channel.receive(3, &memory, sizeof memory)}); },
                                 FailureKind::kPeerLeft);
    EXPECT_THAT(text, StartsWith("rank 3 (pid "));
  });
}

TEST(GroupChannel, ALeaverIsNoticedWhereNoRankWaitsForIt) {
  on_hosts({0, 0, 1, 1}, [](GroupChannel& channel) {
    if (channel.rank() == 1) return channel.leave();
    const auto names_the_leaver = AllOf(StartsWith("rank 1 (pid "), HasSubstr("has left the group"));
    if (channel.rank() == 2) {  // waits for rank 3
      EXPECT_THAT(failure_of([&] { begin(channel); }, FailureKind::kPeerLeft), names_the_leaver);
      return;
    }
    EXPECT_THAT(
        failure_of([&] { receive_message(channel, 3 - channel.rank(), 60s); }, FailureKind::kPeerLeft),
        names_the_leaver);
  });
}

TEST(GroupChannel, ATimeoutNamesTheRankForWhichTheOtherHostWaits) {
  std::barrier on_first_host(2);
  const auto name = [](int rank) {
    return "rank " + std::to_string(rank) + " (pid " + std::to_string(::getpid()) + " on host-1)";
  };
  on_hosts({0, 0, 1, 1}, [&](GroupChannel& channel) {
    if (channel.rank() == 3) {  // is in another part of the program, and waits for the one that waits for it
      EXPECT_THAT(failure_of([&] { receive_message(channel, 2, 60s); }, FailureKind::kTimeout),
                  HasSubstr("timed out waiting for " + name(3)));
      return;
    }
    if (channel.rank() == 2) {
      const auto text = failure_of([&] { begin(channel); }, FailureKind::kTimeout);
      EXPECT_THAT(text, AllOf(StartsWith("rank 0 (pid "), HasSubstr("timed out waiting for " + name(3))));
      return;
    }
    while (channel.transport().cause_of_waiting({2}) != 3) std::this_thread::yield();
    if (channel.rank() == 1) {
      EXPECT_THAT(failure_of([&] { receive_message(channel, 2, 1ms); }, FailureKind::kTimeout),
                  HasSubstr("waiting for " + name(2) + ", which waits for " + name(3)));
    }
    on_first_host.arrive_and_wait();
    const auto text = failure_of(
        [&] {
          if (channel.rank() == 0) return receive_nothing(channel, 2, 200ms);
          begin(channel);
          finish(channel);
        },
        FailureKind::kTimeout);
    EXPECT_THAT(text, HasSubstr("waiting for " + name(3)));
  });
}

TEST(GroupChannel, AnAbortAfterTheFailureOfAnotherHostKeepsItsCause) {
  std::barrier one_has_failed(2);
  on_hosts({0, 0, 1}, [&](GroupChannel& channel) {
    if (channel.rank() == 0) one_has_failed.arrive_and_wait();
    const auto text = failure_of(
        [&] {
          begin(channel);
          if (channel.rank() == 2) channel.refuse("the sizes differ");
        },
        FailureKind::kMismatch);
    EXPECT_EQ(text, "the sizes differ");
    // As a rank does that ends by an exception: the other one of its host has not met the failure yet.
    if (channel.rank() == 1) channel.abort();
    if (channel.rank() == 1) one_has_failed.arrive_and_wait();
  });
}

TEST(GroupChannel, ARankThatHasEndedAfterAnAbortIsNotTheCause) {
  const auto hub = wire::ThreadHub::make(2);
  HostTransport::Options options;
  options.host_of = {0, 1};
  options.host_names = {"host-0", "host-1"};
  options.make_engine = [hub](int rank) { return hub->make_engine(rank); };
  std::barrier in_operation(2);
  testing::run_rank_threads(
      2,
      [&](const Channel& channel) {
        if (channel->rank() == 1) {
          in_operation.arrive_and_wait();
          return channel->abort();
        }
        begin(*channel);
        in_operation.arrive_and_wait();
        while (!channel->failed()) std::this_thread::yield();
        hub->disconnect(0, 1);
        while (!channel->has_ended(1)) std::this_thread::yield();
        uint64_t memory = 0;
        const auto text = failure_of([&] { channel->await({channel->receive(1, &memory, sizeof memory)}); },
                                     FailureKind::kAborted);
        EXPECT_THAT(text, StartsWith("aborted by rank 1 (pid "));
      },
      options);
}

TEST(GroupChannel, AFailedReceiveLeavesItsMemoryAlone) {
  on_hosts({0, 1}, [](GroupChannel& channel) {
    std::vector<char> memory(100'000, 'a');
    const std::vector<char> late(memory.size(), 'b');
    static std::atomic<bool> has_failed;
    has_failed = false;
    exchange_with_others(channel, 1);
    if (channel.rank() == 0) {
      begin(channel, 100ms);
      failure_of([&] { channel.await({channel.receive(1, memory.data(), memory.size())}); },
                 FailureKind::kTimeout);
      has_failed = true;
      while (!channel.has_left(1)) std::this_thread::yield();
      EXPECT_EQ(std::count(memory.begin(), memory.end(), 'a'), static_cast<std::ptrdiff_t>(memory.size()));
      return;
    }
    // Sends what the other has given up waiting for.
    while (!has_failed) std::this_thread::yield();
    failure_of(
        [&] {
          begin(channel);
          channel.await({channel.send(0, late.data(), late.size())});
        },
        FailureKind::kTimeout);
    channel.leave();
  });
}

TEST(GroupChannel, SeveralGroupsOfTheSameRanksKeepTheirMessagesApart) {
  testing::run_rank_threads(std::vector<int>{0, 1, 0, 1}, [](const Channel& channel) {
    // The exchange of addresses of the second and the third go over the first.
    const auto exchange = [&](uint64_t own) {
      begin(*channel);
      std::vector<uint64_t> words(4);
      std::vector<uint64_t> mine(2);
      std::vector<wire::Handle> requests;
      words[channel->rank()] = own;
      for (const int rank : others(*channel)) {
        requests.push_back(channel->receive(rank, &words[rank], sizeof own));
        requests.push_back(channel->send(rank, &own, sizeof own));
      }
      channel->await(requests);
      finish(*channel);
      // Those of the own host: by an announcement.
      channel->host().begin(Deadline::after(60s), false);
      Announcement announcement;
      announcement.payload = &own;
      announcement.payload_bytes = sizeof own;
      channel->host().announce(announcement);
      channel->host().await_announcements();
      channel->host().commit();
      for (int place = 0; place < channel->host().size(); ++place) {
        words[channel->layout().neighbours()[place]] =
            *static_cast<const uint64_t*>(channel->host().payload(place));
      }
      return words;
    };
    auto transport = channel->host().members().shared_transport();
    const auto second = GroupChannel::open(transport, {0, 1, 2, 3}, exchange, Deadline::after(60s));
    const auto third = GroupChannel::open(transport, {0, 1, 2, 3}, exchange, Deadline::after(60s));
    EXPECT_EQ(second->sequence(), third->sequence());
    const std::vector<GroupChannel*> groups{channel.get(), second.get(), third.get()};
    for (uint64_t round = 1; round <= 50; ++round) {
      // Operations at once, whose messages are posted in another order on each host.
      const int to = (channel->rank() + 1) % 4;
      const int from = (channel->rank() + 3) % 4;
      for (GroupChannel* group : groups) begin(*group);
      uint64_t first = round, second_value = 100 * round, got_first = 0, got_second = 0;
      const bool in_order = channel->layout().host() == 0;
      GroupChannel& one = in_order ? *groups[0] : *groups[1];
      GroupChannel& two = in_order ? *groups[1] : *groups[0];
      uint64_t& out_one = in_order ? first : second_value;
      uint64_t& out_two = in_order ? second_value : first;
      uint64_t& in_one = in_order ? got_first : got_second;
      uint64_t& in_two = in_order ? got_second : got_first;
      const auto a = one.send(to, &out_one, sizeof out_one);
      const auto b = two.send(to, &out_two, sizeof out_two);
      const auto c = one.receive(from, &in_one, sizeof in_one);
      const auto d = two.receive(from, &in_two, sizeof in_two);
      one.await({a, c});
      two.await({b, d});
      for (GroupChannel* group : groups) finish(*group);
      EXPECT_EQ(got_first, round);
      EXPECT_EQ(got_second, 100 * round);
    }
    // One group's failure is no other's.
    if (channel->rank() == 3) second->abort();
    while (!second->failed()) std::this_thread::yield();
    EXPECT_FALSE(third->failed());
    exchange_with_others(*third, 7);
  });
}

struct Stop : Interruption {};
thread_local bool stops = false;

TEST(GroupChannel, AnInterruptionEndsTheWaitAndFailsTheOthers) {
  on_hosts({0, 1}, [](GroupChannel& channel) {
    set_interrupt_check([] {
      if (stops) throw Stop();
    });
    stops = channel.rank() == 0;
    if (channel.rank() == 0) {
      EXPECT_THROW(receive_nothing(channel, 1), Stop);
      stops = false;
    } else {
      const auto text = failure_of([&] { receive_nothing(channel, 0); }, FailureKind::kAborted);
      EXPECT_THAT(text, StartsWith("aborted by rank 0 (pid "));
    }
  });
  set_interrupt_check(nullptr);
}

}  // namespace
}  // namespace lockstep::transport::group_channel_test
