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

TEST(CgroupFolders, OfVersion2) {
  const std::string mounts =
      "21 28 0:20 / /proc rw,nosuid shared:5 - proc proc rw\n"
      "28 21 0:25 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
  EXPECT_EQ(cgroup_folders("0::/user.slice/session-3.scope\n", mounts).unified,
            "/sys/fs/cgroup/user.slice/session-3.scope");
  EXPECT_EQ(cgroup_folders("0::/\n", mounts).unified, "/sys/fs/cgroup") << "a namespace of its own";
  EXPECT_EQ(cgroup_folders("0::/../other\n", mounts).unified, "") << "outside of the namespace";
  EXPECT_EQ(cgroup_folders("0::/a\n", mounts).memory, "");
}

TEST(CgroupFolders, OfVersion1AndBoth) {
  const std::string mounts =
      "30 21 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
      "31 21 0:28 /docker/abc /sys/fs/cgroup/cpu,cpuacct rw master:1 - cgroup cgroup rw,cpu,cpuacct\n"
      "32 21 0:29 /docker/abc /sys/fs/cgroup/memory rw master:2 master:3 - cgroup cgroup rw,memory\n";
  const std::string cgroups = "9:cpu,cpuacct:/docker/abc\n8:memory:/docker/abc\n0::/docker/abc\n";
  const CgroupFolders folders = cgroup_folders(cgroups, mounts);
  EXPECT_EQ(folders.unified, "/sys/fs/cgroup/unified/docker/abc");
  EXPECT_EQ(folders.memory, "/sys/fs/cgroup/memory") << "that part alone is mounted";
  EXPECT_EQ(cgroup_folders("8:memory:/docker/abc/job\n", mounts).memory, "/sys/fs/cgroup/memory/job");
  EXPECT_EQ(cgroup_folders("8:memory:/docker/abcd\n", mounts).memory, "");
}

TEST(CgroupFolders, OfTextsThatSayNothing) {
  for (const std::string text :
       {"", "\n\n", "0::", "memory", ":::", "0::/a", "a b c d e f g - h", "- - - -"}) {
    EXPECT_EQ(cgroup_folders(text, text).unified, "") << text;
    EXPECT_EQ(cgroup_folders("0::/a\n8:memory:/a\n", text).memory, "") << text;
  }
}

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
