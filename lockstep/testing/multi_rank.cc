#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/spawn_processes.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/rank_server.h>
#include <lockstep/transport/wire/ucx_engine.h>

namespace lockstep::testing {
namespace {

/// Counts the calls within a test.
class CallCounter : public ::testing::EmptyTestEventListener {
 public:
  /// The program's one; gtest owns it.
  static CallCounter& instance() {
    static auto* counter = [] {
      auto* made = new CallCounter;
      ::testing::UnitTest::GetInstance()->listeners().Append(made);
      return made;
    }();
    return *counter;
  }

  void OnTestStart(const ::testing::TestInfo&) override { calls = 0; }

  int calls = 0;
};

/// While one lives, failed assertions are gathered here, also those that an EXPECT_NONFATAL_FAILURE around the
/// body would take, and printed at once, in case that the rank never gets to its
/// end.
class AssertionCollector {
 public:
  const std::string& failures() const { return failures_; }

 private:
  using Base = ::testing::ScopedFakeTestPartResultReporter;
  class Reporter : public Base {
   public:
    Reporter(InterceptMode mode, std::string& failures) : Base(mode, nullptr), failures_(failures) {}
    void ReportTestPartResult(const ::testing::TestPartResult& result) override {  // gtest holds its lock
      if (!result.failed()) return;
      std::ostringstream text;
      text << (result.file_name() == nullptr ? "unknown file" : result.file_name()) << ":"
           << result.line_number() << ": " << result.message();
      std::cerr << text.str() << std::endl;
      failures_ += (failures_.empty() ? "" : "\n") + text.str();
    }

   private:
    std::string& failures_;
  };

  std::string failures_;
  Reporter other_threads_{Base::INTERCEPT_ALL_THREADS, failures_};
  Reporter this_thread_{Base::INTERCEPT_ONLY_CURRENT_THREAD, failures_};
};

/// What a body with failed assertions ends with.
class AssertionsFailed : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

std::string current_test() {
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  if (info == nullptr) throw std::logic_error("run_ranks is to be called by a test while it runs");
  return std::string(info->test_suite_name()) + "." + info->name();
}

/// What a rank does.
void run_body(const std::function<void(int)>& body, int rank, int nprocs, const RunRanksOptions& options) {
  const int hosts = options.hosts > 0
                        ? options.hosts
                        : static_cast<int>(environment::integer("LOCKSTEP_TEST_HOSTS", 1, 64).value_or(1));
  // A single rank stands for a job that knows nothing of hosts.
  if (hosts > 1 && nprocs > 1) {
    ::setenv("LOCKSTEP_TEST_HOST", pretended_host(rank, nprocs, hosts).c_str(), 1);
  }
  AssertionCollector collector;
  body(rank);
  if (!collector.failures().empty()) throw AssertionsFailed(collector.failures());
}

launch::SpawnRequest request_for(int nprocs, const RunRanksOptions& options, bool all_may_fail) {
  const std::string test = current_test();
  launch::SpawnRequest request;
  request.nprocs = nprocs;
  request.deadline = Deadline::after(options.deadline);
  request.may_fail.assign(static_cast<size_t>(std::max(nprocs, 0)), all_may_fail);
  for (int rank : options.expected_failures) request.may_fail.at(static_cast<size_t>(rank)) = true;
  request.options.argv = {::testing::internal::GetArgvs().at(0),
                          "--gtest_filter=" + test,
                          "--gtest_brief=1",
                          "--gtest_repeat=1",
                          "--gtest_shuffle=0",
                          "--gtest_also_run_disabled_tests",
                          "--gtest_catch_exceptions=1"};
  request.options.label = test + "#" + std::to_string(CallCounter::instance().calls++);
  request.options.grace_period = std::chrono::seconds(5);
  request.options.environment = {{"OMP_NUM_THREADS", "1"}};
  // The ranks run one test each and write no reports.
  for (const char* name :
       {"GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX", "GTEST_SHARD_STATUS_FILE", "GTEST_OUTPUT", "GTEST_FILTER",
        "TESTBRIDGE_TEST_ONLY", "XML_OUTPUT_FILE", "TEST_PREMATURE_EXIT_FILE"}) {
    request.options.environment.emplace_back(name, std::nullopt);
  }
  if (can_fork_rank(options.environment)) request.make_process = fork_rank;
  request.options.environment.insert(request.options.environment.end(), options.environment.begin(),
                                     options.environment.end());
  return request;
}

/// Fails the test for the ranks that still ran at the deadline.
void judge_deadline(const launch::SpawnResult& result, const RunRanksOptions& options) {
  if (!result.deadline_passed) return;
  std::string late;
  for (size_t rank = 0; rank < result.outcomes.size(); ++rank) {
    const bool expected =
        std::count(options.expected_failures.begin(), options.expected_failures.end(), rank) > 0;
    if (result.outcomes[rank].asked_to_end && !expected)
      late += (late.empty() ? "" : ", ") + std::to_string(rank);
  }
  if (late.empty()) return;
  ADD_FAILURE() << "these ranks still ran at the deadline of " << to_seconds(options.deadline)
                << " s and were killed: " << late;
}

/// Memory that a rank's output is collected in.
UniqueFd output_file() {
  UniqueFd fd(::memfd_create("rank-output", MFD_CLOEXEC));
  // Standard output and error share it: each write goes to the end.
  if (!fd || ::fcntl(fd.get(), F_SETFL, O_APPEND) != 0) {
    throw std::runtime_error(std::string("can't make a memory file for a rank's output: ") +
                             std::strerror(errno));
  }
  return fd;
}

std::string content(const UniqueFd& fd) {
  std::string text(static_cast<size_t>(::lseek(fd.get(), 0, SEEK_END)), '\0');
  const ssize_t got = ::pread(fd.get(), text.data(), text.size(), 0);
  text.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  return text;
}

}  // namespace

std::string pretended_host(int rank, int nprocs, int hosts) {
  return "host-" + std::to_string(rank * hosts / nprocs);
}

bool has_wire() {
#if defined(__SANITIZE_THREAD__)
  return false;
#else
  return transport::wire::why_no_ucx().empty();
#endif
}

void run_ranks(int nprocs, const std::function<void(int rank)>& body, const RunRanksOptions& options) {
  const auto request = request_for(nprocs, options, /*all_may_fail=*/false);
  const auto result =
      launch::spawn_processes(request, [&](int rank) { run_body(body, rank, nprocs, options); });
  if (!result) return;
  judge_deadline(*result, options);
  for (int rank : result->failed) {
    if (request.may_fail[static_cast<size_t>(rank)]) continue;
    ADD_FAILURE() << "rank " << rank << ": "
                  << launch::describe_failure(rank, result->outcomes[static_cast<size_t>(rank)]);
    return;
  }
}

std::vector<RankOutcome> run_ranks_collect(int nprocs, const std::function<void(int rank)>& body,
                                           const RunRanksOptions& options) {
  auto request = request_for(nprocs, options, /*all_may_fail=*/true);
  std::vector<UniqueFd> files;
  for (int rank = 0; rank < nprocs; ++rank) {
    files.push_back(output_file());
    request.outputs.push_back(files.back().get());
  }
  std::vector<RankOutcome> outcomes(static_cast<size_t>(std::max(nprocs, 0)));
  const auto result =
      launch::spawn_processes(request, [&](int rank) { run_body(body, rank, nprocs, options); });
  if (!result) return outcomes;
  judge_deadline(*result, options);
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    const launch::SpawnOutcome& from = result->outcomes[rank];
    RankOutcome& to = outcomes[rank];
    to.rank = static_cast<int>(rank);
    to.pid = from.pid;
    if (WIFEXITED(from.wait_status)) to.exit_status = WEXITSTATUS(from.wait_status);
    if (WIFSIGNALED(from.wait_status)) to.signal = WTERMSIG(from.wait_status);
    to.exception = from.exception;
    to.output = content(files[rank]);
    to.timed_out = result->deadline_passed && from.asked_to_end;
  }
  return outcomes;
}

void expect_survivors(const std::vector<RankOutcome>& outcomes, const std::vector<int>& victims) {
  for (const RankOutcome& outcome : outcomes) {
    if (outcome.pid == 0) continue;  // in a rank of another run the outcome has no content
    if (std::find(victims.begin(), victims.end(), outcome.rank) != victims.end()) continue;
    const std::string why = outcome.exception.value_or("no exception") + "\n" + outcome.output;
    EXPECT_FALSE(outcome.timed_out) << "rank " << outcome.rank << " hangs\n" << why;
    EXPECT_EQ(outcome.exit_status.value_or(-1), 0) << "rank " << outcome.rank << ": " << why;
  }
}

void run_survivors(int nprocs, const std::vector<int>& victims, const std::function<void(int rank)>& body,
                   RunRanksOptions options) {
  options.expected_failures = victims;
  const auto outcomes = run_ranks_collect(nprocs, body, options);
  expect_survivors(outcomes, victims);
  for (const int victim : victims) {
    const RankOutcome& outcome = outcomes.at(static_cast<size_t>(victim));
    if (outcome.pid == 0) continue;
    const std::string why = outcome.exception.value_or("no exception") + "\n" + outcome.output;
    EXPECT_FALSE(outcome.timed_out) << "rank " << victim << " hangs\n" << why;
    EXPECT_EQ(outcome.signal.value_or(0), SIGKILL) << "rank " << victim << ": " << why;
  }
}

void die() {
  ::kill(::getpid(), SIGKILL);
  std::abort();
}

void die_after(std::chrono::nanoseconds delay) {
  std::thread([until = std::chrono::steady_clock::now() + delay] {
    while (std::chrono::steady_clock::now() < until) {  // sleeping is too coarse
    }
    die();
  }).detach();
}

}  // namespace lockstep::testing
