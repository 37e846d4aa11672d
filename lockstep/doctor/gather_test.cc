#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include <lockstep/base/process/cpu.h>
#include <lockstep/doctor/gather.h>
#include <lockstep/doctor/internal/command.h>
#include <lockstep/doctor/internal/files.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::doctor::gather_test {

using internal::fingerprint_file;
using internal::run_command;

namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// A folder that stands for a machine's root.
using Tree = testing::TemporaryFolder;

TEST(GatherMachine, ReadsAContainerWithVersion2Groups) {
  Tree tree;
  tree.write("proc/sys/kernel/osrelease", "5.15.0-1051-aws\n");
  tree.write("proc/sys/kernel/yama/ptrace_scope", "1\n");
  tree.write("sys/devices/system/clocksource/clocksource0/current_clocksource", "kvm-clock\n");
  tree.write("proc/self/status", "Name:\tdoctor\nCpus_allowed:\tff\nCpus_allowed_list:\t0-2,5\n");
  tree.write("proc/self/cgroup", "0::/kubepods/pod7\n");
  tree.write("proc/self/mountinfo", "28 21 0:25 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  tree.write("sys/fs/cgroup/kubepods/cpu.max", "400000 100000\n");
  tree.write("sys/fs/cgroup/kubepods/pod7/cpu.max", "250000 100000\n");
  tree.write("sys/fs/cgroup/kubepods/pod7/memory.max", "max\n");
  tree.write("sys/fs/cgroup/kubepods/memory.max", "4294967296\n");
  tree.write("sys/fs/cgroup/kubepods/memory.current", "4294967296\n");
  // A data set that was read, and the inodes of its files, fill the group up to the limit, and do not count; shared
  // memory does.
  tree.write(
      "sys/fs/cgroup/kubepods/memory.stat",
      "anon 1048576\nfile 3222274048\nshmem 1048576\ninactive_file 2147483648\nactive_file 1073741824\n"
      "slab_reclaimable 536870912\n");
  tree.write("sys/fs/cgroup/kubepods/pod7/pids.max", "300\n");
  tree.write("sys/devices/system/cpu/online", "0-7\n");
  for (int core = 0; core < 8; ++core) {
    tree.write("sys/devices/system/cpu/cpu" + std::to_string(core) + "/topology/thread_siblings_list",
               std::to_string(core % 4) + "," + std::to_string(core % 4 + 4) + "\n");
  }
  tree.write("sys/devices/system/cpu/smt/active", "1\n");
  tree.write("sys/devices/system/node/online", "0-1\n");
  tree.write("sys/devices/system/node/node0/cpulist", "0-3\n");
  tree.write("sys/devices/system/node/node1/cpulist", "4-7\n");
  tree.write("proc/meminfo", "MemTotal:       16384 kB\nMemFree: 1 kB\nMemAvailable:    8192 kB\n");
  tree.write("proc/self/limits",
             "Limit                     Soft Limit           Hard Limit           Units     \n"
             "Max processes             1000                 2000                 processes \n"
             "Max open files            256                  unlimited            files     \n"
             "Max locked memory         65536                65536                bytes     \n"
             "Max address space         unlimited            unlimited            bytes     \n");
  tree.write("dev/nvidia0", "");
  tree.write("dev/nvidia11", "");
  tree.write("dev/nvidiactl", "");
  tree.write("dev/nvidia-uvm", "");
  tree.write("proc/driver/nvidia/version",
             "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
             "GCC version:  gcc version 12.2.0\n");
  tree.write("sys/class/infiniband/mlx5_0/node_type", "1\n");

  const Facts facts = gather_machine(tree.path());
  EXPECT_EQ(facts.kernel.release, "5.15.0-1051-aws");
  EXPECT_EQ(facts.kernel.major, 5);
  EXPECT_EQ(facts.kernel.minor, 15);
  EXPECT_EQ(facts.kernel.clock_source, "kvm-clock");
  EXPECT_EQ(facts.kernel.ptrace_scope, 1);
  EXPECT_THAT(facts.cores.allowed, ElementsAre(0, 1, 2, 5));
  EXPECT_EQ(facts.cores.online.size(), 8);
  EXPECT_EQ(facts.cores.physical, 4);
  EXPECT_EQ(facts.cores.smt_active, true);
  EXPECT_EQ(facts.cores.quota, 2.5);
  EXPECT_THAT(facts.cores.numa_nodes, ElementsAre(ElementsAre(0, 1, 2, 3), ElementsAre(4, 5, 6, 7)));
  EXPECT_EQ(facts.memory.total, 16 << 20);
  EXPECT_EQ(facts.memory.available, 8 << 20);
  EXPECT_EQ(facts.memory.cgroup_limit, int64_t{4} << 30);
  EXPECT_EQ(facts.memory.cgroup_left, (int64_t{3} << 30) + (512 << 20))
      << "the limit less what is used, but for what the kernel takes back";
  EXPECT_EQ(facts.limits.open_files.soft, 256);
  EXPECT_EQ(facts.limits.open_files.hard, std::nullopt);
  EXPECT_EQ(facts.limits.processes.soft, 1000);
  EXPECT_EQ(facts.limits.processes.hard, 2000);
  EXPECT_EQ(facts.limits.locked_memory.soft, 65536);
  EXPECT_EQ(facts.limits.address_space.soft, std::nullopt);
  EXPECT_EQ(facts.limits.pids_max, 300);
  EXPECT_FALSE(facts.dev_shm.mounted);
  EXPECT_EQ(facts.gpu.device_files, 2);
  EXPECT_EQ(facts.gpu.driver, "550.54.15");
  EXPECT_THAT(facts.ucx.rdma_hardware, ElementsAre("mlx5_0"));
}

TEST(GatherMachine, ReadsVersion1Groups) {
  Tree tree;
  tree.write("proc/self/cgroup",
             "5:cpu,cpuacct:/job/step\n4:memory:/job\n3:pids:/\n1:name=systemd:/\n0::/\n");
  tree.write("proc/self/mountinfo",
             "31 21 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
             "32 21 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
             "33 21 0:30 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n");
  tree.write("sys/fs/cgroup/cpu,cpuacct/job/step/cpu.cfs_quota_us", "-1\n");
  tree.write("sys/fs/cgroup/cpu,cpuacct/job/step/cpu.cfs_period_us", "100000\n");
  tree.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "150000\n");
  tree.write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
  tree.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "1048576\n");
  tree.write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "1048576\n");
  tree.write("sys/fs/cgroup/memory/job/memory.stat",
             "inactive_file 4096\nactive_file 4096\ntotal_inactive_file 65536\ntotal_active_file 32768\n");
  tree.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  tree.write("sys/fs/cgroup/pids/pids.max", "max\n");
  std::filesystem::create_directories(tree.path("dev/shm"));
  const Facts facts = gather_machine(tree.path());
  EXPECT_EQ(facts.cores.quota, 1.5);
  EXPECT_EQ(facts.memory.cgroup_limit, 1 << 20);
  EXPECT_EQ(facts.memory.cgroup_left, 98304);
  EXPECT_EQ(facts.limits.pids_max, std::nullopt);
  EXPECT_TRUE(facts.dev_shm.mounted);
}

TEST(GatherMachine, KnowsNothingOfAnEmptyRoot) {
  Tree tree;
  const Facts facts = gather_machine(tree.path());
  EXPECT_EQ(facts.kernel.major, 0);
  EXPECT_TRUE(facts.cores.allowed.empty());
  EXPECT_EQ(facts.cores.quota, std::nullopt);
  EXPECT_EQ(facts.memory.total, 0);
  EXPECT_FALSE(facts.limits.known);
  EXPECT_EQ(facts.gpu.device_files, 0);
}

TEST(GatherMachine, OddFilesAreUnknownNotFatal) {
  Tree tree;
  tree.write("proc/sys/kernel/osrelease", "next\n");
  tree.write("proc/self/status", "Cpus_allowed_list:\t3-1\n");
  tree.write("proc/self/cgroup", "nonsense\n0::\n:::\n");
  tree.write("proc/self/mountinfo", "28 21 0:25 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  tree.write("sys/fs/cgroup/cpu.max", "0 0\n");
  tree.write("proc/meminfo", "MemTotal: many\n");
  tree.write("proc/self/limits", "Max open files\n");
  const Facts facts = gather_machine(tree.path());
  EXPECT_EQ(facts.kernel.major, 0);
  EXPECT_TRUE(facts.cores.allowed.empty());
  EXPECT_EQ(facts.cores.quota, std::nullopt);
  EXPECT_EQ(facts.memory.total, 0);
  EXPECT_EQ(facts.limits.open_files.soft, std::nullopt);
}

TEST(Gather, ThisMachineAgreesWithTheSystemCalls) {
  const Facts facts = gather_machine();
  EXPECT_EQ(static_cast<int>(facts.cores.allowed.size()), usable_cores());
  EXPECT_EQ(static_cast<long>(facts.cores.online.size()), ::sysconf(_SC_NPROCESSORS_ONLN));
  EXPECT_EQ(facts.memory.total / 1024, ::sysconf(_SC_PHYS_PAGES) * (::sysconf(_SC_PAGESIZE) / 1024));
  EXPECT_GE(facts.kernel.major, 4);
}

TEST(Gather, ProbesWorkHere) {
#if defined(__SANITIZE_THREAD__)
  ::setenv("LOCKSTEP_UCX_LIBRARY", "none", 1);  // UCX was not built for ThreadSanitizer
#endif
  Facts facts;
  gather_probes(facts);
  EXPECT_TRUE(facts.memfd.works) << facts.memfd.error;
  EXPECT_TRUE(facts.fd_passing.works) << facts.fd_passing.error;
  EXPECT_TRUE(facts.pidfd.works) << facts.pidfd.error;
  EXPECT_TRUE(facts.network.loopback_tcp.works) << facts.network.loopback_tcp.error;
  EXPECT_NE(facts.network.hostname, "");
  const auto& interfaces = facts.network.interfaces;
  const auto loopback =
      std::find_if(interfaces.begin(), interfaces.end(), [](auto& each) { return each.loopback; });
  ASSERT_NE(loopback, interfaces.end());
  EXPECT_THAT(loopback->addresses, ::testing::Contains("127.0.0.1"));
  EXPECT_NE(facts.network.between_hosts, "");
  EXPECT_EQ(facts.ucx.error, "");
  EXPECT_NE(facts.ucx.missing.empty(), facts.ucx.engine.empty());
}

TEST(Gather, ASecretStaysOne) {
  ::setenv("LOCKSTEP_JOB_SECRET", "0123456789abcdef0123456789abcdef", 1);
  ::setenv("LOCKSTEP_LOG", "info", 1);
  const auto environment = gather_environment();
  ::unsetenv("LOCKSTEP_JOB_SECRET");
  ::unsetenv("LOCKSTEP_LOG");
  EXPECT_EQ(environment.at("LOCKSTEP_JOB_SECRET"), "set");
  EXPECT_EQ(environment.at("LOCKSTEP_LOG"), "info");
}

TEST(Gather, SoftwareIsWhatThisProgramIsLinkedWith) {
  const Software software = gather_software();
  EXPECT_THAT(software.lockstep_path, HasSubstr("liblockstep.so"));
  EXPECT_THAT(software.torch_path, HasSubstr("libtorch_cpu.so"));
  EXPECT_EQ(software.torch_compiled, software.torch_loaded);
  EXPECT_THAT(software.lockstep_version, ::testing::StartsWith("0."));
}

TEST(Files, FingerprintsTellFilesApart) {
  Tree tree;
  tree.write("a", "one");
  tree.write("b", "one");
  tree.write("c", "two");
  EXPECT_EQ(fingerprint_file(tree.path("a")), "3-7a6c86f1");  // zlib.crc32(b"one")
  EXPECT_EQ(fingerprint_file(tree.path("a")), fingerprint_file(tree.path("b")));
  EXPECT_NE(fingerprint_file(tree.path("a")), fingerprint_file(tree.path("c")));
  EXPECT_EQ(fingerprint_file(tree.path("none")), std::nullopt);
  EXPECT_EQ(fingerprint_file(tree.path()), std::nullopt);
}

TEST(Files, LargeFilesAreSampledUpToTheirEnd) {
  Tree tree;
  const std::string path = tree.path("large");
  const off_t size = (off_t{65} << 20) + 4321;
  { std::ofstream(path) << "start"; }
  ASSERT_EQ(::truncate(path.c_str(), size), 0);
  const auto before = fingerprint_file(path);
  ASSERT_TRUE(before);
  {
    std::fstream file(path, std::ios::in | std::ios::out);
    file.seekp(size - 1);
    file << 'x';
  }
  EXPECT_NE(fingerprint_file(path), before);
}

TEST(Command, TellsHowAProgramEnded) {
  const auto good = run_command({"/bin/sh", "-c", "echo out; echo err >&2; exit 3"}, 30s);
  EXPECT_TRUE(good.started);
  EXPECT_EQ(good.exit_status, 3);
  EXPECT_FALSE(good.succeeded());
  EXPECT_EQ(good.output, "out\nerr\n");
  EXPECT_EQ(run_command({"/bin/sh", "-c", "read line && echo input"}, 30s).output, "");
  EXPECT_FALSE(run_command({"/no/such/program"}, 30s).started);
  EXPECT_FALSE(run_command({}, 30s).started);
  EXPECT_EQ(run_command({"/bin/sh", "-c", "kill -9 $$"}, 30s).exit_status, -1);
}

TEST(Command, KillsWhatTakesTooLong) {
  // One that holds its output open, and one that closes it.
  for (const char* script : {"echo before; exec sleep 1000", "exec >/dev/null 2>&1; exec sleep 1000"}) {
    const auto late = run_command({"/bin/sh", "-c", script}, 200ms);
    EXPECT_TRUE(late.timed_out) << script;
    EXPECT_FALSE(late.succeeded());
  }
}

}  // namespace
}  // namespace lockstep::doctor::gather_test
