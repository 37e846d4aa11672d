#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <sys/types.h>
#include <utility>
#include <vector>

/// The multi-rank harness: the body of a test in several real processes.
///
///     TEST(AllReduce, Sums) {
///       run_ranks(4, [](int rank) {
///         auto world = init_process_group();            // RANK, WORLD_SIZE, MASTER_PORT … are set
///         …
///         EXPECT_EQ(…);                                  // fails the test with this rank's message
///       });
///     }
///
/// Each rank is the test program started again for the current test alone; it runs the test up to the same
/// call (calls are counted within a test) and ends after the body. So what stands before the call runs in
/// every rank too; earlier calls of run_ranks return at once there, and earlier run_ranks_collect return
/// outcomes without content: don't ASSERT on them before another call. OMP_NUM_THREADS is 1 in the ranks. A
/// rank is forked from a process that has loaded the program, where that makes no difference (rank_server.h),
/// else executed. Call from the test's main thread.
namespace lockstep::testing {

struct RunRanksOptions {
  /// When it has passed, all ranks are killed and the test fails.
  std::chrono::nanoseconds deadline = std::chrono::seconds(60);
  /// Ranks that the test kills, stops or lets throw: they may fail or, at the deadline, still run.
  std::vector<int> expected_failures = {};
  /// On how many pretended hosts the ranks are, the first ones on the first host. 0: as LOCKSTEP_TEST_HOSTS says, by
  /// which ctest runs some tests again over hosts (lockstep_room's HOSTS_TESTS), or on one.
  int hosts = 0;
  /// Environment variables to set in the ranks, or to remove (nullopt).
  std::vector<std::pair<std::string, std::optional<std::string>>> environment = {};
};

/// How one rank ended.
struct RankOutcome {
  int rank = 0;
  pid_t pid = 0;
  std::optional<int> exit_status;  // when it exited: 0 when the body returned, 1 when it threw
  std::optional<int> signal;       // when a signal killed it
  std::optional<std::string>
      exception;           // "TYPE: message" that the body threw, or its failed gtest assertions
  std::string output;      // standard output and error together
  bool timed_out = false;  // it still ran at the deadline
};

/// Runs body(rank) in `nprocs` processes. Fails the test (once, with the message of the rank that failed
/// first) when a rank throws, fails a gtest assertion, or ends otherwise; the other ranks are ended then. The
/// ranks' output goes where the test's goes.
void run_ranks(int nprocs, const std::function<void(int rank)>& body, const RunRanksOptions& options = {});

/// What a host that a test pretends is called, for run_ranks() as for those that start ranks themselves.
std::string pretended_host(int rank, int nprocs, int hosts);
/// Whether ranks can be on several hosts here, which takes UCX. Tests that need it skip themselves without; not under
/// ThreadSanitizer, for which UCX was not built.
bool has_wire();

/// The same for tests in which ranks go wrong on purpose: no rank is ended because another failed, nothing
/// but a passed deadline fails the test, and how each rank ended is returned, by rank.
std::vector<RankOutcome> run_ranks_collect(int nprocs, const std::function<void(int rank)>& body,
                                           const RunRanksOptions& options = {});

/// Fails the test for each rank but the `victims` that did not return from the body.
void expect_survivors(const std::vector<RankOutcome>& outcomes, const std::vector<int>& victims = {});

/// Runs a body in which `victims` are killed by SIGKILL and all others must return.
void run_survivors(int nprocs, const std::vector<int>& victims, const std::function<void(int rank)>& body,
                   RunRanksOptions options = {});

/// Ends this process by SIGKILL: at once, or after that time, during what it does then.
[[noreturn]] void die();
void die_after(std::chrono::nanoseconds delay);

}  // namespace lockstep::testing
