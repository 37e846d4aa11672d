#include <gmock/gmock.h>
#include <string>

#include <gtest/gtest.h>

#include <lockstep/base/process/cgroup_folders.h>

namespace lockstep::cgroup_folders_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(CgroupFolders, OfVersion2) {
  const std::string mounts =
      "21 28 0:20 / /proc rw,nosuid shared:5 - proc proc rw\n"
      "28 21 0:25 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
  EXPECT_THAT(cgroup_folders("0::/user.slice/session-3.scope\n", mounts, "memory").version_2,
              ElementsAre("/sys/fs/cgroup/user.slice/session-3.scope", "/sys/fs/cgroup/user.slice",
                          "/sys/fs/cgroup"));
  EXPECT_THAT(cgroup_folders("0::/\n", mounts, "memory").version_2, ElementsAre("/sys/fs/cgroup"))
      << "a namespace of its own";
  EXPECT_THAT(cgroup_folders("0::/a\n", mounts, "memory").version_1, IsEmpty());
}

TEST(CgroupFolders, OutsideOfTheNamespaceAreNone) {
  const std::string mounts = "28 21 0:25 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
  EXPECT_THAT(cgroup_folders("0::/..\n", mounts, "memory").version_2, IsEmpty());
  EXPECT_THAT(cgroup_folders("0::/../other\n", mounts, "memory").version_2, IsEmpty());
  EXPECT_THAT(cgroup_folders("0::/..other\n", mounts, "memory").version_2,
              ElementsAre("/sys/fs/cgroup/..other", "/sys/fs/cgroup"));
}

TEST(CgroupFolders, OfVersion1InAContainerWithAPartMounted) {
  const std::string mounts =
      "31 21 0:28 /docker/abc /sys/fs/cgroup/cpu,cpuacct rw master:1 - cgroup cgroup rw,cpu,cpuacct\n"
      "32 21 0:29 /docker/abc /sys/fs/cgroup/memory rw master:2 master:3 - cgroup cgroup rw,memory\n";
  const std::string cgroups =
      "9:cpu,cpuacct:/docker/abc\n8:memory:/docker/abc/job\n1:name=systemd:/docker/abc\n";
  EXPECT_THAT(cgroup_folders(cgroups, mounts, "cpu").version_1, ElementsAre("/sys/fs/cgroup/cpu,cpuacct"));
  EXPECT_THAT(cgroup_folders(cgroups, mounts, "memory").version_1,
              ElementsAre("/sys/fs/cgroup/memory/job", "/sys/fs/cgroup/memory"));
  EXPECT_THAT(cgroup_folders(cgroups, mounts, "pids").version_1, IsEmpty());
  EXPECT_THAT(cgroup_folders(cgroups, mounts, "memory").version_2, IsEmpty());
  EXPECT_THAT(cgroup_folders("8:memory:/docker/abcd\n", mounts, "memory").version_1, IsEmpty())
      << "another one";
  EXPECT_THAT(cgroup_folders("8:memory:/docker\n", mounts, "memory").version_1, IsEmpty()) << "above it";
}

TEST(CgroupFolders, OfBothVersions) {
  const std::string mounts =
      "30 21 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
      "32 21 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
  const CgroupFolders folders = cgroup_folders("8:memory:/job\n0::/a\n", mounts, "memory");
  EXPECT_THAT(folders.version_2, ElementsAre("/sys/fs/cgroup/unified/a", "/sys/fs/cgroup/unified"));
  EXPECT_THAT(folders.version_1, ElementsAre("/sys/fs/cgroup/memory/job", "/sys/fs/cgroup/memory"));
}

TEST(CgroupFolders, WithOddCharactersInTheirNames) {
  const std::string mounts = R"(28 21 0:25 /a\134x2db /run/my\040groups rw - cgroup2 cgroup2 rw)"
                             "\n"
                             "32 21 0:29 /kubepods:burstable /memory rw - cgroup cgroup rw,memory\n";
  const std::string cgroups = "8:memory:/kubepods:burstable/cri:0::pod\n0::/a\\x2db/c:d\n";
  const CgroupFolders folders = cgroup_folders(cgroups, mounts, "memory");
  EXPECT_THAT(folders.version_2, ElementsAre("/run/my groups/c:d", "/run/my groups"));
  EXPECT_THAT(folders.version_1, ElementsAre("/memory/cri:0::pod", "/memory"));
}

TEST(CgroupFolders, TakeTheMountThatHoldsThem) {
  const std::string mounts =
      "28 21 0:25 /other /mnt/other rw - cgroup2 cgroup2 rw\n"
      "29 21 0:25 /job /mnt/job rw - cgroup2 cgroup2 rw\n";
  EXPECT_THAT(cgroup_folders("0::/job/a\n", mounts, "memory").version_2,
              ElementsAre("/mnt/job/a", "/mnt/job"));
}

TEST(CgroupFolders, OfTextsThatSayNothing) {
  for (const std::string text :
       {"", "\n\n", "0::", "memory", ":::", "0::/a", "a b c d e f g - h", "- - - -"}) {
    EXPECT_THAT(cgroup_folders(text, text, "memory").version_2, IsEmpty()) << text;
    EXPECT_THAT(cgroup_folders("0::/a\n8:memory:/a\n", text, "memory").version_2, IsEmpty()) << text;
    EXPECT_THAT(cgroup_folders("0::/a\n8:memory:/a\n", text, "memory").version_1, IsEmpty()) << text;
  }
}

}  // namespace
}  // namespace lockstep::cgroup_folders_test
