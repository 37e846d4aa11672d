#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <optional>
#include <signal.h>
#include <sstream>
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

/// A cgroup whose process has ended without removing it; `stays` comes back in it, if there is one.
std::string leftover(pid_t* stays = nullptr) {
  int ends[2] = {-1, -1};
  if (::pipe(ends) != 0) return {};
  const pid_t maker = ::fork();
  if (maker == 0) {
    std::optional<WorkerCgroup> cgroup = WorkerCgroup::make();
    std::filesystem::create_directories(cgroup->folder() + "/below");
    pid_t inside = -1;
    if (stays != nullptr) {
      inside = ::fork();
      while (inside == 0) ::pause();
      std::ofstream(cgroup->folder() + "/below/cgroup.procs") << inside;
    }
    const std::string told = std::to_string(inside) + " " + cgroup->folder();
    ::_exit(::write(ends[1], told.data(), told.size()) < 0 ? 1 : 0);
  }
  ::close(ends[1]);
  std::array<char, 1024> told = {};
  const auto got = ::read(ends[0], told.data(), told.size() - 1);
  ::close(ends[0]);
  ::waitpid(maker, nullptr, 0);
  std::istringstream words(std::string(told.data(), static_cast<size_t>(std::max<ssize_t>(got, 0))));
  pid_t inside = -1;
  std::string folder;
  words >> inside >> folder;
  if (stays != nullptr) *stays = inside;
  return folder;
}

TEST(WorkerCgroup, RemovesWhatKilledLaunchersHaveLeftEmpty) {
  const std::optional<WorkerCgroup> living = WorkerCgroup::make();
  if (!living) GTEST_SKIP() << "this process may make no cgroups of version 2";
  const std::string empty = leftover();
  pid_t stays = -1;
  const std::string inhabited = leftover(&stays);
  EXPECT_FALSE(std::filesystem::exists(empty)) << "the next one that is made removes it";
  EXPECT_TRUE(std::filesystem::exists(living->folder()));
  EXPECT_TRUE(WorkerCgroup::make());
  EXPECT_TRUE(std::filesystem::exists(inhabited + "/below")) << "a process is in it";
  ASSERT_EQ(::kill(stays, SIGKILL), 0);
  remove_cgroup(inhabited.c_str());
  EXPECT_FALSE(std::filesystem::exists(inhabited));
}

}  // namespace
}  // namespace lockstep::launch::cgroups_test
