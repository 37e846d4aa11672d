#include <atomic>
#include <chrono>
#include <gmock/gmock.h>
#include <memory>
#include <string>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/errors.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/thread_ranks.h>

namespace lockstep::monitored_barrier_test {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;

TEST(MonitoredBarrier, ReturnsWhenAllHaveCome) {
  run_ranks(4, [](int rank) {
    auto world = init_process_group();
    auto odd = new_group({3, 1});
    for (int i = 0; i < 20; ++i) {
      monitored_barrier();
      monitored_barrier({}, 30s, /*wait_all_ranks=*/true);
      if (rank % 2 == 1) monitored_barrier(odd, 30s);
    }
  });
}

TEST(MonitoredBarrier, NoRankLeavesBeforeTheLastHasCome) {
  constexpr int kRanks = 4;
  std::atomic<int> came{0};
  testing::run_rank_threads(kRanks, [&](const std::shared_ptr<transport::GroupChannel>& channel) {
    auto backend = c10::make_intrusive<LockstepBackend>(channel, LockstepBackend::Settings{"test", 60s});
    for (int round = 1; round <= 50; ++round) {
      came.fetch_add(1);
      backend->monitoredBarrier({}, /*wait_all_ranks=*/round % 2 == 0);
      ASSERT_GE(came.load(), kRanks * round);
    }
  });
}

TEST(MonitoredBarrier, NamesWhoIsMissingAndTheGroupGoesOn) {
  run_ranks(5, [](int rank) {
    auto world = init_process_group();
    auto group = new_group();
    const bool missing = rank == 2 || rank == 4;
    for (bool wait_all_ranks : {false, true}) {
      if (!missing) {
        const auto text =
            message_of<DistTimeoutError>([&] { monitored_barrier(group, 400ms, wait_all_ranks); });
        EXPECT_THAT(text, HasSubstr("monitoredBarrier"));
        if (wait_all_ranks) {
          EXPECT_THAT(text, ::testing::ContainsRegex("Ranks 2, 4"));
        } else {
          EXPECT_THAT(text, HasSubstr("Rank 2 failed"));
        }
      }
      barrier();
      // The ranks that did not come then do not belong to the next one either: the group goes on.
      at::Tensor tensor = at::ones({3000});
      all_reduce(tensor, ReduceOp::SUM, group);
      EXPECT_EQ(tensor[0].item<float>(), 5);
    }
  });
}

TEST(MonitoredBarrier, WhoComesLateIsToldTooAndTheNextOneSucceeds) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    auto group = new_group();
    for (int late : {1, 0}) {
      if (rank == late) barrier();  // the others have given up
      const auto text =
          message_of<DistTimeoutError>([&] { monitored_barrier(group, 300ms, /*wait_all_ranks=*/true); });
      EXPECT_THAT(text, HasSubstr("ank " + std::to_string(late)));
      if (rank != late) barrier();
      barrier();
      monitored_barrier(group, 30s);
    }
  });
}

TEST(MonitoredBarrier, NamesRankZeroIfItIsTheOneThatIsMissing) {
  run_ranks(3, [](int rank) {
    auto world = init_process_group();
    if (rank != 0) {
      const auto text = message_of<DistTimeoutError>([] { monitored_barrier({}, 400ms); });
      EXPECT_THAT(text, HasSubstr("rank 0"));
    }
    barrier();
  });
}

TEST(MonitoredBarrier, TimeoutsThatMakeNoSenseAreRefused) {
  auto world = init_process_group({.rank = 0, .world_size = 1});
  EXPECT_THROW(monitored_barrier({}, -5ms), c10::ValueError);
  monitored_barrier({}, 5ms);
}

}  // namespace
}  // namespace lockstep::monitored_barrier_test
