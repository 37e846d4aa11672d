#include <barrier>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <gmock/gmock.h>
#include <memory>
#include <string>
#include <sys/resource.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/testing/thread_ranks.h>
#include <lockstep/transport/group_channel.h>
#include <lockstep/transport/host/testing/failure_of.h>
#include <lockstep/transport/host/testing/group_operation.h>
#include <lockstep/transport/wire/thread_engine.h>

// Cut wires and silent ranks, with ranks as threads of one process, where ThreadSanitizer sees both sides.
namespace lockstep::transport::far_ranks_test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

/// Ranks on hosts whose wires a test cuts.
class CutHosts {
 public:
  CutHosts(std::vector<int> host_of, std::chrono::nanoseconds limit)
      : hub(wire::ThreadHub::make(static_cast<int>(host_of.size()))),
        host_of_(std::move(host_of)),
        limit_(limit) {}

  void run(const std::function<void(GroupChannel&)>& body) {
    HostTransport::Options options;
    options.host_of = host_of_;
    options.host_names = {"host-0", "host-1", "host-2"};
    options.make_engine = [this](int rank) { return hub->make_engine(rank); };
    options.heartbeat_timeout = limit_;
    testing::run_rank_threads(
        ranks(), [&](const std::shared_ptr<GroupChannel>& channel) { body(*channel); }, options);
  }
  int ranks() const { return static_cast<int>(host_of_.size()); }

  /// Both ways, to all of other hosts.
  void cut_off(int rank) {
    for (int other = 0; other < ranks(); ++other) {
      if (host_of_[other] == host_of_[rank]) continue;
      hub->cut(rank, other);
      hub->cut(other, rank);
    }
  }

  const std::shared_ptr<wire::ThreadHub> hub;

 private:
  const std::vector<int> host_of_;
  const std::chrono::nanoseconds limit_;
};

std::string name(int rank, int host) {
  return "rank " + std::to_string(rank) + " (pid " + std::to_string(::getpid()) + " on host-" +
         std::to_string(host) + ")";
}

/// Waits for a message from `from`.
uint64_t receive(GroupChannel& channel, int from, std::chrono::nanoseconds timeout = 60s) {
  uint64_t memory = 42;
  begin(channel, timeout);
  channel.await({channel.receive(from, &memory, sizeof memory)});
  finish(channel);
  return memory;
}

TEST(FarRanks, ACutWireIsNamedOnBothSides) {
  CutHosts hosts({0, 1}, 2s);
  std::barrier met(2);
  hosts.run([&](GroupChannel& channel) {
    met.arrive_and_wait();
    if (channel.rank() == 0) hosts.cut_off(0);
    met.arrive_and_wait();
    const int other = 1 - channel.rank();
    std::vector<char> memory(100'000, 'a');
    const std::vector<char> late(1000, 'b');
    begin(channel);
    channel.send(other, late.data(), late.size());
    const auto pending = channel.receive(other, memory.data(), memory.size());
    const auto text = failure_of([&] { channel.await({pending}); }, FailureKind::kPeerEnded);
    EXPECT_THAT(text, AllOf(StartsWith(name(other, other) + " is unreachable: silent for "),
                            HasSubstr("its host is lost, or the wire is cut")));
    EXPECT_EQ(channel.transport().state_of(other), PeerState::kUnreachable);
    EXPECT_TRUE(channel.transport().has_ended(other));
    EXPECT_EQ(channel.transport().describe_end(other), text);
    EXPECT_FALSE(channel.transport().end_is_certain(other));
    // Nothing is left posted, and nothing comes any more, though the wire heals.
    EXPECT_TRUE(pending->done());
    channel.transport().wire().await_told();
    EXPECT_FALSE(channel.transport().wire().awaits(other));
    met.arrive_and_wait();
    hosts.hub->heal(channel.rank(), other);
    EXPECT_EQ(memory, std::vector<char>(memory.size(), 'a'));
  });
}

TEST(FarRanks, ARankThatIsHeardNoMoreHearsThatItIsGivenUp) {
  CutHosts hosts({0, 1}, 2s);
  hosts.run([&](GroupChannel& channel) {
    const int other = 1 - channel.rank();
    if (channel.rank() == 1) {
      hosts.hub->cut(1, 0);
      while (!channel.transport().has_ended(0)) std::this_thread::yield();
      EXPECT_THAT(channel.transport().describe_end(0), HasSubstr("has given up " + name(1, 1)));
    } else {
      failure_of([&] { receive(channel, 1); }, FailureKind::kPeerEnded);
    }
    // The other one lives.
    EXPECT_FALSE(channel.transport().end_is_certain(other));
  });
}

TEST(FarRanks, ARankThatSaysGoodbyeIsAbandonedThoughItsConnectionStays) {
  CutHosts hosts({0, 1}, 60s);
  std::barrier met(2);
  hosts.run([&](GroupChannel& channel) {
    HostTransport& transport = channel.transport();
    met.arrive_and_wait();
    if (channel.rank() == 1) {
      ControlMessage goodbye;
      goodbye.kind = ControlMessage::Kind::kLeaveJob;
      goodbye.number = 1;
      goodbye.set_text("has given up rank 0");
      transport.tell(0, goodbye);
    } else {
      uint64_t memory = 0;
      const auto pending = transport.wire().receive(1, {wire::Tag::kMaxChannel, 0}, &memory, sizeof memory);
      while (!pending->done()) std::this_thread::yield();
      EXPECT_EQ(pending->status(), wire::RequestStatus::kPeerLost);
      EXPECT_THAT(transport.describe_end(1), HasSubstr("has given up rank 0"));
    }
    met.arrive_and_wait();
  });
}

TEST(FarRanks, AnEndIsNoticedWhereNoRankWaitsForTheOneThatHasEnded) {
  CutHosts hosts({0, 1, 1}, 10s);
  hosts.run([&](GroupChannel& channel) {
    if (channel.rank() == 1) {  // waits for rank 2
      hosts.hub->disconnect(0, 1);
      EXPECT_THAT(failure_of([&] { begin(channel); }, FailureKind::kPeerEnded), StartsWith(name(0, 0)));
    } else {
      while (!channel.failed() && !channel.transport().has_ended(1)) std::this_thread::yield();
    }
  });
}

TEST(FarRanks, ASilentHostIsNamedWithItsRanks) {
  CutHosts hosts({0, 0, 1, 1}, 2s);
  std::barrier met(4);
  hosts.run([&](GroupChannel& channel) {
    met.arrive_and_wait();
    if (channel.rank() == 0) {
      hosts.cut_off(0);
      hosts.cut_off(1);
    }
    const int counterpart = (channel.rank() + 2) % 4;
    const bool first = channel.layout().host() == 0;
    const auto text = failure_of([&] { receive(channel, counterpart); }, FailureKind::kPeerEnded);
    EXPECT_THAT(text, HasSubstr(first ? "as are all that were asked on host-1 (ranks 2 and 3)"
                                      : "as are all that were asked on host-0 (ranks 0 and 1)"));
    EXPECT_THAT(text, HasSubstr("that host is lost or stopped, or the wire is cut"));
  });
}

TEST(FarRanks, RanksThatWereAskedInVainAreGivenUpInTurn) {
  CutHosts hosts({0, 1, 1, 1}, 2s);
  std::barrier met(4);
  hosts.run([&](GroupChannel& channel) {
    met.arrive_and_wait();
    if (channel.rank() != 0) return;
    hosts.cut_off(0);
    HostTransport& transport = channel.transport();
    transport.meet(3);
    uint64_t memory = 0;
    const auto pending = transport.wire().receive(3, {wire::Tag::kMaxChannel, 0}, &memory, sizeof memory);
    for (const int rank : {3, 1, 2}) {
      while (!transport.has_ended(rank)) std::this_thread::yield();
      EXPECT_EQ(transport.state_of(rank), PeerState::kUnreachable) << rank;
    }
    EXPECT_EQ(pending->status(), wire::RequestStatus::kPeerLost);
  });
}

TEST(FarRanks, WhatItsNeighbourSaysIsTold) {
  CutHosts hosts({0, 1, 1}, 2s);
  std::barrier met(3);
  hosts.run([&](GroupChannel& channel) {
    met.arrive_and_wait();
    if (channel.rank() == 0) {
      hosts.hub->cut(0, 2);
      hosts.hub->cut(2, 0);
    }
    const auto text = failure_of(
        [&] {
          if (channel.rank() == 0) {
            receive(channel, 2);
          } else {
            // The others hear it from rank 0, or find it out by themselves.
            receive(channel, 0);
          }
        },
        FailureKind::kPeerEnded);
    if (channel.rank() == 0) {
      EXPECT_THAT(text, AnyOf(AllOf(StartsWith(name(2, 1) + " is unreachable"),
                                    HasSubstr("though rank 1 on host-1 answers")),
                              StartsWith(name(0, 0) + " is unreachable")));
    }
  });
}

TEST(FarRanks, AnEndThatAnotherHostHasOnlySupposedIsNotToldOnByTheRanksNeighbours) {
  CutHosts hosts({0, 1, 1}, 60s);
  std::barrier met(3);
  hosts.run([&](GroupChannel& channel) {
    HostTransport& transport = channel.transport();
    met.arrive_and_wait();
    if (channel.rank() == 0) {
      hosts.hub->disconnect(0, 2);
      EXPECT_THAT(failure_of([&] { receive(channel, 2); }, FailureKind::kPeerEnded),
                  StartsWith(name(2, 1) + " is lost: "));
    }
    if (channel.rank() == 1) {
      while (!channel.failed()) std::this_thread::yield();
      EXPECT_THAT(failure_of([&] { begin(channel); }, FailureKind::kPeerEnded),
                  StartsWith(name(2, 1) + " is lost: "));
    }
    met.arrive_and_wait();
    if (channel.rank() != 0) return;
    transport.wire().before_sleep();  // moves all that rank 1 has said
    transport.await_heard();
    EXPECT_FALSE(transport.end_is_certain(2));
  });
}

TEST(FarRanks, ACutThatHealsInTimeIsNoError) {
  CutHosts hosts({0, 1}, 6s);
  std::barrier met(2);
  hosts.run([&](GroupChannel& channel) {
    met.arrive_and_wait();
    const int other = 1 - channel.rank();
    if (channel.rank() == 0) hosts.cut_off(0);
    met.arrive_and_wait();
    const uint64_t mine = 100 + channel.rank();
    uint64_t theirs = 0;
    begin(channel);
    const auto sending = channel.send(other, &mine, sizeof mine);
    const auto receiving = channel.receive(other, &theirs, sizeof theirs);
    while (channel.transport().state_of(other) != PeerState::kSuspected) std::this_thread::yield();
    met.arrive_and_wait();  // the first way that heals ends the other rank's suspicion
    hosts.hub->heal(channel.rank(), other);
    channel.await({sending, receiving});
    finish(channel);
    EXPECT_EQ(theirs, static_cast<uint64_t>(100 + other));
    while (channel.transport().state_of(other) != PeerState::kAlive) std::this_thread::yield();
  });
}

TEST(FarRanks, ARankThatComputesAnswersAndIsAwaited) {
  CutHosts hosts({0, 1}, 2s);
  std::barrier met(2);
  hosts.run([&](GroupChannel& channel) {
    if (channel.rank() == 0) {
      std::thread counter([&] {
        // An answer comes for each interval of silence; the limit has passed after these.
        const uint32_t before = channel.transport().wire().activity(1);
        while (channel.transport().wire().activity(1) - before < 7) std::this_thread::yield();
        EXPECT_EQ(channel.transport().state_of(1), PeerState::kAlive);
        met.arrive_and_wait();
      });
      EXPECT_EQ(receive(channel, 1), 7u);
      counter.join();
      return;
    }
    met.arrive_and_wait();
    const uint64_t mine = 7;
    begin(channel);
    channel.await({channel.send(0, &mine, sizeof mine)});
    finish(channel);
  });
}

TEST(FarRanks, WhatHasComeToASlowProcessIsNoSilence) {
  CutHosts hosts({0, 1}, 2s);
  std::barrier done(2);
  hosts.run([&](GroupChannel& channel) {
    if (channel.rank() == 0) {
      HostTransport& transport = channel.transport();
      hosts.hub->let_sleep(0);
      const uint32_t before = transport.wire().activity(1);
      while (transport.wire().activity(1) - before < 2 && !transport.has_ended(1)) {
        transport.expect({1});
        std::this_thread::yield();
      }
      EXPECT_FALSE(transport.has_ended(1));
    }
    done.arrive_and_wait();
  });
}

TEST(FarRanks, WithoutDescriptorsALostConnectionIsAFaultOfThisProcess) {
  CutHosts hosts({0, 1}, 10s);
  std::barrier met(2);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  hosts.run([&](GroupChannel& channel) {
    met.arrive_and_wait();
    const int other = 1 - channel.rank();
    if (channel.rank() == 0) {
      const rlimit none{1, before.rlim_max};
      EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
      hosts.hub->disconnect(0, 1);
    }
    while (channel.transport().state_of(other) == PeerState::kAlive) std::this_thread::yield();
    EXPECT_EQ(channel.transport().state_of(other), PeerState::kOwnFault);
    EXPECT_THAT(channel.transport().describe_end(other),
                AllOf(StartsWith(name(other, other) + " is out of reach by a fault of " +
                                 name(channel.rank(), channel.rank())),
                      HasSubstr("no file descriptor left")));
    met.arrive_and_wait();
    if (channel.rank() == 0) ::setrlimit(RLIMIT_NOFILE, &before);
    met.arrive_and_wait();
  });
}

TEST(FarRanks, AnEndThatItsHostTellsComesBeforeAFaultOfThisProcess) {
  CutHosts hosts({0, 1, 1}, 10s);
  std::barrier met(3);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  hosts.run([&](GroupChannel& channel) {
    HostTransport& transport = channel.transport();
    met.arrive_and_wait();
    if (channel.rank() == 0) {
      const rlimit none{1, before.rlim_max};
      EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
      hosts.hub->disconnect(0, 1);
      while (transport.state_of(1) == PeerState::kAlive) std::this_thread::yield();
      EXPECT_THAT(transport.describe_end(1), HasSubstr("is out of reach by a fault of"));
    }
    met.arrive_and_wait();
    if (channel.rank() == 2) {
      ControlMessage end;
      end.kind = ControlMessage::Kind::kEndOfFellow;
      end.rank = 1;
      end.set_text("was killed by signal 9 (SIGKILL)");
      transport.tell(0, end);
    }
    if (channel.rank() == 0) {
      while (!transport.end_is_certain(1)) std::this_thread::yield();
      EXPECT_EQ(transport.describe_end(1), name(1, 1) + " was killed by signal 9 (SIGKILL)");
      ::setrlimit(RLIMIT_NOFILE, &before);
    }
    met.arrive_and_wait();
  });
}

TEST(FarRanks, AControlMessageThatCannotBeReceivedEndsTheConnection) {
  CutHosts hosts({0, 1}, 10s);
  hosts.run([&](GroupChannel& channel) {
    HostTransport& transport = channel.transport();
    if (channel.rank() == 1) {
      const std::vector<char> too_long(sizeof(ControlMessage) + 1);
      for (uint32_t number = 0; number < 16; ++number) {
        transport.wire().send(0, {0, number}, too_long.data(), too_long.size());
      }
    }
    const int other = 1 - channel.rank();
    while (!transport.has_ended(other)) std::this_thread::yield();
    if (channel.rank() == 1) return;
    EXPECT_EQ(transport.state_of(1), PeerState::kOwnFault);
    EXPECT_THAT(transport.describe_end(1), HasSubstr("is out of reach by a fault of " + name(0, 0)));
  });
}

TEST(FarRanks, AnUnreachableRootIsNamedAcrossHosts) {
  CutHosts hosts({0, 1, 2}, 2s);
  std::barrier met(3);
  hosts.run([&](GroupChannel& channel) {
    met.arrive_and_wait();
    if (channel.rank() == 2) hosts.cut_off(2);
    met.arrive_and_wait();
    // Rank 0 waits for rank 1, which waits for rank 2, which hears of none.
    const auto text =
        failure_of([&] { receive(channel, (channel.rank() + 1) % 3); }, FailureKind::kPeerEnded);
    if (channel.rank() == 2) {
      EXPECT_THAT(text, StartsWith(name(0, 0) + " is unreachable: "));
    } else {
      EXPECT_THAT(text, StartsWith(name(2, 2) + " is unreachable: "));
      EXPECT_FALSE(channel.transport().has_ended(1 - channel.rank()));
    }
  });
}

TEST(FarRanks, ATimeoutNamesTheRootThatDoesNotAnswer) {
  CutHosts hosts({0, 1, 2}, 60s);
  std::barrier met(3);
  hosts.run([&](GroupChannel& channel) {
    met.arrive_and_wait();
    if (channel.rank() == 2) hosts.cut_off(2);
    if (channel.rank() == 1) channel.transport().hear_action(2, uint64_t{'B'} << 56 | uint64_t{2} << 32 | 3);
    met.arrive_and_wait();
    if (channel.rank() == 2) return;
    if (channel.rank() == 0) {
      while (channel.transport().cause_of_waiting({1}) != 2) std::this_thread::yield();
      EXPECT_EQ(channel.transport().in_or_after_action(2), " in or after 2B3");
    }
    const auto text =
        failure_of([&] { receive(channel, channel.rank() + 1, channel.rank() == 0 ? 200ms : 60s); },
                   FailureKind::kTimeout);
    EXPECT_THAT(text, HasSubstr(name(2, 2)));
  });
}

TEST(FarRanks, OfPointToPointMessagesOnlyThoseInProgressAreAwaited) {
  CutHosts hosts({0, 1}, 2s);
  std::barrier met(2);
  hosts.run([&](GroupChannel& channel) {
    constexpr MessageKind kWord{.bytes = sizeof(uint64_t), .type = 1};
    const int other = 1 - channel.rank();
    MessageChannel& messages = channel.messages();
    uint64_t word = 7;
    const auto wait_for = [&](const MessageChannel::Handle& request) {
      messages.wait(request);
      if (messages.error(request)) std::rethrow_exception(messages.error(request));
    };
    const auto receive_word = [&] {
      wait_for(messages.receive(&word, kWord, other, 0, Deadline::after(60s)));
    };
    wait_for(messages.send(&word, kWord, other, 0, Deadline::after(60s)));
    receive_word();
    channel.transport().wire().await_told();
    EXPECT_FALSE(channel.transport().wire().awaits(other));
    met.arrive_and_wait();
    if (channel.rank() == 0) hosts.cut_off(0);
    EXPECT_THAT(failure_of(receive_word, FailureKind::kPeerEnded),
                StartsWith(name(other, other) + " is unreachable: silent for "));
  });
}

TEST(FarRanks, TheHostOfARankThatDoesNotAnswerIsAskedEachTime) {
  CutHosts hosts({0, 1, 1}, 60s);
  std::barrier met(3);
  hosts.run([&](GroupChannel& channel) {
    HostTransport& transport = channel.transport();
    met.arrive_and_wait();
    if (channel.rank() == 0) {
      hosts.hub->cut(0, 1);
      EXPECT_EQ(transport.cause_of_waiting({1}), 1);
      const uint32_t before = transport.wire().activity(2);
      EXPECT_EQ(transport.cause_of_waiting({1}), 1);
      while (transport.wire().activity(2) == before) std::this_thread::yield();
    }
    met.arrive_and_wait();
  });
}

}  // namespace
}  // namespace lockstep::transport::far_ranks_test
