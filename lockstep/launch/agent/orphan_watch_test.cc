#include <chrono>
#include <poll.h>
#include <sys/prctl.h>
#include <thread>
#include <unistd.h>

#include <gtest/gtest.h>

#include <lockstep/launch/agent/orphan_watch.h>
#include <lockstep/launch/guardian.h>
#include <lockstep/launch/worker_process.h>

namespace lockstep::launch::orphan_watch_test {
namespace {

TEST(ReapOrphans, LeavesWorkersAlone) {
  if (::access("/proc/thread-self/children", R_OK) != 0)
    GTEST_SKIP() << "this kernel does not tell the children of a process";
  ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 1), 0);  // as process 1 of a container is
  {
    const Guardian guardian(1);
    WorkerProcess worker = WorkerProcess::start({.program = "/bin/sh",
                                                 .arguments = {"sh", "-c", "sleep 0 & exit 3"},
                                                 .environment = {"PATH=/usr/bin:/bin"}},
                                                &guardian);
    pollfd ended = {worker.pidfd(), POLLIN, 0};
    ASSERT_EQ(::poll(&ended, 1, 60000), 1);
    size_t reaped = 0;
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (reaped == 0 && std::chrono::steady_clock::now() < limit) {
      reaped = reap_orphans({worker.pid()});
      std::this_thread::yield();
    }
    EXPECT_EQ(reaped, 1U);
    EXPECT_EQ(worker.wait_status(), 3 << 8);
  }
  ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 0), 0);
}

}  // namespace
}  // namespace lockstep::launch::orphan_watch_test
