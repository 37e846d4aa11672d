#include <atomic>
#include <functional>
#include <gmock/gmock.h>
#include <stdexcept>
#include <thread>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/process/interrupt.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

// What ends a wait when the embedding program's interrupt check throws: Python's Ctrl-C.
namespace lockstep::interrupt_check_test {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;

struct Pressed final : std::runtime_error, Interruption {
  Pressed() : runtime_error("Ctrl-C") {}
};

std::atomic<bool> pressed{false};
const std::thread::id main_thread = std::this_thread::get_id();

/// In the main thread alone, as Python's signals.
void check() {
  if (std::this_thread::get_id() == main_thread && pressed.exchange(false)) throw Pressed();
}

struct Waiting {
  const char* name;
  bool fails_the_group;  // as operations do that were begun
  std::function<void()> wait;
};

const std::vector<Waiting>& waitings() {
  static const std::vector<Waiting> all = {
      {"all_reduce", true, [] { all_reduce(at::ones({3})); }},
      {"large all_reduce", true, [] { all_reduce(at::ones({300'000})); }},
      {"barrier", true, [] { barrier(); }},
      {"asynchronous", false,
       [] {
         auto work = all_reduce(at::ones({3}), ReduceOp::SUM, {}, true);
         work->isCompleted();
         work->getFuture();
         work->wait();
       }},
      {"recv", false, [] { recv(at::ones({3}), 1); }},
      {"monitored_barrier", false, [] { monitored_barrier({}, std::chrono::seconds(30)); }},
  };
  return all;
}

TEST(InterruptCheck, EndsEveryWait) {
  for (const Waiting& waiting : waitings()) {
    SCOPED_TRACE(waiting.name);
    run_ranks(2, [&](int rank) {
      auto world = init_process_group();
      const auto meeting = new_group();
      barrier();
      if (rank == 0) {
        set_interrupt_check(check);
        pressed = true;
        EXPECT_THROW(waiting.wait(), Interruption);
        set_interrupt_check(nullptr);
      }
      barrier(meeting);  // until then rank 0 waited in vain
      if (waiting.fails_the_group) {
        // The peer is told, whether it comes before or after.
        const std::string said = message_of([&] {
          if (rank == 0) {
            barrier();
          } else {
            waiting.wait();
          }
        });
        EXPECT_THAT(said, HasSubstr("aborted by rank 0"));
      }
      barrier(meeting);
    });
  }
}

TEST(InterruptCheck, TheInterruptionReachesWhoWaitedNotWhoseOperationItWas) {
  run_ranks(2, [&](int rank) {
    auto world = init_process_group();
    const auto meeting = new_group();
    barrier();
    if (rank == 0) {
      set_interrupt_check(check);
      auto earlier = all_reduce(at::ones({3}), ReduceOp::SUM, {}, true);
      auto later = all_reduce(at::ones({3}), ReduceOp::SUM, {}, true);
      pressed = true;
      EXPECT_THROW(later->wait(), Pressed);
      set_interrupt_check(nullptr);
      default_group()->getBackend(at::kCPU)->abort();
      EXPECT_THROW(earlier->wait(), c10::DistBackendError);
    }
    barrier(meeting);
  });
}

TEST(InterruptCheck, AWaitGoesOnThatIsNotInterrupted) {
  run_ranks(2, [&](int rank) {
    auto world = init_process_group();
    static std::atomic<int> asked{0};
    set_interrupt_check([] { ++asked; });
    at::Tensor tensor = at::full({3}, rank, at::kFloat);
    if (rank == 0) {
      recv(tensor, 1);
      EXPECT_GT(asked, 0);
    } else {
      // Rank 0 is asleep, and asks in vain.
      at::Tensor dummy = at::empty({1});
      auto never = irecv(dummy, 0);
      while (asked == 0) EXPECT_THROW(never->wait(std::chrono::milliseconds(150)), c10::DistBackendError);
      while (asked < 3) EXPECT_THROW(never->wait(std::chrono::milliseconds(150)), c10::DistBackendError);
      send(tensor, 0);
    }
    EXPECT_EQ(tensor[0].item<float>(), 1);
    set_interrupt_check(nullptr);
  });
}

}  // namespace
}  // namespace lockstep::interrupt_check_test
