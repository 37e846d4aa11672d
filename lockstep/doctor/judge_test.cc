#include <functional>
#include <gmock/gmock.h>

#include <gtest/gtest.h>

#include <lockstep/doctor/judge.h>

// Each finding is provoked by changing one thing of a healthy machine.
namespace lockstep::doctor::judge_test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kGiB = 1 << 30;

Facts healthy() {
  Facts facts;
  facts.software = {.lockstep_version = "0.1.0",
                    .lockstep_path = "/usr/lib/liblockstep.so",
                    .torch_compiled = "2.13.0",
                    .torch_loaded = "2.13.0",
                    .torch_path = "/torch/lib/libtorch_cpu.so",
                    .torch_cuda = "13.0",
                    .torch_commit = "abc",
                    .built_with = "g++ 12.2.0",
                    .compilers = {{"/usr/bin/c++", "12.2.0", true}}};
  facts.kernel = {.release = "6.1.0-13", .major = 6, .minor = 1, .clock_source = "tsc", .ptrace_scope = 0};
  facts.cores = {.online = {0, 1, 2, 3},
                 .allowed = {0, 1, 2, 3},
                 .quota = {},
                 .numa_nodes = {{0, 1, 2, 3}},
                 .smt_active = false,
                 .physical = 4};
  facts.memory = {.total = 16 * kGiB, .available = 12 * kGiB, .cgroup_limit = {}, .cgroup_left = {}};
  facts.limits = {.known = true,
                  .open_files = {1 << 20, 1 << 20},
                  .locked_memory = {8 * kMiB, 8 * kMiB},
                  .processes = {60000, 60000},
                  .address_space = {},
                  .pids_max = {}};
  facts.dev_shm = {.mounted = true, .size = 8 * kGiB, .free = 8 * kGiB};
  facts.memfd = facts.fd_passing = facts.pidfd = {true, ""};
  facts.network.interfaces = {{"lo", true, true, {}, {"127.0.0.1"}},
                              {"eth0", true, false, 1000, {"10.0.0.5"}}};
  facts.network.loopback_tcp = {true, ""};
  facts.network.hostname = "box";
  facts.network.resolution = {true, ""};
  facts.network.resolved = {"10.0.0.5"};
  facts.network.between_hosts = "eth0";
  facts.ucx.engine = "UCX 1.13.1 (tcp/eth0)";
  facts.environment = {{"OMP_NUM_THREADS", "2"}};
  return facts;
}

TEST(Judge, AHealthyMachineHasNothingButOks) {
  for (const Finding& finding : judge(healthy())) {
    EXPECT_EQ(finding.severity, Severity::kOk) << finding.check << ": " << finding.message;
    EXPECT_EQ(finding.remedy, "");
    EXPECT_NE(finding.message, "");
  }
}

struct Case {
  const char* name;
  std::function<void(Facts&)> change;
  Severity severity;
  const char* check;
  const char* message;  // part of it
  const char* remedy;   // part of it
};

void PrintTo(const Case& each, std::ostream* out) {
  *out << each.name;
}

class JudgeTable : public ::testing::TestWithParam<Case> {};

TEST_P(JudgeTable, FindsItAndNothingElse) {
  const Case& each = GetParam();
  Facts facts = healthy();
  each.change(facts);
  int found = 0;
  for (const Finding& finding : judge(facts)) {
    if (finding.severity == Severity::kOk) continue;
    ++found;
    EXPECT_STREQ(severity_name(finding.severity), severity_name(each.severity)) << finding.message;
    EXPECT_EQ(finding.check, each.check);
    EXPECT_THAT(finding.message, HasSubstr(each.message));
    EXPECT_THAT(finding.remedy, HasSubstr(each.remedy));
    EXPECT_NE(finding.remedy, "");
  }
  EXPECT_EQ(found, 1);
}

auto set_variable(const char* name, const char* value) {
  return [=](Facts& facts) { facts.environment[name] = value; };
}

const Severity kNote = Severity::kNote;
const Severity kWarning = Severity::kWarning;
const Severity kProblem = Severity::kProblem;

INSTANTIATE_TEST_SUITE_P(
    Software, JudgeTable,
    ::testing::Values(
        Case{"other torch", [](Facts& f) { f.software.torch_loaded = "2.12.0"; }, kProblem, "torch",
             "compiled for 2.13.0 but runs with 2.12.0 from /torch", "build Lockstep anew"},
        Case{"other major", [](Facts& f) { f.software.torch_loaded = "3.13.0"; }, kProblem, "torch", "3.13.0",
             "anew"},
        Case{"old torch", [](Facts& f) { f.software.torch_compiled = f.software.torch_loaded = "2.10.1"; },
             kProblem, "torch", "2.10.1", "2.11"},
        Case{"other patch", [](Facts& f) { f.software.torch_loaded = "2.13.1"; }, kWarning, "torch", "2.13.1",
             "anew"},
        Case{"nameless torch", [](Facts& f) { f.software.torch_loaded = ""; }, kProblem, "torch", "/torch",
             "LD_LIBRARY_PATH"},
        Case{"no compiler", [](Facts& f) { f.software.compilers.clear(); }, kNote, "compiler",
             "no C++ compiler", "g++"},
        Case{"old compiler", [](Facts& f) { f.software.compilers[0].version = "10.2.1"; }, kWarning,
             "compiler", "/usr/bin/c++ 10.2.1", "g++ 11"},
        Case{"no ucx", [](Facts& f) { f.ucx = {.missing = "install the package libucx0"}; }, kNote, "ucx",
             "libucx0", "nothing on one machine"},
        Case{"no ucx device", [](Facts& f) { f.ucx = {.error = "no such device"}; }, kWarning, "ucx",
             "no such device", "LOCKSTEP_SOCKET_IFNAME"},
        Case{"unused rdma",
             [](Facts& f) {
               f.ucx.engine = "UCX 1.22.0 (tcp/eth0, rc_verbs/mlx5_0:1)";
               f.ucx.rdma_hardware = {"mlx5_0", "mlx5_1"};
               f.limits.locked_memory = {};
             },
             kNote, "ucx", "the RDMA devices that are here: mlx5_1", "UCX_NET_DEVICES"},
        Case{"driver without device", [](Facts& f) { f.gpu.driver = "550.54"; }, kWarning, "gpu", "550.54",
             "--gpus all"},
        Case{"smi fails",
             [](Facts& f) {
               f.gpu.device_files = 1;
               f.gpu.smi_error = "Driver/library version mismatch";
             },
             kWarning, "gpu", "version mismatch", "reboot"},
        Case{"no libcuda",
             [](Facts& f) {
               f.gpu.device_files = 2;
               f.gpu.cuda_error = "libcuda.so.1: cannot open";
             },
             kWarning, "gpu", "2 NVIDIA device(s), but libcuda.so.1: cannot open",
             "NVIDIA_DRIVER_CAPABILITIES"},
        Case{"cuda error",
             [](Facts& f) {
               f.gpu.device_files = 1;
               f.gpu.cuda_library = true;
               f.gpu.cuda_error = "the driver answers with CUDA error 803";
             },
             kWarning, "gpu", "803", "one version"},
        Case{"no access",
             [](Facts& f) {
               f.gpu.device_files = 1;
               f.gpu.cuda_library = true;
               f.gpu.cuda_devices = 0;
             },
             kNote, "gpu", "none of which CUDA offers", "access"},
        Case{"cpu build",
             [](Facts& f) {
               f.gpu = {.device_files = 1, .driver = "550.54", .cuda_library = true, .cuda_devices = 1};
               f.software.torch_cuda = "";
             },
             kNote, "gpu", "torch is a CPU build", "CUDA build"}));

INSTANTIATE_TEST_SUITE_P(
    Machine, JudgeTable,
    ::testing::Values(
        Case{"old kernel",
             [](Facts& f) {
               f.kernel = {"5.3.0", 5, 3, "tsc", 0};
             },
             kProblem, "kernel", "5.3.0", "5.4"},
        Case{"ancient kernel",
             [](Facts& f) {
               f.kernel = {"4.19.0", 4, 19, "tsc", 0};
             },
             kProblem, "kernel", "4.19", "5.4"},
        Case{"unknown kernel",
             [](Facts& f) {
               f.kernel = {"", 0, 0, "", {}};
             },
             kWarning, "kernel", "unknown", "/proc"},
        Case{"slow clock", [](Facts& f) { f.kernel.clock_source = "hpet"; }, kWarning, "clock", "hpet",
             "tsc"},
        Case{"yama", [](Facts& f) { f.kernel.ptrace_scope = 1; }, kNote, "ptrace", "gdb -p",
             "ptrace_scope=0"},
        Case{"affinity",
             [](Facts& f) {
               f.cores.allowed = {0, 1, 3};
             },
             kNote, "cores", "3 of 4 cores usable (0-1,3)", "taskset"},
        Case{"one core",
             [](Facts& f) {
               f.cores.allowed = {2};
               f.environment["OMP_NUM_THREADS"] = "1";
             },
             kNote, "cores", "1 of 4", "taskset"},
        Case{"quota", [](Facts& f) { f.cores.quota = 1.5; }, kWarning, "cores", "quota is 1.5", "at most 1 "},
        Case{"numa",
             [](Facts& f) {
               f.cores.numa_nodes = {{0, 1}, {2, 3}};
             },
             kNote, "numa", "2 nodes with cores 0-1, 2-3", "numactl"},
        Case{"smt",
             [](Facts& f) {
               f.cores.smt_active = true;
               f.cores.physical = 2;
             },
             kNote, "smt", "4 hardware threads on 2 cores", "beyond 2"},
        Case{"little memory", [](Facts& f) { f.memory.available = kGiB; }, kWarning, "memory", "1.0 GiB left",
             "fewer ranks"},
        Case{"no memory", [](Facts& f) { f.memory.available = 100 * kMiB; }, kProblem, "memory", "100.0 MiB",
             "fewer ranks"},
        Case{"group's memory",
             [](Facts& f) {
               f.memory.cgroup_limit = 2 * kGiB;
               f.memory.cgroup_left = kGiB;
             },
             kWarning, "memory", "control group's limit of 2.0 GiB", "docker --memory"},
        Case{"no meminfo", [](Facts& f) { f.memory = {}; }, kWarning, "memory", "/proc/meminfo", "mount"},
        Case{"no memfd",
             [](Facts& f) {
               f.memfd = {false, "memfd_create: EPERM"};
             },
             kProblem, "memfd", "EPERM", "seccomp"},
        Case{"no passing",
             [](Facts& f) {
               f.fd_passing = {false, "sendmsg: EPERM"};
             },
             kProblem, "fd passing", "sendmsg", "SCM_RIGHTS"},
        Case{"no pidfd",
             [](Facts& f) {
               f.pidfd = {false, "pidfd_open: ENOSYS"};
             },
             kProblem, "pidfd", "ENOSYS", "5.4"},
        Case{"docker's shm",
             [](Facts& f) {
               f.dev_shm = {true, 64 * kMiB, 64 * kMiB};
             },
             kNote, "/dev/shm", "64.0 MiB of 64.0 MiB", "--shm-size"},
        Case{"full shm", [](Facts& f) { f.dev_shm.free = kMiB; }, kNote, "/dev/shm", "1.0 MiB of 8.0 GiB",
             "--shm-size"},
        Case{"no shm", [](Facts& f) { f.dev_shm = {}; }, kNote, "/dev/shm", "not mounted", "--shm-size"},
        Case{"few files", [](Facts& f) { f.limits.open_files = {256, 4096}; }, kWarning, "nofile", "256",
             "ulimit -n 4096"},
        Case{"few files, hard", [](Facts& f) { f.limits.open_files = {256, 256}; }, kWarning, "nofile", "256",
             "limits.conf"},
        Case{"no files", [](Facts& f) { f.limits.open_files = {20, 20}; }, kProblem, "nofile", "20",
             "nofile=65536"},
        Case{"memlock",
             [](Facts& f) {
               f.ucx.engine = "UCX 1.13.1 (tcp/eth0, rc_verbs/mlx5_0:1)";
               f.ucx.rdma_hardware = {"mlx5_0"};
             },
             kWarning, "memlock", "8.0 MiB; RDMA", "ulimit -l unlimited"},
        Case{
            "few processes",
            [](Facts& f) {
              f.limits.processes = {200, 200};
            },
            kWarning, "nproc", "200", "ulimit -u"},
        Case{"few pids", [](Facts& f) { f.limits.pids_max = 100; }, kWarning, "nproc", "100", "--pids-limit"},
        Case{"address space", [](Facts& f) { f.limits.address_space = {4 * kGiB, {}}; }, kWarning,
             "rlimit as", "4.0 GiB", "ulimit -v unlimited"},
        Case{"no limits", [](Facts& f) { f.limits = {}; }, kWarning, "limits", "/proc/self/limits",
             "ulimit -a"}));

INSTANTIATE_TEST_SUITE_P(
    Network, JudgeTable,
    ::testing::Values(Case{"only loopback", [](Facts& f) { f.network.interfaces.pop_back(); }, kNote,
                           "interfaces", "up: lo 127.0.0.1; other machines", "ip link"},
                      Case{"interface down", [](Facts& f) { f.network.interfaces[1].up = false; }, kNote,
                           "interfaces", "down: eth0 (1000 Mbit/s) 10.0.0.5", "ip link"},
                      Case{"loopback",
                           [](Facts& f) {
                             f.network.loopback_tcp = {false, "connect: timed out"};
                           },
                           kProblem, "loopback", "timed out", "ip link set lo up"},
                      Case{"no name",
                           [](Facts& f) {
                             f.network.resolution = {false, "Name or service not known"};
                           },
                           kWarning, "hostname", "'box' does not resolve: Name", "/etc/hosts"},
                      Case{"slow name",
                           [](Facts& f) { f.network.resolution_time = std::chrono::milliseconds(4000); },
                           kWarning, "hostname", "4000 ms", "resolv.conf"},
                      Case{"loopback name",
                           [](Facts& f) {
                             f.network.resolved = {"127.0.1.1", "::1"};
                           },
                           kNote, "hostname", "127.0.1.1, ::1", "MASTER_ADDR"}));

INSTANTIATE_TEST_SUITE_P(
    Variables, JudgeTable,
    ::testing::Values(
        Case{"no threads", [](Facts& f) { f.environment.clear(); }, kNote, "threads", "with 4 threads",
             "lockstep run"},
        Case{"threads", set_variable("OMP_NUM_THREADS", "8"), kWarning, "threads", "only 4 cores",
             "divided by ranks"},
        Case{"odd threads", set_variable("OMP_NUM_THREADS", "two"), kWarning, "threads", "'two'", "number"},
        Case{"no such thread", set_variable("OMP_NUM_THREADS", "0"), kWarning, "threads", "'0'", "number"},
        Case{"replace_gloo", set_variable("LOCKSTEP_REPLACE_GLOO", "maybe"), kProblem, "variables",
             "LOCKSTEP_REPLACE_GLOO is 'maybe'", "set it to one of 1, 0, true, false, yes, no, on, off"},
        Case{"log", set_variable("LOCKSTEP_LOG", "loud"), kProblem, "variables", "LOCKSTEP_LOG is 'loud'",
             "error, warning, info, debug"},
        Case{"capability", set_variable("LOCKSTEP_CPU_CAPABILITY", "sse"), kProblem, "variables", "'sse'",
             "avx2"},
        Case{"segment", set_variable("LOCKSTEP_SEGMENT_MB", "64M"), kProblem, "variables", "'64M'",
             "1048576"},
        Case{"segment 0", set_variable("LOCKSTEP_SEGMENT_MB", "0"), kProblem, "variables", "'0'", "1048576"},
        Case{"heartbeat", set_variable("LOCKSTEP_HEARTBEAT_TIMEOUT_SEC", "1.5"), kProblem, "variables", "'1.5'",
             "86400"},
        Case{"flight", set_variable("LOCKSTEP_FLIGHT_RECORDS", "50001"), kProblem, "variables", "'50001'",
             "0 to 50000"},
        Case{"failpoints", set_variable("LOCKSTEP_FAILPOINTS", "announce=kill(9)"), kWarning, "variables",
             "on purpose", "unset"},
        Case{"misspelt", set_variable("LOCKSTEP_SEGMENTS_MB", "1"), kWarning, "variables",
             "does not read LOCKSTEP_SEGMENTS_MB", "write LOCKSTEP_SEGMENT_MB"},
        Case{"unknown", set_variable("LOCKSTEP_MAKE_COFFEE", "1"), kWarning, "variables",
             "LOCKSTEP_MAKE_COFFEE", "unset"},
        Case{"debug", set_variable("TORCH_DISTRIBUTED_DEBUG", "1"), kProblem, "variables", "'1'",
             "off, info, detail"},
        Case{"binding", set_variable("OMP_PROC_BIND", "true"), kWarning, "variables", "same cores",
             "taskset"},
        Case{"kmp", set_variable("KMP_AFFINITY", "granularity=fine,compact"), kWarning, "variables",
             "same cores", "taskset"},
        Case{"gloo", set_variable("GLOO_SOCKET_IFNAME", "eth7"), kWarning, "variables", "'eth7'", "unset"},
        Case{"nccl", set_variable("NCCL_SOCKET_IFNAME", "=ib0,eth0"), kWarning, "variables", "'=ib0,eth0'",
             "unset"},
        Case{"interface", set_variable("LOCKSTEP_SOCKET_IFNAME", "eth7"), kWarning, "variables",
             "no interface that is up fits it", "unset"},
        Case{"ports", set_variable("LOCKSTEP_PORT_RANGE", "many"), kProblem, "variables", "'many'", "unset"},
        Case{"hidden gpus", set_variable("CUDA_VISIBLE_DEVICES", ""), kNote, "variables", "hidden", "unset"},
        Case{"half a launcher", set_variable("MASTER_ADDR", "localhost"), kWarning, "launcher", "only some",
             "lockstep run"},
        Case{"odd rank",
             [](Facts& f) {
               f.environment["RANK"] = "first";
               f.environment["WORLD_SIZE"] = "2";
             },
             kProblem, "launcher", "first", "lockstep run"},
        Case{"nowhere to meet",
             [](Facts& f) {
               f.environment["RANK"] = "0";
               f.environment["WORLD_SIZE"] = "2";
             },
             kProblem, "launcher", "rank 0", "lockstep run"},
        Case{"within a job",
             [](Facts& f) {
               f.environment["RANK"] = "1";
               f.environment["WORLD_SIZE"] = "2";
               f.environment["MASTER_ADDR"] = "127.0.0.1";
               f.environment["MASTER_PORT"] = "29500";
             },
             kNote, "launcher", "rank 1 of 2", "--job"}));

class Harmless : public ::testing::TestWithParam<std::pair<const char*, const char*>> {};

TEST_P(Harmless, IsFine) {
  Facts facts = healthy();
  facts.environment[GetParam().first] = GetParam().second;
  for (const Finding& finding : judge(facts)) EXPECT_EQ(finding.severity, Severity::kOk) << finding.message;
}

INSTANTIATE_TEST_SUITE_P(
    Variables, Harmless,
    ::testing::Values(std::pair("LOCKSTEP_LOG", ""), std::pair("LOCKSTEP_LOG", "debug"),
                      std::pair("TORCH_DISTRIBUTED_DEBUG", "INFO"), std::pair("OMP_PROC_BIND", "FALSE"),
                      std::pair("OMP_NUM_THREADS", "4,2"), std::pair("NCCL_SOCKET_IFNAME", "eth"),
                      std::pair("NCCL_SOCKET_IFNAME", "^docker0"), std::pair("GLOO_SOCKET_IFNAME", "eth0"),
                      std::pair("LOCKSTEP_SOCKET_IFNAME", "eth"),
                      std::pair("LOCKSTEP_PORT_RANGE", "20000-20100"),
                      std::pair("CUDA_VISIBLE_DEVICES", "0,1")));

TEST(Judge, SaysWhichGpusThereAre) {
  Facts facts = healthy();
  facts.gpu = {.device_files = 1,
               .driver = "550.54",
               .cuda_library = true,
               .cuda_devices = 1,
               .smi_names = {"NVIDIA H200, 143771 MiB"}};
  for (const Finding& finding : judge(facts)) {
    if (finding.check != "gpu") continue;
    EXPECT_EQ(finding.severity, Severity::kOk);
    EXPECT_THAT(finding.message, HasSubstr("1 CUDA device(s), driver 550.54: NVIDIA H200"));
  }
}

}  // namespace
}  // namespace lockstep::doctor::judge_test
