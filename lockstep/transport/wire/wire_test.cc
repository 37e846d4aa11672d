#include <algorithm>
#include <atomic>
#include <csignal>
#include <gmock/gmock.h>
#include <memory>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <lockstep/rendezvous/rendezvous.h>
#include <lockstep/testing/gate.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/transport/wire/thread_engine.h>
#include <lockstep/transport/wire/ucx_engine.h>
#include <lockstep/transport/wire/wire.h>

namespace lockstep::transport::wire::wire_test {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using Bytes = std::vector<uint8_t>;

constexpr WaitPolicy kSpin{200, 100, true};
constexpr WaitPolicy kSleep{};
constexpr size_t kLong = size_t{25} << 20;

/// Bytes that tell messages apart.
Bytes pattern(size_t bytes, uint32_t seed) {
  Bytes result(bytes);
  uint32_t state = seed * 2654435761u + 1;
  for (uint8_t& byte : result) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<uint8_t>(state >> 24);
  }
  return result;
}

/// Makes the engines of ranks in this process.
class Engines {
 public:
  explicit Engines(const std::string& kind, int ranks) {
    if (kind == "Threads") hub_ = ThreadHub::make(ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      made_.push_back(hub_ ? hub_->make_engine(rank) : make_ucx_engine(rank, {.interface = "lo"}));
    }
    for (auto& engine : made_) {
      for (int rank = 0; rank < ranks; ++rank) {
        if (made_[rank] != engine) engine->connect(rank, made_[rank]->address());
      }
    }
  }
  std::unique_ptr<Engine> take(int rank) { return std::move(made_[rank]); }

 private:
  std::shared_ptr<ThreadHub> hub_;
  std::vector<std::unique_ptr<Engine>> made_;
};

/// A rank's wire, and what it has told.
struct Place {
  explicit Place(std::unique_ptr<Engine> engine)
      : wire(std::make_unique<Wire>(std::move(engine), [this](int rank, const std::string& reason) {
          lost_rank = rank;
          lost_reason = reason;
          ++losses;
          someone_lost.open();
        })) {}

  RequestStatus wait(const Handle& request, const WaitPolicy& policy = kSpin) {
    const auto ready = [&] { return request->done() || (wire->progress(), request->done()); };
    EXPECT_TRUE(wait_until(bell, policy, Deadline::after(60s), ready, [&] { wire->before_sleep(); }));
    return request->status();
  }
  RequestStatus send(int to, Tag tag, const Bytes& data) {
    return wait(wire->send(to, tag, data.data(), data.size(), &bell));
  }
  /// Of a message of so many bytes.
  Bytes receive(int from, Tag tag, size_t bytes) {
    Bytes result(bytes);
    const Handle request = wire->receive(from, tag, result.data(), bytes, &bell);
    EXPECT_EQ(wait(request), RequestStatus::kSucceeded);
    EXPECT_EQ(request->bytes(), bytes);
    return result;
  }

  Doorbell bell;
  testing::Gate someone_lost;
  std::atomic<int> losses{0};
  int lost_rank = -1;
  std::string lost_reason;
  std::unique_ptr<Wire> wire;
};

class Wires : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() == "Ucx" && !why_no_ucx().empty()) GTEST_SKIP() << why_no_ucx();
  }
  std::vector<std::unique_ptr<Place>> make(int ranks) {
    Engines engines(GetParam(), ranks);
    std::vector<std::unique_ptr<Place>> places;
    for (int rank = 0; rank < ranks; ++rank) places.push_back(std::make_unique<Place>(engines.take(rank)));
    return places;
  }
};

INSTANTIATE_TEST_SUITE_P(On, Wires, ::testing::Values("Threads", "Ucx"),
                         [](const auto& instance) { return instance.param; });

TEST_P(Wires, MessagesOfAllSizesArriveWhole) {
  const auto places = make(2);
  uint32_t number = 0;
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{4097}, size_t{8} << 10, size_t{1} << 20, kLong}) {
    const Bytes data = pattern(bytes, number);
    const Handle sent = places[0]->wire->send(1, {7, number}, data.data(), bytes, &places[0]->bell);
    EXPECT_EQ(places[1]->receive(0, {7, number}, bytes), data) << bytes;
    EXPECT_EQ(places[0]->wait(sent), RequestStatus::kSucceeded);
    EXPECT_EQ(sent->bytes(), bytes);
    ++number;
  }
}

TEST_P(Wires, MessagesMatchByTheirTagsInAnyOrder) {
  constexpr uint32_t kMessages = 150;
  const auto places = make(3);
  const auto size = [](uint32_t number) { return number % 7 == 0 ? size_t{20000} : size_t{number} * 13; };
  std::vector<Bytes> sent;
  std::vector<Bytes> received;
  std::vector<Handle> requests;
  // Ranks 0 and 1 send with the same tags, and channels with the same numbers. Half of the receives is there first.
  const auto receive = [&](uint32_t number, int from, uint32_t channel) {
    received.emplace_back(size(number));
    requests.push_back(places[2]->wire->receive(from, {channel, number}, received.back().data(),
                                                received.back().size(), &places[2]->bell));
  };
  const auto send = [&](uint32_t number, int from, uint32_t channel) {
    sent.push_back(pattern(size(number), number * 10 + from * 3 + channel));
    requests.push_back(places[from]->wire->send(2, {channel, number}, sent.back().data(), sent.back().size(),
                                                &places[from]->bell));
  };
  sent.reserve(4 * kMessages);
  received.reserve(4 * kMessages);
  const auto for_all = [](uint32_t begin, uint32_t end, const auto& action) {
    for (uint32_t at = begin; at < end; ++at) {
      for (int from = 0; from < 2; ++from) {
        for (const uint32_t channel : {uint32_t{1}, Tag::kMaxChannel}) action(at, from, channel);
      }
    }
  };
  for_all(0, kMessages / 2,
          [&](uint32_t at, int from, uint32_t channel) { receive(kMessages - 1 - at, from, channel); });
  for_all(0, kMessages, send);
  for_all(kMessages / 2, kMessages,
          [&](uint32_t at, int from, uint32_t channel) { receive(kMessages - 1 - at, from, channel); });
  for (const Handle& request : requests) {
    Place& place = *places[request->peer() == 2 ? 0 : 2];
    while (!request->done()) place.wire->progress();
    ASSERT_EQ(request->status(), RequestStatus::kSucceeded);
  }
  size_t index = 0;
  for_all(0, kMessages, [&](uint32_t at, int from, uint32_t channel) {
    const uint32_t number = kMessages - 1 - at;
    ASSERT_EQ(received[index++], pattern(size(number), number * 10 + from * 3 + channel)) << number;
  });
}

TEST_P(Wires, BothDirectionsMoveAtOnce) {
  constexpr size_t kBytes = size_t{3} << 20;
  const auto places = make(2);
  const auto run = [&](int rank) {
    std::vector<Bytes> out;
    std::vector<Bytes> in(6, Bytes(kBytes));
    std::vector<Handle> requests;
    Place& place = *places[rank];
    for (uint32_t number = 0; number < in.size(); ++number) out.push_back(pattern(kBytes, number * 2 + rank));
    for (uint32_t number = 0; number < in.size(); ++number) {
      requests.push_back(place.wire->send(1 - rank, {1, number}, out[number].data(), kBytes, &place.bell));
      requests.push_back(place.wire->receive(1 - rank, {1, number}, in[number].data(), kBytes, &place.bell));
    }
    for (const Handle& request : requests) EXPECT_EQ(place.wait(request), RequestStatus::kSucceeded);
    for (uint32_t number = 0; number < in.size(); ++number) {
      EXPECT_EQ(in[number], pattern(kBytes, number * 2 + (1 - rank)));
    }
  };
  std::thread other([&] { run(1); });
  run(0);
  other.join();
}

TEST_P(Wires, SleepingWaiterIsWoken) {
  const auto places = make(2);
  std::thread receiver([&] {
    for (uint32_t number = 0; number < 200; ++number) {
      Bytes data(100);
      const Handle request = places[1]->wire->receive(0, {1, number}, data.data(), 100, &places[1]->bell);
      EXPECT_EQ(places[1]->wait(request, kSleep), RequestStatus::kSucceeded);
      EXPECT_EQ(data, pattern(100, number));
    }
  });
  for (uint32_t number = 0; number < 200; ++number) {
    // Every other message comes when the waiter is about to sleep, or does.
    while (number % 2 == 0 && places[1]->bell.sleeping.load() == 0) std::this_thread::yield();
    EXPECT_EQ(places[0]->send(1, {1, number}, pattern(100, number)), RequestStatus::kSucceeded);
  }
  receiver.join();
}

TEST_P(Wires, MessagesMoveWithoutAnyWaiter) {
  const auto places = make(2);
  const Bytes data = pattern(kLong, 5);
  Bytes received(kLong);
  testing::Gate come;
  testing::Gate gone;
  std::atomic<RequestStatus> status{RequestStatus::kPending};
  const Handle receive =
      places[1]->wire->receive(0, {1, 1}, received.data(), kLong, nullptr, [&](RequestStatus result) {
        status = result;
        come.open();
      });
  const Handle send =
      places[0]->wire->send(1, {1, 1}, data.data(), kLong, nullptr, [&](RequestStatus) { gone.open(); });
  come.wait();
  gone.wait();
  EXPECT_EQ(status, RequestStatus::kSucceeded);
  EXPECT_EQ(receive->status(), RequestStatus::kSucceeded);
  EXPECT_EQ(send->status(), RequestStatus::kSucceeded);
  EXPECT_EQ(received, data);
}

TEST_P(Wires, SeveralThreadsUseOneWire) {
  constexpr int kThreads = 4;
  const auto places = make(2);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    for (int rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, thread, rank] {
        Wire& wire = *places[rank]->wire;
        Doorbell bell;
        std::vector<Handle> handles;
        for (uint32_t number = 0; number < 200; ++number) {
          const size_t bytes = (number * 131 + thread) % 30000;
          const Bytes out = pattern(bytes, number + thread);
          Bytes in(bytes);
          const Tag tag{static_cast<uint32_t>(thread + 1), number};
          const Handle received = wire.receive(1 - rank, tag, in.data(), bytes, &bell);
          const Handle sent = wire.send(1 - rank, tag, out.data(), bytes, &bell);
          const auto ready = [&] {
            if (!received->done() || !sent->done()) wire.progress();
            return received->done() && sent->done();
          };
          // Some spin, some sleep.
          EXPECT_TRUE(wait_until(bell, thread % 2 == 0 ? kSpin : kSleep, Deadline::after(60s), ready,
                                 [&] { wire.before_sleep(); }));
          ASSERT_EQ(in, out);
          handles.insert(handles.end(), {received, sent});
        }
        for (const Handle& handle : handles) wire.cancel(handle);  // the bell is about to go
      });
    }
  }
  for (auto& thread : threads) thread.join();
}

TEST_P(Wires, CancelledReceiveLeavesItsMemoryAndItsMessage) {
  const auto places = make(2);
  Bytes first(1000, 9);
  std::atomic<int> told{0};
  const Handle request =
      places[1]->wire->receive(0, {1, 1}, first.data(), first.size(), &places[1]->bell,
                               [&](RequestStatus status) { told += status == RequestStatus::kCancelled; });
  places[1]->wire->cancel(request);
  EXPECT_EQ(request->status(), RequestStatus::kCancelled);
  EXPECT_EQ(told, 1);
  places[1]->wire->cancel(request);  // again: nothing
  EXPECT_EQ(told, 1);
  EXPECT_EQ(places[0]->send(1, {1, 1}, pattern(1000, 3)), RequestStatus::kSucceeded);
  EXPECT_EQ(places[1]->receive(0, {1, 1}, 1000), pattern(1000, 3));
  EXPECT_EQ(first, Bytes(1000, 9));
}

TEST_P(Wires, MessageLongerThanItsReceiveFails) {
  const auto places = make(2);
  for (const size_t bytes : {size_t{1000}, size_t{300'000}}) {
    Bytes in(bytes + 100, 9);
    const auto number = static_cast<uint32_t>(bytes);
    const Bytes out = pattern(bytes + 50, 1);
    const Handle sent = places[0]->wire->send(1, {1, number}, out.data(), out.size(), &places[0]->bell);
    const Handle request = places[1]->wire->receive(0, {1, number}, in.data(), bytes, &places[1]->bell);
    EXPECT_EQ(places[1]->wait(request), RequestStatus::kFailed);
    EXPECT_EQ(places[0]->wait(sent), RequestStatus::kSucceeded);
    EXPECT_EQ(Bytes(in.begin() + static_cast<ptrdiff_t>(bytes), in.end()), Bytes(100, 9));
  }
  // The connection lives.
  EXPECT_EQ(places[0]->send(1, {1, 5}, pattern(10, 1)), RequestStatus::kSucceeded);
  EXPECT_EQ(places[1]->receive(0, {1, 5}, 10), pattern(10, 1));
}

TEST_P(Wires, ShorterMessageTellsItsSize) {
  const auto places = make(2);
  Bytes in(1000, 9);
  const Handle request = places[1]->wire->receive(0, {1, 1}, in.data(), in.size(), &places[1]->bell);
  EXPECT_EQ(places[0]->send(1, {1, 1}, pattern(300, 1)), RequestStatus::kSucceeded);
  EXPECT_EQ(places[1]->wait(request), RequestStatus::kSucceeded);
  EXPECT_EQ(request->bytes(), 300u);
  in.resize(300);
  EXPECT_EQ(in, pattern(300, 1));
}

TEST_P(Wires, LostPeerEndsAllThatConcernsIt) {
  const auto places = make(3);
  Bytes in(1000);
  const Handle asleep = places[0]->wire->receive(1, {1, 1}, in.data(), in.size(), &places[0]->bell);
  const Handle other = places[0]->wire->receive(2, {1, 1}, in.data(), in.size(), &places[0]->bell);
  // The two know each other by then, though only the one receives.
  EXPECT_EQ(places[1]->send(0, {1, 7}, pattern(10, 1)), RequestStatus::kSucceeded);
  EXPECT_EQ(places[0]->receive(1, {1, 7}, 10), pattern(10, 1));
  std::thread waiter([&] { EXPECT_EQ(places[0]->wait(asleep, kSleep), RequestStatus::kPeerLost); });
  while (places[0]->bell.sleeping.load() == 0) std::this_thread::yield();
  EXPECT_FALSE(places[0]->wire->lost(1));
  places[1]->wire.reset();
  waiter.join();
  places[0]->someone_lost.wait();
  EXPECT_EQ(places[0]->lost_rank, 1);
  EXPECT_EQ(places[0]->lost_reason, "it has closed the connection");
  EXPECT_EQ(places[0]->wire->lost(1), "it has closed the connection");
  EXPECT_EQ(places[0]->send(1, {1, 2}, in), RequestStatus::kPeerLost);
  const Handle late = places[0]->wire->receive(1, {1, 3}, in.data(), in.size(), &places[0]->bell);
  EXPECT_EQ(places[0]->wait(late), RequestStatus::kPeerLost);
  // The others go on.
  EXPECT_FALSE(other->done());
  EXPECT_EQ(places[2]->send(0, {1, 1}, pattern(1000, 4)), RequestStatus::kSucceeded);
  EXPECT_EQ(places[0]->wait(other), RequestStatus::kSucceeded);
  EXPECT_EQ(in, pattern(1000, 4));
  EXPECT_EQ(places[0]->losses, 1);
}

TEST_P(Wires, AnAbandonedRankTouchesNoMemoryAnyMore) {
  const auto places = make(2);
  EXPECT_EQ(places[1]->send(0, {1, 7}, pattern(10, 1)), RequestStatus::kSucceeded);
  EXPECT_EQ(places[0]->receive(1, {1, 7}, 10), pattern(10, 1));
  Bytes in(1000, 9);
  const Bytes out = pattern(kLong, 1);
  const Handle receive = places[0]->wire->receive(1, {1, 1}, in.data(), in.size(), &places[0]->bell);
  const Handle send = places[0]->wire->send(1, {1, 1}, out.data(), out.size(), &places[0]->bell);
  EXPECT_TRUE(places[0]->wire->awaits(1));
  places[0]->wire->abandon(1, "it is silent");
  EXPECT_EQ(receive->status(), RequestStatus::kPeerLost);
  EXPECT_TRUE(send->done());
  EXPECT_FALSE(places[0]->wire->awaits(1));
  EXPECT_EQ(places[0]->wire->lost(1), "it is silent");
  EXPECT_EQ(places[0]->lost_rank, 1);
  places[0]->wire->abandon(1, "again");
  EXPECT_EQ(places[0]->losses, 1);
  // What the other end sends now finds nothing.
  const Bytes late = pattern(in.size(), 2);
  const Handle sent = places[1]->wire->send(0, {1, 1}, late.data(), late.size(), &places[1]->bell);
  for (int round = 0; round < 1000; ++round) {
    places[1]->wire->progress();
    places[0]->wire->progress();
  }
  EXPECT_EQ(in, Bytes(1000, 9));
  // When this end goes, the other one has lost it.
  places[0]->wire.reset();
  places[1]->someone_lost.wait();
  EXPECT_EQ(places[1]->lost_rank, 0);
}

TEST_P(Wires, ActivityAndAwaitedRanksAreCounted) {
  const auto places = make(3);
  Wire& wire = *places[0]->wire;
  const uint32_t before = wire.activity(1);
  Bytes in(100), control(100);
  const Handle asked = wire.receive(1, {0, 0}, control.data(), control.size(), &places[0]->bell);
  EXPECT_FALSE(wire.awaits(1)) << "control messages do not count";
  const Handle standing =
      wire.receive(1, {1, 7}, control.data(), control.size(), nullptr, {}, /*standing=*/true);
  EXPECT_FALSE(wire.awaits(1)) << "nor do standing receives";
  const Handle awaited = wire.receive(1, {1, 0}, in.data(), in.size(), &places[0]->bell);
  EXPECT_TRUE(wire.awaits(1));
  EXPECT_FALSE(wire.awaits(2));
  EXPECT_EQ(places[1]->send(0, {1, 0}, pattern(100, 1)), RequestStatus::kSucceeded);
  EXPECT_EQ(places[0]->wait(awaited), RequestStatus::kSucceeded);
  wire.await_told();
  EXPECT_FALSE(wire.awaits(1));
  EXPECT_NE(wire.activity(1), before);
  EXPECT_EQ(wire.activity(2), 0u);
  // So it is with long messages that leave.
  const uint32_t quiet = places[1]->wire->activity(0);
  const Bytes longer = pattern(kLong, 2);
  const Handle sending = places[1]->wire->send(0, {1, 1}, longer.data(), kLong, &places[1]->bell);
  EXPECT_EQ(places[0]->receive(1, {1, 1}, kLong), longer);
  EXPECT_EQ(places[1]->wait(sending), RequestStatus::kSucceeded);
  EXPECT_NE(places[1]->wire->activity(0), quiet);
  wire.cancel(asked);
}

TEST_P(Wires, LastMessagesOfARankThatEndsArrive) {
  const auto places = make(2);
  const Bytes data = pattern(kLong, 3);
  Bytes in(kLong);
  const Handle received = places[0]->wire->receive(1, {1, 1}, in.data(), in.size(), &places[0]->bell);
  EXPECT_EQ(places[1]->send(0, {1, 1}, data), RequestStatus::kSucceeded);
  EXPECT_EQ(places[1]->send(0, {1, 2}, pattern(5000, 2)), RequestStatus::kSucceeded);
  places[1]->wire.reset();
  EXPECT_EQ(places[0]->wait(received), RequestStatus::kSucceeded);
  EXPECT_EQ(in, data);
  places[0]->someone_lost.wait();
  EXPECT_EQ(places[0]->receive(1, {1, 2}, 5000), pattern(5000, 2));  // had come before
}

TEST_P(Wires, EndWithOpenRequestsCancelsThem) {
  const auto places = make(2);
  Bytes in(1000);
  const Bytes out(kLong);
  std::atomic<int> told{0};
  const auto note = [&](RequestStatus) { ++told; };
  const Handle receive = places[0]->wire->receive(1, {1, 1}, in.data(), in.size(), nullptr, note);
  const Handle send = places[0]->wire->send(1, {1, 2}, out.data(), out.size(), nullptr, note);
  places[0]->wire.reset();
  EXPECT_EQ(receive->status(), RequestStatus::kCancelled);
  EXPECT_TRUE(send->done());
  EXPECT_EQ(told, 2);
  EXPECT_EQ(places[0]->losses, 0);
}

TEST_P(Wires, ForkedChildDoesNothing) {
  const auto places = make(2);
  EXPECT_EQ(places[0]->send(1, {1, 1}, pattern(10, 1)), RequestStatus::kSucceeded);
  const pid_t child = ::fork();
  if (child == 0) {
    Bytes in(10);
    Place& place = *places[1];
    const bool idle = !place.wire->progress() &&
                      place.wire->receive(0, {1, 1}, in.data(), 10)->status() == RequestStatus::kFailed;
    place.wire->before_sleep();
    place.wire.reset();
    ::_exit(idle ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(places[1]->receive(0, {1, 1}, 10), pattern(10, 1));
  EXPECT_EQ(places[1]->losses, 0);
}

// Engines alone, where nothing moves until the test says so.

TEST_P(Wires, CancelledSendArrivesAsItWasOrNotAtAll) {
  Engines engines(GetParam(), 2);
  const auto sender = engines.take(0);
  const auto receiver = engines.take(1);
  Bytes out = pattern(kLong, 1);
  Bytes in(kLong);
  Operation send;
  Operation receive;
  Operation next;
  send.peer = 1;
  receive.peer = next.peer = 0;
  sender->send(send, {1, 1}, out.data(), out.size());
  for (int round = 0; round < 5; ++round) sender->progress();
  ASSERT_EQ(send.status, RequestStatus::kPending);
  sender->cancel(send);
  EXPECT_EQ(send.status, RequestStatus::kCancelled);
  std::fill(out.begin(), out.end(), 0xff);
  receiver->receive(receive, {1, 1}, in.data(), in.size());
  // What is sent later still comes, after what was cancelled.
  Operation send_next;
  send_next.peer = 1;
  uint8_t byte = 0;
  sender->send(send_next, {1, 2}, out.data(), 1);
  receiver->receive(next, {1, 2}, &byte, 1);
  while (next.status == RequestStatus::kPending) {
    sender->progress();
    receiver->progress();
  }
  EXPECT_EQ(next.status, RequestStatus::kSucceeded);
  if (receive.status == RequestStatus::kPending) {
    receiver->cancel(receive);
    EXPECT_EQ(in, Bytes(kLong));
  } else {
    EXPECT_EQ(receive.status, RequestStatus::kSucceeded);
    EXPECT_EQ(in, pattern(kLong, 1));
  }
}

TEST_P(Wires, ReceiveThatIsCancelledHalfWayLeavesItsMemoryAlone) {
  Engines engines(GetParam(), 2);
  const auto sender = engines.take(0);
  const auto receiver = engines.take(1);
  const Bytes out(kLong, 1);
  Bytes in(kLong, 0);
  Operation send;
  Operation receive;
  send.peer = 1;
  receive.peer = 0;
  receiver->receive(receive, {1, 1}, in.data(), in.size());
  sender->send(send, {1, 1}, out.data(), out.size());
  while (in.front() == 0) {
    sender->progress();
    receiver->progress();
  }
  if (receive.status == RequestStatus::kPending) {
    receiver->cancel(receive);
    EXPECT_EQ(receive.status, RequestStatus::kCancelled);
  }
  std::fill(in.begin(), in.end(), 7);
  while (send.status == RequestStatus::kPending) {
    sender->progress();
    receiver->progress();
  }
  for (int round = 0; round < 10'000 && receiver->progress(); ++round) {
  }
  EXPECT_EQ(in, Bytes(kLong, 7));
  // The connection lives.
  Operation send_next;
  Operation next;
  send_next.peer = 1;
  next.peer = 0;
  sender->send(send_next, {1, 2}, out.data(), 100);
  receiver->receive(next, {1, 2}, in.data(), 100);
  while (next.status == RequestStatus::kPending) {
    sender->progress();
    receiver->progress();
  }
  EXPECT_EQ(next.status, RequestStatus::kSucceeded);
}

TEST(ThreadHub, DisconnectedRanksLoseEachOther) {
  const auto hub = ThreadHub::make(2);
  std::vector<std::unique_ptr<Place>> places;
  for (int rank = 0; rank < 2; ++rank) places.push_back(std::make_unique<Place>(hub->make_engine(rank)));
  places[0]->wire->connect(1, places[1]->wire->address());
  places[1]->wire->connect(0, places[0]->wire->address());
  Bytes in(10);
  const Handle request = places[0]->wire->receive(1, {1, 1}, in.data(), in.size(), &places[0]->bell);
  hub->disconnect(0, 1);
  EXPECT_EQ(places[0]->wait(request, kSleep), RequestStatus::kPeerLost);
  for (const auto& place : places) place->someone_lost.wait();
  EXPECT_EQ(places[1]->lost_rank, 0);
  EXPECT_EQ(places[1]->lost_reason, "disconnected");
}

class UcxEngines : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!why_no_ucx().empty()) GTEST_SKIP() << why_no_ucx();
  }
};

TEST_F(UcxEngines, DescribeThemselves) {
  EXPECT_THAT(make_ucx_engine(0, {.interface = "lo"})->describe(),
              ::testing::MatchesRegex("UCX [0-9.]+ \\(.*tcp/lo.*, at 127\\.0\\.0\\.1:[0-9]+\\)"));
}

TEST_F(UcxEngines, NameTheInterfaceThatIsNotThere) {
  EXPECT_THAT(testing::message_of([] { make_ucx_engine(0, {.interface = "absent0"}); }),
              HasSubstr("can't use the network interface 'absent0'"));
}

TEST_F(UcxEngines, KilledProcessIsLost) {
  const auto outcomes = testing::run_ranks_collect(
      2,
      [](int rank) {
        const World world = rendezvous();
        Place place(make_ucx_engine(rank, {.interface = "lo"}));
        const std::string own = place.wire->address();
        const std::string peer = std::to_string(1 - rank);
        world.store->set("address" + std::to_string(rank), std::vector<uint8_t>(own.begin(), own.end()));
        const auto address = world.store->get("address" + peer);
        place.wire->connect(1 - rank, std::string(address.begin(), address.end()));
        if (rank == 1) {
          EXPECT_EQ(place.send(0, {1, 1}, pattern(100'000, 1)), RequestStatus::kSucceeded);
          world.store->get("rank 0 waits");
          ::raise(SIGKILL);
        }
        // This rank has sent nothing itself.
        EXPECT_EQ(place.receive(1, {1, 1}, 100'000), pattern(100'000, 1));
        Bytes in(10);
        const Handle request = place.wire->receive(1, {1, 2}, in.data(), in.size(), &place.bell);
        world.store->set("rank 0 waits", std::vector<uint8_t>{1});
        EXPECT_EQ(place.wait(request, kSleep), RequestStatus::kPeerLost);
        place.someone_lost.wait();
        EXPECT_EQ(place.lost_rank, 1);
        EXPECT_THAT(place.lost_reason, HasSubstr("the connection is lost (UCX: "));
      },
      {.expected_failures = {1}});
  EXPECT_EQ(outcomes[0].exit_status, 0) << outcomes[0].exception.value_or(outcomes[0].output);
  EXPECT_EQ(outcomes[1].signal, SIGKILL);
}

TEST(ThreadHub, WhatIsSentOverACutComesOnceItHeals) {
  const auto hub = ThreadHub::make(2);
  std::vector<std::unique_ptr<Place>> places;
  for (int rank = 0; rank < 2; ++rank) {
    auto engine = hub->make_engine(rank);
    engine->connect(1 - rank, std::to_string(1 - rank));
    places.push_back(std::make_unique<Place>(std::move(engine)));
  }
  hub->cut(0, 1);
  EXPECT_EQ(places[0]->send(1, {1, 1}, pattern(10, 1)), RequestStatus::kSucceeded);
  const Bytes longer = pattern(kLong, 2);
  const Handle sending = places[0]->wire->send(1, {1, 2}, longer.data(), kLong, &places[0]->bell);
  Bytes in(10, 9);
  const Handle receiving = places[1]->wire->receive(0, {1, 1}, in.data(), in.size(), &places[1]->bell);
  // The other direction is none of it, and shows that the first would have come.
  EXPECT_EQ(places[1]->send(0, {1, 1}, pattern(10, 3)), RequestStatus::kSucceeded);
  EXPECT_EQ(places[0]->receive(1, {1, 1}, 10), pattern(10, 3));
  EXPECT_FALSE(receiving->done());
  EXPECT_FALSE(sending->done());
  hub->heal(0, 1);
  EXPECT_EQ(places[1]->wait(receiving), RequestStatus::kSucceeded);
  EXPECT_EQ(in, pattern(10, 1));
  EXPECT_EQ(places[1]->receive(0, {1, 2}, kLong), longer);
  EXPECT_EQ(places[0]->wait(sending), RequestStatus::kSucceeded);
  // An end is not heard of either.
  hub->cut(0, 1);
  places[0].reset();
  EXPECT_FALSE(places[1]->wire->lost(0));
  hub->heal(0, 1);
  places[1]->someone_lost.wait();
  EXPECT_EQ(places[1]->lost_reason, "it has closed the connection");
}

}  // namespace
}  // namespace lockstep::transport::wire::wire_test
