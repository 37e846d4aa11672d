#include <chrono>
#include <fcntl.h>
#include <functional>
#include <gmock/gmock.h>
#include <signal.h>
#include <stdlib.h>
#include <string>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/base/boot_clock.h>
#include <lockstep/base/host_name.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/agent/worker_group.h>
#include <lockstep/launch/guardian.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::launch::worker_group_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

RunOptions shell(int nprocs, const std::string& script) {
  RunOptions options;
  options.nprocs = nprocs;
  options.command = {"/bin/sh", "-c", script};
  return checked_options(options);
}

uint16_t no_store(Supervisor&) {
  return 29500;
}

/// Does one thing with the workers once they run.
class Once : public WorkerControl {
 public:
  explicit Once(std::function<void(Supervisor&)> act, bool has_lapsed = false)
      : act_(std::move(act)), event_(::eventfd(1, EFD_CLOEXEC)), has_lapsed_(has_lapsed) {}
  int fd() const override { return event_.get(); }
  std::shared_ptr<ExitStatusTable> exit_status() const override { return nullptr; }
  bool has_lapsed() override { return has_lapsed_; }
  void ended(const GroupEnd& end) override {
    ++ends;
    report = end.report;
  }
  void serve(Supervisor& supervisor) override {
    uint64_t count = 0;
    if (act_ && ::read(event_.get(), &count, sizeof(count)) == sizeof(count))
      std::exchange(act_, {})(supervisor);
  }
  int ends = 0;             // how often it was told of the workers' end
  std::string report = {};  // what it was told last

 private:
  std::function<void(Supervisor&)> act_;
  UniqueFd event_;
  bool has_lapsed_;
};

TEST(WorkerGroup, TellsWorkersTheirPlaceAmongSeveralHosts) {
  RunOptions options =
      shell(1,
            "echo $RANK $LOCAL_RANK $ROLE_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $ROLE_WORLD_SIZE "
            "$GROUP_RANK $GROUP_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $TORCHELASTIC_RESTART_COUNT $ADDED");
  std::string seen;
  options.observe_output = [&](int, int, std::string_view bytes) { seen += bytes; };
  const RankVariables variables = {.nprocs = 1,
                                   .first_rank = 4,
                                   .world_size = 6,
                                   .first_role_rank = 1,
                                   .role_world_size = 3,
                                   .group_rank = 2,
                                   .group_size = 3,
                                   .restart_count = 5};
  const GroupEnd end = run_workers(options, variables, no_store,
                                   [](WorkerEnvironment& environment) { environment.set("ADDED", "yes"); });
  EXPECT_EQ(end.exit_status, 0);
  EXPECT_EQ(seen, "4 0 1 6 1 3 2 3 127.0.0.1:29500 5 yes\n");
}

/// What the processes' CUDA_VISIBLE_DEVICES is, by local rank, where this process's is `visible`.
std::vector<std::string> devices_of_workers(const std::string& visible, int nprocs) {
  ::setenv("CUDA_VISIBLE_DEVICES", visible.c_str(), 1);
  std::vector<std::string> seen(static_cast<size_t>(nprocs));
  RunOptions options;
  options.nprocs = nprocs;
  options.command = {"/bin/sh", "-c", "printf %s \"<${CUDA_VISIBLE_DEVICES-unset}>\""};
  options.virtual_local_rank = true;
  options.observe_output = [&](int rank, int, std::string_view bytes) {
    seen.at(static_cast<size_t>(rank)) += bytes;
  };
  EXPECT_EQ(
      run_workers(checked_options(options), {.nprocs = nprocs, .world_size = nprocs}, no_store).exit_status,
      0);
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  return seen;
}

TEST(WorkerGroup, AWorkerSeesOneDeviceOrNoneWhereTheListHidesIt) {
  EXPECT_THAT(devices_of_workers(" 5 , GPU-a1,7", 2), ElementsAre("<5>", "<GPU-a1>"));
  EXPECT_THAT(devices_of_workers("", 1), ElementsAre("<>"));
  EXPECT_THAT(devices_of_workers(" ", 1), ElementsAre("<>"));
  EXPECT_THAT(devices_of_workers("5,", 2), ElementsAre("<5>", "<>"));
  EXPECT_THAT(devices_of_workers(",5", 2), ElementsAre("<>", "<5>"));
}

TEST(WorkerGroup, ReportsRanksOfTheWholeJob) {
  const GroupEnd end = run_workers(shell(2, "test $LOCAL_RANK = 0 || exit 3; exec sleep 1000"),
                                   {.nprocs = 2, .first_rank = 4, .world_size = 6}, no_store);
  EXPECT_EQ(end.exit_status, 1);
  EXPECT_THAT(end.report, HasSubstr("rank 5 (pid"));
  EXPECT_THAT(end.report, HasSubstr("rank 4 was then ended"));
}

TEST(WorkerGroup, TellsOtherHostsWhereTheRecordsOfAFailureAre) {
  const testing::TemporaryFolder folder;
  Once control(nullptr);
  const auto adjust = [&](WorkerEnvironment& environment) {
    environment.set("LOCKSTEP_FLIGHT_DIR", folder.path().string());
  };
  // The clock of files may be some milliseconds late.
  const RunOptions options = shell(1, "touch -d '+1 minute' \"$LOCKSTEP_FLIGHT_DIR/rank_3.json\"; exit 3");
  run_workers(options, {.nprocs = 1, .first_rank = 3, .world_size = 4, .group_size = 2}, no_store, adjust,
              &control);
  EXPECT_THAT(control.report, HasSubstr("rank 3 (pid"));
  EXPECT_TRUE(control.report.ends_with("lockstep run: the ranks' last operations, on " + host_name() +
                                       ": lockstep inspect flight " + folder.path().string() + "\n"))
      << control.report;
}

TEST(WorkerGroup, ReportsWhereTheWorkersOutputGoesElsewhere) {
  const UniqueFd nothing(::open("/dev/null", O_RDWR | O_CLOEXEC));
  RunOptions options = shell(1, "exit 3");
  options.output = {nothing.get(), nothing.get()};
  ::testing::internal::CaptureStderr();
  run_workers(options, {.nprocs = 1, .world_size = 1}, no_store);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("exited with status 3"));
}

TEST(WorkerGroup, EndsWhenItsControlSaysSo) {
  for (const auto grace_period : {std::chrono::seconds(0), std::chrono::seconds(30)}) {
    Once control([&](Supervisor& supervisor) { supervisor.stop(grace_period); });
    const GroupEnd end =
        run_workers(shell(2, "exec sleep 1000"), {.nprocs = 2, .world_size = 4}, no_store, {}, &control);
    EXPECT_EQ(end.report, "") << "no rank failed by itself";
    EXPECT_EQ(control.ends, 1);
    EXPECT_NE(end.exit_status, 0);
  }
}

TEST(WorkerGroup, ItsGuardianEndsItWhenTheLeaseIsOver) {
  Once control([](Supervisor& supervisor) { supervisor.lease().renew(BootClock::now()); });
  const GroupEnd end =
      run_workers(shell(1, "exec sleep 1000"), {.nprocs = 1, .world_size = 2}, no_store, {}, &control);
  EXPECT_THAT(end.report, HasSubstr("killed by signal 9"));
}

TEST(WorkerGroup, WhatItsGuardianKillsHasNotFailedAndWhatEndedBeforeHas) {
  Once control([](Supervisor& supervisor) { supervisor.lease().renew(BootClock::now()); }, true);
  GroupEnd end =
      run_workers(shell(1, "exec sleep 1000"), {.nprocs = 1, .world_size = 2}, no_store, {}, &control);
  EXPECT_EQ(end.report, "");
  EXPECT_EQ(end.exit_status, 1);

  Once lapsed_later({}, true);
  end = run_workers(shell(2, "test $LOCAL_RANK = 0 || exit 3; exec sleep 1000"),
                    {.nprocs = 2, .world_size = 4}, no_store, {}, &lapsed_later);
  EXPECT_THAT(end.report, HasSubstr("rank 1 (pid"));
}

TEST(Guardian, KillsOnlyOnceTheLeaseIsOver) {
  const Guardian guardian(1);
  const pid_t child = ::fork();
  if (child == 0) {
    ::setpgid(0, 0);
    ::execl("/bin/sleep", "sleep", "1000", nullptr);
    ::_exit(127);
  }
  ::setpgid(child, child);
  guardian.enlist(child);
  GuardianLease lease = guardian.lease();
  lease.renew(BootClock::now() + std::chrono::hours(1));
  lease.renew(BootTime::max());
  lease.renew(BootClock::now());
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

TEST(GuardianLease, StaysOverWhereItIsRenewedTooLate) {
  GuardianLease lease{UniqueFd()};
  const BootTime over = BootClock::now();
  lease.renew(over);
  lease.renew(over + std::chrono::hours(1));
  EXPECT_EQ(lease.until(), over) << "the guardian may have killed before it got the second one";
}

}  // namespace
}  // namespace lockstep::launch::worker_group_test
