#include <atomic>
#include <functional>
#include <gmock/gmock.h>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ops/full.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <lockstep/base/failpoint.h>
#include <lockstep/base/process/interrupt.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/thread_ranks.h>
#include <lockstep/transport/wire/thread_engine.h>

// The agreement of a group over hosts on who goes on, with ranks as threads of one process, where the wire between any
// two can be cut and ThreadSanitizer sees both sides. No rank can die here: deaths are in hosts_shrink_test.cc.
namespace lockstep::store_membership_test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using transport::GroupChannel;
using transport::wire::ThreadHub;
using Backend = c10::intrusive_ptr<LockstepBackend>;

/// Ranks 0 and 1 on one host, 2 and 3 on another, which share a store.
class CutHosts {
 public:
  explicit CutHosts(std::chrono::nanoseconds limit_of_silence = 10s) : limit_(limit_of_silence) {}

  void run(const std::function<void(const Backend&)>& body) {
    at::full({1}, 1).add(1);  // libtorch's first-use initialisation happens here, in one thread
    transport::HostTransport::Options options;
    options.segment_bytes = size_t{1} << 20;
    options.host_of = {0, 0, 1, 1};
    options.host_names = {"host-0", "host-1"};
    options.heartbeat_timeout = limit_;
    options.make_engine = [hub = hub_](int rank) { return hub->make_engine(rank); };
    testing::run_rank_threads(
        4,
        [&](std::shared_ptr<GroupChannel> channel) {
          LockstepBackend::Settings settings{"test", 60s};
          settings.global_ranks = {0, 1, 2, 3};
          settings.store = store_;
          body(c10::make_intrusive<LockstepBackend>(std::move(channel), std::move(settings)));
        },
        options);
  }

  /// By both; returns when this rank knows.
  void cut(const Backend& backend, int rank, int other) {
    const int own = backend->getRank();
    if (own != rank && own != other) return;
    if (own == rank) hub_->disconnect(rank, other);
    while (!backend->channel().has_ended(own == rank ? other : rank)) std::this_thread::yield();
  }

  /// Nothing passes any more between the two, which are not told.
  void silence(int rank, int other) {
    hub_->cut(rank, other);
    hub_->cut(other, rank);
  }

  /// Until the rank has come to the first round.
  void await_coming(const Backend& backend, int rank) {
    const std::string key = "lockstep/shrink/" + backend->channel().id() + "/1/member/";
    while (!store_->check({key + std::to_string(rank)})) std::this_thread::yield();
  }

  /// Whether all others have told their addresses for the first round's group, and this rank has not.
  bool waits_for(const Backend& backend) const {
    const std::string key = "lockstep/shrink/" + backend->channel().id() + "/1/channel/data/";
    for (int rank = 0; rank < 4; ++rank) {
      if (store_->check({key + std::to_string(rank)}) == (rank == backend->getRank())) return false;
    }
    return true;
  }

 private:
  const std::chrono::nanoseconds limit_;
  const std::shared_ptr<ThreadHub> hub_ = ThreadHub::make(4);
  const c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
};

/// How many ranks have gone on together.
int shrink_and_use(const Backend& backend) {
  const auto smaller = backend->shrink({});
  std::vector<at::Tensor> tensors{at::full({1}, 1)};
  smaller->allreduce(tensors)->wait();
  EXPECT_EQ(tensors[0].item<float>(), static_cast<float>(smaller->getSize()));
  const int size = smaller->getSize();
  smaller->shutdown();
  return size;
}

TEST(StoreMembership, NothingIsLostAndAllGoOn) {
  CutHosts hosts;
  hosts.run([&](const Backend& backend) {
    EXPECT_EQ(shrink_and_use(backend), 4);
    backend->shutdown();
  });
}

TEST(StoreMembership, OfTwoSidesThatReachTheStoreTheFirstHostsGoesOn) {
  CutHosts hosts;
  hosts.run([&](const Backend& backend) {
    for (const int rank : {0, 1}) {
      for (const int other : {2, 3}) hosts.cut(backend, rank, other);
    }
    if (backend->getRank() >= 2) {
      EXPECT_THAT(message_of<c10::DistBackendError>([&] { shrink_and_use(backend); }),
                  AllOf(HasSubstr("went on without this rank"), HasSubstr("end this process")));
    } else {
      // The other side is the first to come.
      for (const int other : {2, 3}) hosts.await_coming(backend, other);
      EXPECT_EQ(shrink_and_use(backend), 2);
    }
    backend->shutdown();
  });
}

TEST(StoreMembership, WithinAShortTimeoutTheOtherSideGoesOnWhereTheFirstHostsDoesNotCome) {
  CutHosts hosts;
  std::atomic<int> done = 0;
  hosts.run([&](const Backend& backend) {
    for (const int rank : {0, 1}) {
      for (const int other : {2, 3}) hosts.cut(backend, rank, other);
    }
    if (backend->getRank() >= 2) {
      backend->setTimeout(4900ms);  // less than it would wait for the first host otherwise
      EXPECT_EQ(shrink_and_use(backend), 2);
      ++done;
    }
    while (done < 2) std::this_thread::yield();
    backend->shutdown();
  });
}

TEST(StoreMembership, OfTwoRanksThatLoseEachOtherOneGoesOn) {
  for (int run = 0; run < 5; ++run) {
    CutHosts hosts;
    std::atomic<int> left_behind = 0;
    hosts.run([&](const Backend& backend) {
      hosts.cut(backend, 1, 3);
      try {
        EXPECT_EQ(shrink_and_use(backend), 3);
      } catch (const c10::DistBackendError& error) {
        EXPECT_THAT(error.what_without_backtrace(), HasSubstr("went on without this rank"));
        EXPECT_TRUE(backend->getRank() == 1 || backend->getRank() == 3);
        ++left_behind;
      }
      backend->shutdown();
    });
    EXPECT_EQ(left_behind, 1);
  }
}

TEST(StoreMembership, ARankThatIsSilentAndDoesNotComeIsLeftBehind) {
  CutHosts hosts(2s);
  std::atomic<int> done = 0;
  hosts.run([&](const Backend& backend) {
    if (backend->getRank() == 3) {
      for (const int other : {0, 1}) hosts.silence(3, other);
      while (done < 3) std::this_thread::yield();
      EXPECT_THAT(message_of<c10::DistBackendError>([&] { backend->shrink({}); }),
                  HasSubstr("went on without this rank"));
    } else {
      EXPECT_EQ(shrink_and_use(backend), 3);
      ++done;
    }
    backend->shutdown();
  });
}

TEST(StoreMembership, LivingRankIsExcludedAndLearnsIt) {
  CutHosts hosts;
  std::atomic<int> done = 0;
  hosts.run([&](const Backend& backend) {
    if (backend->getRank() == 3) {
      while (done < 3) std::this_thread::yield();
      EXPECT_THAT(message_of<c10::DistBackendError>([&] { backend->shrink({}); }),
                  HasSubstr("went on without this rank"));
      return backend->shutdown();
    }
    const auto smaller = backend->shrink({3});
    EXPECT_EQ(smaller->getSize(), 3);
    ++done;
    smaller->shutdown();
    backend->shutdown();
  });
}

struct Stop final : std::runtime_error, Interruption {
  Stop() : runtime_error("stop") {}
};
thread_local std::function<bool()> must_stop;  // of a rank, which it interrupts once

TEST(StoreMembership, InterruptedAfterAnErrorOfItsOwnARankEndsTheOthersCalls) {
  CutHosts hosts;
  std::atomic<int> interrupted = 0;
  // The first to go on from the decision: the others wait for its address, and it whether another one has ended.
  failpoint::configure("shrink_agreed=error(no memory)@1");
  set_interrupt_check([] {
    if (must_stop && must_stop()) {
      must_stop = nullptr;
      throw Stop();
    }
  });
  hosts.run([&](const Backend& backend) {
    must_stop = [&] { return hosts.waits_for(backend); };
    try {
      shrink_and_use(backend);
      ADD_FAILURE() << "the group was made without a rank";
    } catch (const Stop&) {
      ++interrupted;
    } catch (const c10::DistBackendError& error) {
      EXPECT_THAT(error.what_without_backtrace(),
                  AllOf(HasSubstr("was interrupted, or met an error of its own"),
                        HasSubstr("call shrink_group again")));
    }
    must_stop = nullptr;
    EXPECT_EQ(shrink_and_use(backend), 4);
    backend->shutdown();
  });
  set_interrupt_check(nullptr);
  failpoint::configure("");
  EXPECT_EQ(interrupted, 1);
}

}  // namespace
}  // namespace lockstep::store_membership_test
