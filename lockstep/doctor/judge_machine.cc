#include <algorithm>
#include <cmath>

#include <c10/util/StringUtil.h>

#include <lockstep/base/process/cpu_list.h>
#include <lockstep/base/process/memory.h>
#include <lockstep/base/text/formatted.h>
#include <lockstep/doctor/judge.h>

namespace lockstep::doctor {

namespace {

using namespace thresholds;

void judge_kernel(const Kernel& kernel, Findings& findings) {
  const bool old =
      kernel.major < kKernelMajor || (kernel.major == kKernelMajor && kernel.minor < kKernelMinor);
  if (kernel.major == 0) {
    findings.push_back(warning("kernel", "the kernel's version is unknown: '" + kernel.release + "'",
                               "mount /proc; Lockstep needs Linux 5.4 or newer"));
  } else if (old) {
    findings.push_back(problem("kernel", "Linux " + kernel.release + " is too old",
                               "use Linux 5.4 or newer: Lockstep waits for processes by pidfd"));
  } else {
    findings.push_back(ok("kernel", "Linux " + kernel.release));
  }
  const std::string& clock = kernel.clock_source;
  if (clock == "hpet" || clock == "acpi_pm" || clock == "jiffies" || clock == "refined-jiffies") {
    findings.push_back(warning("clock",
                               "clock source " + clock + ": each look at the time costs microseconds",
                               "see dmesg why tsc was given up; boot with tsc=reliable if it is sound"));
  } else if (!clock.empty()) {
    findings.push_back(ok("clock", "clock source " + clock));
  }
  if (kernel.ptrace_scope.value_or(0) > 0) {
    findings.push_back(note(
        "ptrace",
        "Yama's ptrace_scope is " + std::to_string(*kernel.ptrace_scope) +
            ": gdb -p and py-spy can't look into a rank that hangs, and UCX can't copy between processes",
        "nothing for training; to debug: run the debugger as root, or sysctl kernel.yama.ptrace_scope=0"));
  }
}

void judge_cores(const Cores& cores, Findings& findings) {
  const int online = static_cast<int>(cores.online.size());
  const int allowed = static_cast<int>(cores.allowed.size());
  const std::string text = std::to_string(allowed) + " of " + std::to_string(online) + " cores usable";
  if (allowed == 0) {
    findings.push_back(
        warning("cores", "the usable cores are unknown", "mount /proc and /sys; see nproc and lscpu"));
  } else if (cores.quota && *cores.quota < allowed) {
    findings.push_back(
        warning("cores",
                text + ", but the control group's quota is " + formatted("%.4g", *cores.quota) +
                    ": more ranks and threads than that are stopped for the rest of each period",
                "raise the quota (docker --cpus, Kubernetes limits.cpu), or start at most " +
                    std::to_string(std::max(1, static_cast<int>(std::floor(*cores.quota)))) +
                    " ranks times threads"));
  } else if (allowed == 1) {
    findings.push_back(note("cores", text + ": ranks take turns",
                            "nothing if that is meant; else widen the affinity mask (taskset, cpuset)"));
  } else if (allowed < online) {
    findings.push_back(note("cores", text + " (" + format_cpu_list(cores.allowed) + ") by the affinity mask",
                            "nothing if that is meant; else see taskset, cpuset, docker --cpuset-cpus"));
  } else {
    findings.push_back(ok("cores", text));
  }
}

void judge_topology(const Cores& cores, Findings& findings) {
  const size_t nodes = cores.numa_nodes.size();
  if (nodes > 1) {
    std::vector<std::string> lists;
    for (const auto& node : cores.numa_nodes) lists.push_back(format_cpu_list(node));
    findings.push_back(note("numa", std::to_string(nodes) + " nodes with cores " + c10::Join(", ", lists),
                            "keep each rank on one node, say with numactl --cpunodebind=N --localalloc"));
  } else {
    findings.push_back(ok("numa", nodes == 1 ? "one node" : "not told by the system: one node"));
  }
  const bool halves = cores.smt_active.value_or(false) && cores.physical > 0 &&
                      cores.physical < static_cast<int>(cores.online.size());
  if (halves) {
    findings.push_back(note("smt",
                            std::to_string(cores.online.size()) + " hardware threads on " +
                                std::to_string(cores.physical) + " cores",
                            "ranks times threads beyond " + std::to_string(cores.physical) +
                                " seldom make training faster: measure"));
  } else {
    findings.push_back(ok("smt", "no core is shared by two hardware threads"));
  }
}

void judge_memory(const Memory& memory, Findings& findings) {
  const bool by_group = memory.cgroup_left && *memory.cgroup_left < memory.available;
  const int64_t left = by_group ? *memory.cgroup_left : memory.available;
  const std::string text =
      format_bytes(left) + " left, by " +
      (by_group ? "the control group's limit of " + format_bytes(memory.cgroup_limit.value_or(0))
                : "MemAvailable of " + format_bytes(memory.total));
  const std::string remedy =
      by_group ? "raise the limit (docker --memory, Kubernetes limits.memory), or start fewer ranks"
               : "end other programs, start fewer ranks, or use a machine with more memory";
  if (memory.total == 0) {
    findings.push_back(warning("memory", "/proc/meminfo can't be read", "mount /proc"));
  } else if (left < kMemoryProblem) {
    findings.push_back(problem("memory", text + ": too little for the shared memory of two ranks", remedy));
  } else if (left < kMemoryWarning) {
    findings.push_back(warning("memory", text, remedy));
  } else {
    findings.push_back(ok("memory", text));
  }
}

void judge_shared_memory(const Facts& facts, Findings& findings) {
  const auto judge_probe = [&](const char* check, const Probe& probe, const char* works, const char* remedy) {
    findings.push_back(probe.works ? ok(check, works) : problem(check, probe.error, remedy));
  };
  judge_probe("memfd", facts.memfd, "sealed memory files can be made and mapped",
              "allow memfd_create, mmap and fcntl seals in the sandbox (docker: the default seccomp profile "
              "does)");
  judge_probe("fd passing", facts.fd_passing, "descriptors pass over unix sockets",
              "allow unix sockets with SCM_RIGHTS in the sandbox (seccomp, SELinux, AppArmor)");
  judge_probe("pidfd", facts.pidfd, "processes can be watched",
              "use Linux 5.4 or newer, and allow pidfd_open in the sandbox (old seccomp profiles of Docker "
              "before 20.10 forbid it)");
  const DevShm& shm = facts.dev_shm;
  constexpr const char* kRemedy =
      "nothing for Lockstep; for PyTorch's DataLoader workers and NCCL: docker run --shm-size=8g, or "
      "--ipc=host";
  if (!shm.mounted) {
    findings.push_back(note("/dev/shm", "not mounted; Lockstep does without", kRemedy));
  } else if (shm.size < kDevShmNote || shm.free < kDevShmNote / 2) {
    findings.push_back(note("/dev/shm",
                            format_bytes(shm.free) + " of " + format_bytes(shm.size) +
                                " free; Lockstep does not use it, but other programs do",
                            kRemedy));
  } else {
    findings.push_back(ok("/dev/shm", format_bytes(shm.free) + " of " + format_bytes(shm.size) + " free"));
  }
}

std::string limit_text(const Limit& limit, bool bytes) {
  if (!limit.soft) return "unlimited";
  return bytes ? format_bytes(*limit.soft) : std::to_string(*limit.soft);
}

void judge_open_files(const Limit& limit, Findings& findings) {
  const std::string text = "open files (ulimit -n): " + limit_text(limit, false);
  const bool raisable = !limit.hard || *limit.hard >= kOpenFilesWarning;
  const std::string remedy =
      raisable ? "ulimit -n " + std::to_string(std::min<int64_t>(limit.hard.value_or(65536), 65536))
               : "raise the hard limit (/etc/security/limits.conf, docker --ulimit nofile=65536), then "
                 "ulimit -n 65536";
  if (!limit.soft || *limit.soft >= kOpenFilesWarning) {
    findings.push_back(ok("nofile", text));
  } else if (*limit.soft < kOpenFilesProblem) {
    findings.push_back(problem("nofile", text + "; libraries alone need about that many", remedy));
  } else {
    findings.push_back(
        warning("nofile", text + "; each rank needs some 3 for each peer, and DataLoaders more", remedy));
  }
}

void judge_locked_memory(const Limit& limit, bool rdma, Findings& findings) {
  const std::string text = "locked memory (ulimit -l): " + limit_text(limit, true);
  if (rdma && limit.soft && *limit.soft < kLockedMemoryWarning) {
    findings.push_back(
        warning("memlock", text + "; RDMA hardware can't register more",
                "ulimit -l unlimited (/etc/security/limits.conf: * - memlock unlimited; docker "
                "--ulimit memlock=-1; Slurm: PropagateResourceLimits)"));
  } else {
    findings.push_back(ok("memlock", text + (rdma ? "" : "; matters only with RDMA, which is not here")));
  }
}

void judge_processes(const Limits& limits, Findings& findings) {
  const std::string text = "processes and threads (ulimit -u): " + limit_text(limits.processes, false);
  if (limits.pids_max && *limits.pids_max < kPidsWarning) {
    findings.push_back(warning("nproc",
                               "the control group allows " + std::to_string(*limits.pids_max) +
                                   " processes and threads; a rank has several for each core",
                               "raise it (docker --pids-limit, Kubernetes podPidsLimit)"));
  } else if (limits.processes.soft && *limits.processes.soft < kProcessesWarning) {
    findings.push_back(warning("nproc", text + "; a rank has several threads for each core",
                               "ulimit -u 4096, or raise the hard limit in /etc/security/limits.conf"));
  } else {
    findings.push_back(ok("nproc", text));
  }
}

void judge_limits(const Facts& facts, Findings& findings) {
  const Limits& limits = facts.limits;
  if (!limits.known) {
    findings.push_back(warning("limits", "/proc/self/limits can't be read", "mount /proc; see ulimit -a"));
    return;
  }
  judge_open_files(limits.open_files, findings);
  judge_locked_memory(limits.locked_memory, !facts.ucx.rdma_hardware.empty(), findings);
  judge_processes(limits, findings);
  if (limits.address_space.soft && *limits.address_space.soft < kAddressSpaceWarning) {
    findings.push_back(warning("rlimit as",
                               "address space (ulimit -v): " + limit_text(limits.address_space, true) +
                                   "; every rank maps every peer's memory",
                               "ulimit -v unlimited; bound memory by a control group instead"));
  }
}

void judge_interfaces(const Network& network, Findings& findings) {
  std::vector<std::string> up;
  std::vector<std::string> down;
  bool reachable = false;
  for (const Interface& each : network.interfaces) {
    std::string text = each.name;
    if (each.speed_mbit) text += " (" + std::to_string(*each.speed_mbit) + " Mbit/s)";
    for (const std::string& address : each.addresses) text += " " + address;
    (each.up ? up : down).push_back(text);
    reachable = reachable || (each.up && !each.loopback && !each.addresses.empty());
  }
  std::string text = up.empty() ? "none is up" : "up: " + c10::Join(", ", up);
  if (!down.empty()) text += "; down: " + c10::Join(", ", down);
  if (reachable) {
    if (!network.between_hosts.empty()) text += "; between hosts: " + network.between_hosts;
    findings.push_back(ok("interfaces", text));
  } else {
    findings.push_back(note("interfaces", text + "; other machines can't reach this one",
                            "nothing on one machine; else bring an interface up (ip link, ip addr)"));
  }
}

void judge_network(const Network& network, Findings& findings) {
  judge_interfaces(network, findings);
  findings.push_back(network.loopback_tcp.works
                         ? ok("loopback", "127.0.0.1 answers")
                         : problem("loopback", network.loopback_tcp.error,
                                   "ip link set lo up, and let no firewall stand before 127.0.0.1: launchers "
                                   "meet their ranks there"));
  const auto milliseconds = network.resolution_time.count();
  const bool loopback_only =
      !network.resolved.empty() &&
      std::all_of(network.resolved.begin(), network.resolved.end(),
                  [](const std::string& address) { return address.starts_with("127.") || address == "::1"; });
  if (!network.resolution.works) {
    findings.push_back(warning("hostname",
                               "'" + network.hostname + "' does not resolve: " + network.resolution.error,
                               "put it into /etc/hosts; Gloo and MPI need it, Lockstep on one machine does "
                               "not"));
  } else if (network.resolution_time >= kResolutionWarning) {
    findings.push_back(warning(
        "hostname", "'" + network.hostname + "' took " + std::to_string(milliseconds) + " ms to resolve",
        "put it into /etc/hosts, or mend the name servers in /etc/resolv.conf"));
  } else if (loopback_only) {
    findings.push_back(
        note("hostname",
             "'" + network.hostname + "' is " + c10::Join(", ", network.resolved) +
                 ", which other machines take for themselves",
             "nothing on one machine; else give MASTER_ADDR as an address, or mend /etc/hosts"));
  } else {
    findings.push_back(ok("hostname", "'" + network.hostname + "' is " + c10::Join(", ", network.resolved)));
  }
}

}  // namespace

Findings judge_machine(const Facts& facts) {
  Findings findings;
  judge_kernel(facts.kernel, findings);
  judge_cores(facts.cores, findings);
  judge_topology(facts.cores, findings);
  judge_memory(facts.memory, findings);
  judge_shared_memory(facts, findings);
  judge_limits(facts, findings);
  judge_network(facts.network, findings);
  return findings;
}

}  // namespace lockstep::doctor
