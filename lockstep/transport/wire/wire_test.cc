#include <algorithm>
#include <gmock/gmock.h>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/testing/message_of.h>
#include <lockstep/transport/wire/testing/places.h>

// Messages: that they come, whole, to those that receive them.
namespace lockstep::transport::wire::wire_test {
namespace {

using ::testing::HasSubstr;

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
  std::vector<std::jthread> threads;
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
          EXPECT_TRUE(wait_until(bell, thread % 2 == 0 ? kSpin : kSleep,
                                 Deadline::after(std::chrono::seconds(60)), ready,
                                 [&] { wire.before_sleep(); }));
          ASSERT_EQ(in, out);
          handles.insert(handles.end(), {received, sent});
        }
        for (const Handle& handle : handles) wire.cancel(handle);  // the bell is about to go
      });
    }
  }
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
