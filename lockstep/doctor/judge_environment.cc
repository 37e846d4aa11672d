#include <algorithm>
#include <set>
#include <string_view>
#include <vector>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <lockstep/base/text/lower_case.h>
#include <lockstep/base/text/parse_number.h>
#include <lockstep/doctor/judge.h>
#include <lockstep/rendezvous/launch_environment.h>
#include <lockstep/rendezvous/network/network_interface.h>
#include <lockstep/rendezvous/network/port_range.h>

namespace lockstep::doctor {
namespace {

using Environment = std::map<std::string, std::string>;

/// Every variable with Lockstep's prefix that is read somewhere; docs/launching.md says what for.
constexpr std::string_view kOwnVariables[] = {
    "LOCKSTEP_AGENT_PORT",
    "LOCKSTEP_AGENT_STORE",
    "LOCKSTEP_ARROW",
    "LOCKSTEP_BENCH_CHANNEL",
    "LOCKSTEP_BIN_DIR",
    "LOCKSTEP_BUILD_DIR",
    "LOCKSTEP_CPU_CAPABILITY",
    "LOCKSTEP_DATASETS",
    "LOCKSTEP_DATA_DIR",
    "LOCKSTEP_EXIT_STATUS_FD",
    "LOCKSTEP_FAILPOINTS",
    "LOCKSTEP_FLIGHT_DIR",
    "LOCKSTEP_FLIGHT_RECORDS",
    "LOCKSTEP_FLIGHT_SIGNAL",
    "LOCKSTEP_FORMER_LD_LIBRARY_PATH",
    "LOCKSTEP_HEARTBEAT_TIMEOUT_SEC",
    "LOCKSTEP_JOBS",
    "LOCKSTEP_JOB_SECRET",
    "LOCKSTEP_LOG",
    "LOCKSTEP_MAX_OBJECT_BYTES",
    "LOCKSTEP_OFFLINE_KIT",
    "LOCKSTEP_OLDEST_TORCH",
    "LOCKSTEP_PORT_RANGE",
    "LOCKSTEP_PROFILE",
    "LOCKSTEP_PYTHON",
    "LOCKSTEP_REPLACE_GLOO",
    "LOCKSTEP_RUN",
    "LOCKSTEP_SEGMENT_MB",
    "LOCKSTEP_SKIP_PACKAGES",
    "LOCKSTEP_SOCKET_IFNAME",
    "LOCKSTEP_FORK_SERVER",
    "LOCKSTEP_SPAWN",
    "LOCKSTEP_STRAGGLERS",
    "LOCKSTEP_SWEEP_PYTHON",
    "LOCKSTEP_TERMINAL_COLUMNS",
    "LOCKSTEP_TEST_DEVICE",
    "LOCKSTEP_TEST_HOST",
    "LOCKSTEP_TEST_HOSTS",
    "LOCKSTEP_TORCH",
    "LOCKSTEP_TRIAL",
    "LOCKSTEP_UCX_LIBRARY",
    "LOCKSTEP_WIRE_MODEL",
};

std::string quoted(const std::string& name, const std::string& value) {
  return name + " is '" + value + "'";
}

/// A variable that takes one of some words, in any case where torch does so too. Others end a program.
void judge_word(const Environment& environment, const std::string& name,
                std::initializer_list<std::string_view> words, Findings& findings) {
  const std::string* value = value_of(environment, name);
  if (value == nullptr) return;
  const std::string text = name.starts_with("TORCH_") ? lower_case(*value) : *value;
  if (std::find(words.begin(), words.end(), text) != words.end()) return;
  findings.push_back(problem("variables", quoted(name, *value),
                             "set it to one of " + c10::Join(", ", words) + ", or unset it"));
}

void judge_number(const Environment& environment, const std::string& name, int64_t low, int64_t high,
                  Findings& findings) {
  const std::string* value = value_of(environment, name);
  if (value == nullptr) return;
  const auto number = parse_number<int64_t>(*value);
  if (number && *number >= low && *number <= high) return;
  findings.push_back(problem(
      "variables", quoted(name, *value),
      "set it to a number from " + std::to_string(low) + " to " + std::to_string(high) + ", or unset it"));
}

/// Letters to change, insert or delete to get from one word to the other (Levenshtein).
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t change = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({change, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

void judge_own_variables(const Environment& environment, Findings& findings) {
  judge_word(environment, "LOCKSTEP_LOG", {"error", "warning", "info", "debug"}, findings);
  // As python/lockstep/_autoload.py reads it.
  judge_word(environment, "LOCKSTEP_REPLACE_GLOO", {"1", "0", "true", "false", "yes", "no", "on", "off"},
             findings);
  judge_word(environment, "LOCKSTEP_CPU_CAPABILITY", {"default", "avx2", "avx512"}, findings);
  judge_number(environment, "LOCKSTEP_SEGMENT_MB", 1, 1 << 20, findings);
  judge_number(environment, "LOCKSTEP_FLIGHT_RECORDS", 0, 50000, findings);
  judge_number(environment, "LOCKSTEP_STRAGGLERS", 0, 1, findings);
  judge_number(environment, "LOCKSTEP_HEARTBEAT_TIMEOUT_SEC", 1, 86400, findings);
  if (const auto* value = value_of(environment, "LOCKSTEP_FAILPOINTS")) {
    findings.push_back(warning("variables",
                               quoted("LOCKSTEP_FAILPOINTS", *value) + ": something goes wrong on purpose",
                               "unset it outside of tests"));
  }
  for (const auto& [name, value] : environment) {
    if (!name.starts_with("LOCKSTEP_") || name.starts_with("LOCKSTEP_TEST_")) continue;  // the tests' own
    if (std::find(std::begin(kOwnVariables), std::end(kOwnVariables), name) != std::end(kOwnVariables))
      continue;
    const auto nearest =
        std::min_element(std::begin(kOwnVariables), std::end(kOwnVariables),
                         [&](auto a, auto b) { return distance(name, a) < distance(name, b); });
    const bool near = distance(name, *nearest) <= 3;
    findings.push_back(warning("variables", "Lockstep does not read " + name,
                               near ? "write " + std::string(*nearest) + ", or unset it" : "unset it"));
  }
}

void judge_launcher(const Environment& environment, Findings& findings) {
  try {
    const auto lookup = [&](const char* name) {
      const auto* value = value_of(environment, name);
      return value == nullptr ? std::nullopt : std::optional<std::string>(*value);
    };
    const LaunchEnvironment place = read_launch_environment(lookup);
    if (place.rank < 0) {
      const bool half =
          value_of(environment, "MASTER_ADDR") != nullptr || value_of(environment, "RANK") != nullptr;
      if (half) {
        findings.push_back(
            warning("launcher",
                    "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT belong together, but only some "
                    "are set",
                    "unset them and start programs with lockstep run, or set all four"));
      } else {
        findings.push_back(ok("launcher", "no launcher started this process"));
      }
      return;
    }
    const auto* missing = std::get_if<NoMeeting>(&place.meeting);
    if (missing != nullptr) {
      findings.push_back(problem("launcher", "rank " + std::to_string(place.rank) + ": " + missing->reason,
                                 "start programs with lockstep run"));
      return;
    }
    findings.push_back(note("launcher",
                            "this is rank " + std::to_string(place.rank) + " of " +
                                std::to_string(place.world_size) + ", started by " + place.launcher,
                            "lockstep doctor --job checks the job itself"));
  } catch (const c10::Error& error) {
    findings.push_back(problem("launcher", error.what_without_backtrace(),
                               "set the variable as launchers do, or unset it and use lockstep run"));
  }
}

void judge_threads(const Facts& facts, Findings& findings) {
  const int64_t cores = std::max<int64_t>(1, static_cast<int64_t>(facts.cores.allowed.size()));
  const auto* value = value_of(facts.environment, "OMP_NUM_THREADS");
  if (value == nullptr) {
    findings.push_back(
        note("threads",
             "OMP_NUM_THREADS is unset: every process computes with " + std::to_string(cores) + " threads",
             "nothing under lockstep run and torchrun, which set 1; else set it to cores "
             "divided by ranks"));
    return;
  }
  const auto threads =
      parse_number<int64_t>(value->substr(0, value->find(',')));  // a list is for nested regions
  if (!threads || *threads < 1) {
    findings.push_back(
        warning("threads", quoted("OMP_NUM_THREADS", *value), "set it to a number from 1 on, or unset it"));
  } else if (*threads > cores) {
    findings.push_back(warning("threads",
                               quoted("OMP_NUM_THREADS", *value) + ", but only " + std::to_string(cores) +
                                   " cores are usable: threads wait for each other's turns",
                               "set it to cores divided by ranks"));
  } else {
    findings.push_back(ok("threads", quoted("OMP_NUM_THREADS", *value)));
  }
}

/// Variables that pin threads to numbered cores do so in every rank alike.
void judge_pinning(const Environment& environment, Findings& findings) {
  for (const char* name : {"GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES"}) {
    const auto* value = value_of(environment, name);
    if (value == nullptr) continue;
    const std::string lower = lower_case(*value);
    if (lower == "false" || lower == "none" || lower == "disabled") continue;
    findings.push_back(warning(
        "variables",
        quoted(name, *value) + ": with several ranks on a machine all bind their threads to the same cores",
        "unset it, or give each rank a mask of its own (taskset, numactl)"));
  }
}

/// Two variables that name an interface for other libraries.
void judge_interface_names(const Facts& facts, Findings& findings) {
  for (const char* name : {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}) {
    const auto* value = value_of(facts.environment, name);
    if (value == nullptr || value->starts_with("^")) continue;
    const std::string list = value->substr(value->starts_with("=") ? 1 : 0);
    const std::string wanted = list.substr(0, list.find(','));
    const bool exact = value->starts_with("=") || std::string_view(name).starts_with("GLOO");
    const bool found = std::any_of(
        facts.network.interfaces.begin(), facts.network.interfaces.end(),
        [&](const Interface& each) { return exact ? each.name == wanted : each.name.starts_with(wanted); });
    if (found) continue;
    findings.push_back(warning("variables", quoted(name, *value) + ", and there is no such interface here",
                               "name one of those above, or unset it"));
  }
}

/// What Lockstep itself reads for jobs over several hosts.
void judge_wire_variables(const Facts& facts, Findings& findings) {
  if (const auto* value = value_of(facts.environment, "LOCKSTEP_SOCKET_IFNAME")) {
    std::vector<NetworkInterface> interfaces;
    for (const Interface& each : facts.network.interfaces) {
      for (const std::string& address : each.addresses) {
        interfaces.push_back(
            {.name = each.name, .address = address, .is_up = each.up, .is_loopback = each.loopback});
      }
    }
    try {
      choose_interface(interfaces, InterfaceWish{.variable = "LOCKSTEP_SOCKET_IFNAME", .value = *value}, "");
    } catch (const c10::Error& error) {
      findings.push_back(warning("variables", error.what_without_backtrace(),
                                 "name one that is up, or unset it: no job over several hosts starts here"));
    }
  }
  if (const auto* value = value_of(facts.environment, "LOCKSTEP_PORT_RANGE")) {
    try {
      PortRange::parse(*value);
    } catch (const c10::Error& error) {
      findings.push_back(problem("variables", error.what_without_backtrace(), "mend it, or unset it"));
    }
  }
}

}  // namespace

Findings judge_environment(const Facts& facts) {
  Findings findings;
  judge_launcher(facts.environment, findings);
  judge_threads(facts, findings);
  judge_own_variables(facts.environment, findings);
  judge_word(facts.environment, "TORCH_DISTRIBUTED_DEBUG", {"off", "info", "detail"}, findings);
  judge_pinning(facts.environment, findings);
  judge_interface_names(facts, findings);
  judge_wire_variables(facts, findings);
  const auto visible = facts.environment.find("CUDA_VISIBLE_DEVICES");
  if (visible != facts.environment.end() && (visible->second.empty() || visible->second.starts_with("-"))) {
    findings.push_back(note("variables",
                            quoted("CUDA_VISIBLE_DEVICES", visible->second) + ": GPUs are hidden",
                            "unset it if GPUs are wanted"));
  }
  return findings;
}

}  // namespace lockstep::doctor
