#include <array>
#include <atomic>
#include <barrier>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <gmock/gmock.h>
#include <memory>
#include <string>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/transport/host/first_messages.h>
#include <lockstep/transport/host/host_transport.h>
#include <lockstep/transport/host/memory/segment.h>
#include <lockstep/transport/host/peer_links.h>
#include <lockstep/transport/host/process_header.h>
#include <lockstep/transport/local_socket.h>
#include <lockstep/transport/wire/thread_engine.h>

namespace lockstep::transport::host_transport_test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::StartsWith;

/// Where rank 0 finds so many bytes of rank 1, or the error.
std::string find(HostTransport& transport, const MemoryReference& reference, size_t bytes) {
  try {
    transport.address(1, reference, Deadline::after(std::chrono::seconds(60)), bytes);
    return "found";
  } catch (const c10::DistBackendError& error) {
    return error.what_without_backtrace();
  }
}

TEST(HostTransport, RefusesReferencesOutsideOfASegment) {
  constexpr size_t kBytes = size_t{1} << 20;
  const auto transports = HostTransport::connect_threads(2, {.segment_bytes = kBytes});
  HostTransport& transport = *transports[0];
  EXPECT_EQ(find(transport, {0, 0}, kBytes), "found");
  EXPECT_EQ(find(transport, {0, kBytes - 64}, 64), "found");
  const std::string error = " gave a reference to byte 1048512 of segment 0, which has 1048576 bytes";
  EXPECT_EQ(find(transport, {0, kBytes - 64}, 65), "rank 1" + error);
  EXPECT_THAT(find(transport, {0, kBytes}, 1), HasSubstr("byte 1048576 of segment 0"));
  EXPECT_THAT(find(transport, {0, size_t{1} << 49}, 1), HasSubstr("of segment 0"));
  EXPECT_THAT(find(transport, {1024, 0}, 1), HasSubstr("segment 1024, which no arena has"));
}

TEST(PeerLinks, WhatAPeerHadSentComesThoughItHasEndedBeforeItReadAll) {
  std::array<int, 2> sockets{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets.data()), 0);
  PeerLink own, of_peer;
  own.socket.reset(sockets[0]);
  of_peer.socket.reset(sockets[1]);
  constexpr size_t kBytes = size_t{64} << 10;
  ASSERT_TRUE(send_segment(own, 1, *Segment::create(kBytes)));
  ASSERT_TRUE(send_segment(of_peer, 5, *Segment::create(kBytes)));
  of_peer.socket.reset();  // which resets the connection
  bool open = true;
  const auto received = receive_segment(own, open);
  ASSERT_TRUE(received && received->segment);
  EXPECT_EQ(received->index, 5u);
  EXPECT_FALSE(receive_segment(own, open));
  EXPECT_FALSE(open);
}

TEST(PeerLinks, TheDescriptorOfAnEmptyMessageIsClosed) {
  std::array<int, 2> sockets{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets.data()), 0);
  PeerLink own;
  own.socket.reset(sockets[0]);
  const UniqueFd sender(sockets[1]);
  const auto segment = Segment::create(size_t{64} << 10);
  const auto lowest_free = [] { return UniqueFd(::eventfd(0, EFD_CLOEXEC)).get(); };
  const int before = lowest_free();
  ASSERT_TRUE(send_with_fd(sender.get(), nullptr, 0, segment->fd()));
  bool open = true;
  EXPECT_FALSE(receive_segment(own, open));
  EXPECT_EQ(lowest_free(), before);
}

TEST(PeerLinks, ASegmentForWhichThereIsNoRoomIsRefusedAtOnce) {
  std::array<int, 2> sockets{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets.data()), 0);
  PeerLink own, of_peer;
  own.socket.reset(sockets[0]);
  of_peer.socket.reset(sockets[1]);
  const auto segment = Segment::create(size_t{64} << 10);
  uint32_t sent = 0;
  while (send_segment(own, sent % 8, *segment)) ++sent;
  EXPECT_TRUE(may_send_later(errno)) << std::strerror(errno);
  bool open = true;
  ASSERT_TRUE(receive_segment(of_peer, open));
  EXPECT_TRUE(send_segment(own, 0, *segment));
  of_peer.socket.reset();
  ASSERT_FALSE(send_segment(own, 0, *segment));
  EXPECT_TRUE(peer_has_closed(errno)) << std::strerror(errno);
}

/// Ranks as threads that join through a store as processes do, over pretended hosts.
class Job {
 public:
  Job(const std::vector<int>& host_of, std::shared_ptr<wire::ThreadHub> hub,
      std::chrono::nanoseconds timeout = std::chrono::seconds(60),
      std::chrono::nanoseconds heartbeat_timeout = std::chrono::seconds(10))
      : transports(host_of.size()), errors(host_of.size()) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    HostTransport::Options options{.segment_bytes = size_t{1} << 20};
    options.host_of = host_of;
    options.heartbeat_timeout = heartbeat_timeout;
    options.host_names = {"node-a", "node-b", "node-c"};
    options.make_engine = [hub](int rank) { return hub->make_engine(rank); };
    std::vector<std::jthread> threads;
    for (size_t rank = 0; rank < host_of.size(); ++rank) {
      threads.emplace_back([&, rank] {
        try {
          transports[rank] =
              HostTransport::connect(*store, static_cast<int>(rank), static_cast<int>(host_of.size()),
                                     Deadline::after(timeout), options);
        } catch (...) {
          errors[rank] = text_of(std::current_exception());
        }
      });
    }
  }

  std::vector<std::shared_ptr<HostTransport>> transports;
  std::vector<std::string> errors;
};

std::string own_pid() {
  return "(pid " + std::to_string(::getpid());
}

void await_end(const HostTransport& transport, int rank) {
  while (!transport.has_ended(rank)) std::this_thread::yield();
}

TEST(HostTransport, JoinsTheRanksOfSeveralHosts) {
  const Job job({0, 1, 0, 2, 1}, wire::ThreadHub::make(5));
  for (int rank = 0; rank < 5; ++rank) {
    ASSERT_EQ(job.errors[rank], "");
    const HostTransport& transport = *job.transports[rank];
    EXPECT_TRUE(transport.spans_hosts());
    EXPECT_EQ(transport.living_count(), rank == 3 ? 1 : 2);
    EXPECT_EQ(transport.describe(3), "rank 3 " + own_pid() + " on node-c)");
    EXPECT_EQ(transport.endings(), 0u);
  }
  EXPECT_EQ(find(*job.transports[4], {0, 0}, 64), "found");
}

/// What the kernel answers where more descriptors are in flight than ulimit -n allows, to all sends or to the first.
std::string too_many_references(const char* where, const char* which) {
  return std::string(where) + "=errno(" + std::to_string(ETOOMANYREFS) + ')' + which;
}

TEST(HostTransport, JoinsThoughTooManyDescriptorsAreInFlightForAWhile) {
  // In a job of two ranks the first message is that of the rank that connects, the second the other one's.
  for (const char* which : {"@1", "@2"}) {
    failpoint::configure(too_many_references("send_with_fd", which));
    const Job job({0, 0}, wire::ThreadHub::make(2));
    failpoint::configure("");
    EXPECT_THAT(job.errors, Each(std::string())) << which;
  }
}

TEST(HostTransport, NamesTheLimitWhereTooManyDescriptorsStayInFlight) {
  failpoint::configure(too_many_references("send_with_fd", ""));
  const Job job({0, 0}, wire::ThreadHub::make(2), std::chrono::seconds(1));
  failpoint::configure("");
  // Both are told what the first of them at its timeout has found.
  EXPECT_THAT(
      job.errors,
      Each(AnyOf(HasSubstr("rank 1 could not send a descriptor of its memory to ranks 0 by the timeout: "
                           "the processes of this user have more descriptors in flight"),
                 HasSubstr("rank 0 has no shared memory with ranks 1 at the timeout"))));
  EXPECT_THAT(job.errors, Each(HasSubstr("ulimit -n")));
}

TEST(HostTransport, ANewSegmentComesThoughTooManyDescriptorsAreInFlightForAWhile) {
  const Job job({0, 0}, wire::ThreadHub::make(2));
  ASSERT_THAT(job.errors, Each(std::string()));
  failpoint::configure(too_many_references("send_segment", "@1"));
  Arena& arena = job.transports[1]->arena();
  std::byte* memory = arena.allocate(size_t{2} << 20);  // more than a segment holds
  const auto reference = arena.find(memory, size_t{2} << 20);
  ASSERT_TRUE(reference);
  EXPECT_EQ(find(*job.transports[0], *reference, size_t{2} << 20), "found");
  failpoint::configure("");
  arena.deallocate(memory);
}

TEST(HostTransport, ASegmentThatCanNeverBeSentIsTheErrorOfItsOwner) {
  const Job job({0, 0}, wire::ThreadHub::make(2));
  ASSERT_THAT(job.errors, Each(std::string()));
  Arena& arena = job.transports[1]->arena();
  failpoint::configure("send_segment=errno(" + std::to_string(EACCES) + ")");
  EXPECT_THAT(testing::message_of([&] { arena.allocate(size_t{2} << 20); }),
              AllOf(HasSubstr("rank 1 can't share its memory with rank 0 "), HasSubstr("Permission denied")));
  failpoint::configure("");
  std::byte* memory = arena.allocate(size_t{2} << 20);  // not of the segment that rank 0 lacks
  EXPECT_EQ(find(*job.transports[0], arena.find(memory, 1).value(), size_t{2} << 20), "found");
  arena.deallocate(memory);
}

TEST(HostTransport, ALostConnectionNamesTheRankAndItsHost) {
  const auto hub = wire::ThreadHub::make(3);
  const Job job({0, 0, 1}, hub);
  hub->disconnect(0, 2);
  await_end(*job.transports[0], 2);
  EXPECT_EQ(
      job.transports[0]->describe_end(2),
      "rank 2 " + own_pid() +
          " on node-b) is lost: disconnected; its process has ended, its host is lost or the wire is cut (no "
          "other rank is on its host to say how)");
  EXPECT_EQ(job.transports[0]->living_count(), 2);
  EXPECT_EQ(job.transports[0]->endings(), 1u);
  EXPECT_FALSE(job.transports[1]->has_ended(2));
}

TEST(HostTransport, ALostRankIsNamedWithWhatItsAnswerToAHeartbeatSaidThatItDoes) {
  const auto hub = wire::ThreadHub::make(2);
  const Job job({0, 1}, hub, std::chrono::seconds(60), std::chrono::seconds(2));
  ASSERT_THAT(job.errors, Each(std::string()));
  header_of(job.transports[1]->arena().segment(0)->data()).phases.action =
      uint64_t{'B'} << 56 | uint64_t{1} << 32 | 3;
  while (job.transports[0]->in_or_after_action(1).empty()) {
    job.transports[0]->expect({1});
    std::this_thread::yield();
  }
  hub->disconnect(0, 1);
  await_end(*job.transports[0], 1);
  EXPECT_THAT(job.transports[0]->describe_end(1),
              HasSubstr(" is lost: disconnected; it was in or after 1B3; its process has ended, "));
}

TEST(HostTransport, OtherHostsHearHowARankHasEnded) {
  Job job({0, 0, 1, 1}, wire::ThreadHub::make(4));
  job.transports[3].reset();
  for (const int rank : {0, 1, 2}) {
    await_end(*job.transports[rank], 3);
    EXPECT_THAT(job.transports[rank]->describe_end(3),
                StartsWith("rank 3 " + own_pid() + " on node-b) left the job in good order"));
  }
}

TEST(HostTransport, ARankWhoseNeighboursAreNotToldAsksHowAnotherHostsRankHasEnded) {
  const auto hub = wire::ThreadHub::make(4);
  Job job({0, 0, 1, 1}, hub);
  hub->cut(2, 0);  // by this way rank 2 tells host 0
  hub->disconnect(1, 3);
  await_end(*job.transports[1], 3);
  await_end(*job.transports[3], 1);
  job.transports[3].reset();
  EXPECT_THAT(job.transports[1]->describe_end(3),
              StartsWith("rank 3 " + own_pid() + " on node-b) left the job in good order"));
}

TEST(HostTransport, AllThreadsThatAskHearHowARankHasEnded) {
  Job job({0, 0, 1, 1}, wire::ThreadHub::make(4));
  std::array<std::string, 3> answers;
  std::barrier asking(4);
  std::vector<std::thread> threads;
  for (std::string& answer : answers) {
    threads.emplace_back([&] {
      asking.arrive_and_wait();
      answer = job.transports[0]->describe_end(3);
    });
  }
  asking.arrive_and_wait();
  job.transports[3].reset();
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(answers, Each(HasSubstr("left the job in good order")));
}

TEST(HostTransport, HostsThatCanNotReachEachOtherAreNamedWithBothEnds) {
  const auto hub = wire::ThreadHub::make(4);
  hub->disconnect(1, 3);
  const Job job({0, 0, 1, 1}, hub);
  int named = 0;
  for (const std::string& error : job.errors) {
    EXPECT_NE(error, "");
    named += error.find("rank 1 " + own_pid() + " on node-a), by threads of this process, and rank 3 " +
                        own_pid() + " on node-b), by threads of this process, can't pass messages: ") !=
                 std::string::npos ||
             error.find("rank 3 " + own_pid() + " on node-b), by threads of this process, and rank 1 " +
                        own_pid() + " on node-a), by threads of this process, can't pass messages: ") !=
                 std::string::npos;
  }
  EXPECT_EQ(named, 4);
}

TEST(HostTransport, AWireThatIsCutBeforeTheStartIsNamedAtTheLimitOfSilence) {
  const auto hub = wire::ThreadHub::make(2);
  hub->cut(0, 1);
  hub->cut(1, 0);
  const Job job({0, 1}, hub, std::chrono::minutes(5), std::chrono::milliseconds(500));
  for (const std::string& error : job.errors) {
    EXPECT_THAT(error, HasSubstr("can't pass messages: nothing has come for 500 ms"));
    EXPECT_THAT(error, HasSubstr("rank 0 " + own_pid() + " on node-a), by threads of this process"));
    EXPECT_THAT(error, HasSubstr("rank 1 " + own_pid() + " on node-b), by threads of this process"));
  }
}

TEST(FirstMessages, TellWhoIsOfAnotherGenerationAtAPeersAddress) {
  const auto hub = wire::ThreadHub::make(2);
  std::array<std::string, 2> errors;
  std::vector<std::thread> threads;
  std::array<std::unique_ptr<wire::Wire>, 2> wires;
  for (int rank = 0; rank < 2; ++rank) {
    wires[rank] = std::make_unique<wire::Wire>(hub->make_engine(rank), [](int, const std::string&) {});
  }
  for (int rank = 0; rank < 2; ++rank) wires[rank]->connect(1 - rank, wires[1 - rank]->address());
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const FirstMessages with = {.own = "rank " + std::to_string(rank),
                                  .describe = [](int peer) { return "rank " + std::to_string(peer); },
                                  .patience = [](int) { return std::chrono::nanoseconds(0); },
                                  .silence_limit = std::chrono::seconds(10),
                                  .look = [] {},
                                  .generation = {.number = rank == 0 ? uint64_t{4} : uint64_t{3}, .run = 7}};
      try {
        pass_first_messages(*wires[rank], {1 - rank}, Deadline::after(std::chrono::seconds(60)), with);
      } catch (...) {
        errors[rank] = text_of(std::current_exception());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_THAT(errors[0],
              HasSubstr("rank 0 is of generation 4 of the job's processes, and rank 1 of generation 3"));
  EXPECT_THAT(errors[1],
              HasSubstr("rank 1 is of generation 3 of the job's processes, and rank 0 of generation 4"));
}

/// An engine that drops all messages of more than 1 KiB, as a path does whose MTU is smaller than its ends believe.
class NarrowEngine final : public wire::Engine {
 public:
  NarrowEngine(std::unique_ptr<wire::Engine> engine, std::function<void()> on_drop)
      : engine_(std::move(engine)), on_drop_(std::move(on_drop)) {
    engine_->on_done = [this](wire::Operation& operation) { on_done(operation); };
    engine_->on_peer_lost = [this](int rank, const std::string& reason) { on_peer_lost(rank, reason); };
  }
  std::string describe() const override { return engine_->describe(); }
  std::string address() const override { return engine_->address(); }
  void connect(int rank, const std::string& address) override { engine_->connect(rank, address); }
  void send(wire::Operation& operation, wire::Tag tag, const void* data, size_t bytes) override {
    if (bytes <= 1024) return engine_->send(operation, tag, data, bytes);
    on_drop_();
  }
  void receive(wire::Operation& operation, wire::Tag tag, void* data, size_t bytes) override {
    engine_->receive(operation, tag, data, bytes);
  }
  void cancel(wire::Operation& operation) override { engine_->cancel(operation); }
  void abandon(int rank, const std::string& reason) override { engine_->abandon(rank, reason); }
  bool progress() override { return engine_->progress(); }
  bool arm() override { return engine_->arm(); }
  int event_fd() const override { return engine_->event_fd(); }

 private:
  std::unique_ptr<wire::Engine> engine_;
  const std::function<void()> on_drop_;
};

/// Of two ranks.
class NarrowHub final : public wire::ThreadHub {
 public:
  /// `gives_up`: the connection is lost once each rank has sent what does not pass, as TCP loses it after a while.
  explicit NarrowHub(bool gives_up) : gives_up_(gives_up) {}

  std::unique_ptr<wire::Engine> make_engine(int rank) override {
    return std::make_unique<NarrowEngine>(hub_->make_engine(rank), [this] {
      if (++dropped_ == 2 && gives_up_) hub_->disconnect(0, 1);
    });
  }
  void disconnect(int rank, int other) override { hub_->disconnect(rank, other); }
  void cut(int from, int to) override { hub_->cut(from, to); }
  void heal(int from, int to) override { hub_->heal(from, to); }
  void let_sleep(int rank) override { hub_->let_sleep(rank); }

 private:
  const bool gives_up_;
  std::atomic<int> dropped_{0};
  std::shared_ptr<wire::ThreadHub> hub_ = wire::ThreadHub::make(2);
};

constexpr const char* kMtuHint =
    "small messages pass, but not 64 KiB: do all interfaces between the two hosts have the same MTU?";

TEST(HostTransport, APathWithASmallerMtuIsNamedAtTheTimeout) {
  const Job job({0, 1}, std::make_shared<NarrowHub>(/*gives_up=*/false), std::chrono::milliseconds(500));
  EXPECT_THAT(job.errors, Each(HasSubstr(kMtuHint)));
}

TEST(HostTransport, APathWithASmallerMtuIsNamedWhenTheConnectionIsLostByIt) {
  const Job job({0, 1}, std::make_shared<NarrowHub>(/*gives_up=*/true));
  EXPECT_THAT(job.errors, Each(AllOf(HasSubstr("can't pass messages: disconnected; "), HasSubstr(kMtuHint))));
}

}  // namespace
}  // namespace lockstep::transport::host_transport_test
