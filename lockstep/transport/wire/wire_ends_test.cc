#include <algorithm>
#include <cstdio>
#include <fcntl.h>
#include <functional>
#include <gmock/gmock.h>
#include <memory>
#include <string>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <lockstep/base/unique_fd.h>
#include <lockstep/rendezvous/rendezvous.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/temporary_folder.h>
#include <lockstep/transport/wire/testing/places.h>

// What ends before it is done: requests that are cancelled, ranks that leave, are given up or die.
namespace lockstep::transport::wire::wire_ends_test {
namespace {

using ::testing::HasSubstr;

class WireEnds : public Wires {};

INSTANTIATE_TEST_SUITE_P(On, WireEnds, ::testing::Values("Threads", "Ucx"),
                         [](const auto& instance) { return instance.param; });

TEST_P(WireEnds, CancelledReceiveLeavesItsMemoryAndItsMessage) {
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

TEST_P(WireEnds, CancelledSendArrivesAsItWasOrNotAtAll) {
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

TEST_P(WireEnds, ReceiveThatIsCancelledHalfWayLeavesItsMemoryAlone) {
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

TEST_P(WireEnds, LostPeerEndsAllThatConcernsIt) {
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

TEST_P(WireEnds, AnAbandonedRankTouchesNoMemoryAnyMore) {
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

TEST_P(WireEnds, LastMessagesOfARankThatEndsArrive) {
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

TEST_P(WireEnds, EndWithOpenRequestsCancelsThem) {
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

TEST_P(WireEnds, ForkedChildDoesNothing) {
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

/// Of two ranks, through their store.
void connect_with_peer(Place& place, int rank, c10d::Store& store) {
  const std::string own = place.wire->address();
  store.set("address" + std::to_string(rank), std::vector<uint8_t>(own.begin(), own.end()));
  const auto address = store.get("address" + std::to_string(1 - rank));
  place.wire->connect(1 - rank, std::string(address.begin(), address.end()));
}

TEST(UcxEngine, KilledProcessIsLost) {
  if (!why_no_ucx().empty()) GTEST_SKIP() << why_no_ucx();
  testing::run_survivors(2, {1}, [](int rank) {
    const World world = rendezvous();
    Place place(make_ucx_engine(rank, {.interface = "lo"}));
    connect_with_peer(place, rank, *world.store);
    if (rank == 1) {
      EXPECT_EQ(place.send(0, {1, 1}, pattern(100'000, 1)), RequestStatus::kSucceeded);
      world.store->get("rank 0 waits");
      testing::die();
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
  });
}

/// Runs at the very end of this process's exit(), when its libraries have taken themselves down.
void at_end_of_exit(std::function<void()> run) {
  const auto write = [](void* function, const char*, size_t bytes) {
    (*static_cast<std::function<void()>*>(function))();
    return static_cast<ssize_t>(bytes);
  };
  // What was written to a stream and not flushed goes then.
  std::FILE* stream = ::fopencookie(new std::function<void()>(std::move(run)), "w",
                                    {.read = nullptr, .write = write, .seek = nullptr, .close = nullptr});
  ASSERT_NE(stream, nullptr);
  std::fputc('x', stream);
}

TEST(UcxEngine, NoOtherThreadDrivesItOnceTheProcessExits) {
  if (!why_no_ucx().empty()) GTEST_SKIP() << why_no_ucx();
  const testing::SharedFolder folder;
  const std::string exits = folder.path("exits");
  const std::string goes_on = folder.path("goes_on");
  ::mkfifo(exits.c_str(), 0600);
  ::mkfifo(goes_on.c_str(), 0600);
  testing::run_ranks(2,
                     [&](int rank) {
                       const World world = rendezvous();
                       auto place = std::make_unique<Place>(make_ucx_engine(rank, {.interface = "lo"}));
                       connect_with_peer(*place, rank, *world.store);
                       EXPECT_EQ(place->send(1 - rank, {1, 1}, pattern(100, 1)), RequestStatus::kSucceeded);
                       EXPECT_EQ(place->receive(1 - rank, {1, 1}, 100), pattern(100, 1));
                       if (rank == 1) {
                         auto* in = new Bytes(100);
                         const Handle pending = place->wire->receive(0, {1, 2}, in->data(), in->size());
                         at_end_of_exit([=] {
                           const UniqueFd tells(::open(exits.c_str(), O_WRONLY));
                           const UniqueFd waits(::open(goes_on.c_str(), O_RDONLY));
                           char end = 0;
                           if (::read(waits.get(), &end, 1) != 0) ::_exit(8);
                           if (pending->status() != RequestStatus::kCancelled) ::_exit(9);
                         });
                         (void)place.release();
                         return;
                       }
                       const UniqueFd waits(::open(exits.c_str(), O_RDONLY));
                       (void)place->send(1, {1, 2}, pattern(100, 1));
                       place.reset();  // returns when the other one has what was sent, or after a second
                       const UniqueFd tells(::open(goes_on.c_str(), O_WRONLY));
                     },
                     {.environment = folder.environment()});
}

}  // namespace
}  // namespace lockstep::transport::wire::wire_ends_test
