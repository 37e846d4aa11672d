#include <filesystem>
#include <fstream>
#include <optional>
#include <signal.h>
#include <string>
#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include <lockstep/launch/cgroups.h>

namespace lockstep::launch::cgroups_test {
namespace {

TEST(WorkerCgroup, EndsWithAllThatIsInIt) {
  std::optional<WorkerCgroup> cgroup = WorkerCgroup::make();
  if (!cgroup) GTEST_SKIP() << "this process may make no cgroups of version 2";
  const std::string folder = cgroup->folder();
  const pid_t child = ::fork();
  if (child == 0) {
    ::setsid();
    while (true) ::pause();
  }
  // As that of a launcher that is a worker itself and is killed with the others.
  const std::string below = folder + "/lockstep_a/lockstep_b";
  ASSERT_TRUE(std::filesystem::create_directories(below));
  std::ofstream(below + "/cgroup.procs") << child;
  cgroup.reset();
  EXPECT_FALSE(std::filesystem::exists(folder));
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
}

}  // namespace
}  // namespace lockstep::launch::cgroups_test
