#include <algorithm>
#include <functional>
#include <limits>
#include <set>
#include <sstream>

#include <lockstep/base/process/cpu_list.h>
#include <lockstep/base/ranks.h>
#include <lockstep/base/text/counted.h>
#include <lockstep/base/text/formatted.h>
#include <lockstep/base/text/parse_number.h>
#include <lockstep/doctor/internal/median.h>
#include <lockstep/doctor/judge_job.h>

namespace lockstep::doctor {

using internal::median;

namespace {

using Ranks = std::vector<const RankFacts*>;

std::vector<int> numbers(const Ranks& ranks) {
  std::vector<int> result;
  for (const RankFacts* facts : ranks) result.push_back(facts->rank);
  return result;
}

/// Ranks with the same text together, in the order of their first ranks.
std::vector<std::pair<std::string, Ranks>> group_by(
    const Ranks& ranks, const std::function<std::string(const RankFacts&)>& text) {
  std::vector<std::pair<std::string, Ranks>> groups;
  for (const RankFacts* facts : ranks) {
    const std::string key = text(*facts);
    auto found =
        std::find_if(groups.begin(), groups.end(), [&](const auto& each) { return each.first == key; });
    if (found == groups.end()) found = groups.insert(groups.end(), {key, {}});
    found->second.push_back(facts);
  }
  return groups;
}

/// "ranks 0-2: 0.1.0, rank 3: 0.2.0"; in a job over several hosts "rank 3 on node-b: 0.2.0".
std::string tell_groups(const std::vector<std::pair<std::string, Ranks>>& groups) {
  std::set<std::string> hosts;
  for (const auto& [value, ranks] : groups) {
    for (const RankFacts* facts : ranks) hosts.insert(facts->host);
  }
  std::string text;
  for (const auto& [value, ranks] : groups) {
    text += (text.empty() ? "" : ", ") + name_ranks(numbers(ranks));
    if (hosts.size() > 1) {
      const auto by_host = group_by(ranks, [](const RankFacts& facts) { return facts.host; });
      text += " on ";
      for (size_t i = 0; i < by_host.size(); ++i)
        text += (i > 0 ? ", " : "") + by_host[i].second.front()->hostname;
    }
    text += ": " + value;
  }
  return text;
}

void judge_hosts(const Ranks& ranks, Findings& findings) {
  const auto hosts = group_by(ranks, [](const RankFacts& facts) { return facts.host; });
  std::string text;
  for (const auto& [host, there] : hosts) {
    text += (text.empty() ? "" : ", ") + there.front()->hostname + " (" + name_ranks(numbers(there)) + ")";
  }
  if (hosts.size() == 1) {
    findings.push_back(ok("hosts", std::to_string(ranks.size()) + " rank(s) on " + text));
  } else {
    findings.push_back(
        note("hosts", "the ranks are on several hosts, or in containers that count as such: " + text,
             "nothing, if it is meant: they pass messages over the network, and share memory within "
             "each host"));
  }
  const auto users = group_by(ranks, [](const RankFacts& facts) { return std::to_string(facts.user); });
  const bool shared = std::any_of(hosts.begin(), hosts.end(), [](const auto& host) {
    return std::any_of(host.second.begin(), host.second.end(),
                       [&](const auto* facts) { return facts->user != host.second.front()->user; });
  });
  if (users.size() > 1 && shared) {
    findings.push_back(problem("users", "ranks of one host run as different users: " + tell_groups(users),
                               "run all as one user: ranks share memory"));
  }
  const auto models = group_by(ranks, [](const RankFacts& facts) { return facts.cpu; });
  if (models.size() > 1) {
    findings.push_back(
        note("cpu", "processors differ: " + tell_groups(models), "nothing; the slowest rank sets the pace"));
  }
}

std::string shown(const std::string& name, const std::string& fingerprint) {
  return name + " (" + (fingerprint.empty() ? "unreadable" : fingerprint) + ")";
}

void judge_versions(const Ranks& ranks, Findings& findings) {
  const auto compare = [&](const char* what, const std::function<std::string(const RankFacts&)>& identity,
                           const std::function<std::string(const RankFacts&)>& display, const char* remedy) {
    auto groups = group_by(ranks, identity);
    if (groups.size() > 1) {
      for (auto& [text, there] : groups) text = display(*there.front());
      findings.push_back(problem("versions", std::string(what) + " differs: " + tell_groups(groups), remedy));
    }
    return groups.size() == 1;
  };
  bool equal = compare(
      "Lockstep",
      [](const RankFacts& facts) { return shown(facts.lockstep_version, facts.lockstep_fingerprint); },
      [](const RankFacts& facts) { return shown(facts.lockstep_version, facts.lockstep_fingerprint); },
      "install the same build of Lockstep for all ranks, and see LD_LIBRARY_PATH");
  equal &= compare(
      "torch", [](const RankFacts& facts) { return shown(facts.torch_version, facts.torch_fingerprint); },
      [](const RankFacts& facts) { return shown(facts.torch_version, facts.torch_fingerprint); },
      "install the same torch for all ranks, and see LD_LIBRARY_PATH");
  equal &= compare(
      "the lockstep program", [](const RankFacts& facts) { return facts.executable_fingerprint; },
      [](const RankFacts& facts) { return shown(facts.executable, facts.executable_fingerprint); },
      "copy one build to all hosts");
  equal &= compare(
      "the program", [](const RankFacts& facts) { return facts.program_fingerprint; },
      [](const RankFacts& facts) { return shown(facts.program, facts.program_fingerprint); },
      "copy one build to all hosts, and build on one of them only");
  if (!equal) return;
  const RankFacts& first = *ranks.front();
  const std::string program = first.program.empty() ? "" : ", " + first.program;
  if (!first.program.empty() && first.program_fingerprint.empty()) {
    findings.push_back(problem("versions", "no rank can read " + first.program,
                               "give --program a path that is right in every rank's working directory"));
    return;
  }
  findings.push_back(ok("versions", "all ranks have the same Lockstep " + first.lockstep_version +
                                        ", torch " + first.torch_version + program));
}

/// How many threads a rank computes with.
size_t threads_of(const RankFacts& facts) {
  const auto set = facts.environment.find("OMP_NUM_THREADS");
  if (set != facts.environment.end()) {
    const auto number = parse_number<int64_t>(set->second.substr(0, set->second.find(',')));
    if (number.value_or(0) > 0) return static_cast<size_t>(*number);
  }
  return std::max<size_t>(1, facts.cores.size());
}

/// More ranks than cores in a set of cores from which they can't get out.
std::optional<Finding> find_crowding(const Ranks& ranks) {
  std::vector<std::vector<int>> masks;
  for (const RankFacts* facts : ranks) masks.push_back(facts->cores);
  std::sort(masks.begin(), masks.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); });
  for (const auto& mask : masks) {
    Ranks inside;
    for (const RankFacts* facts : ranks) {
      if (std::includes(mask.begin(), mask.end(), facts->cores.begin(), facts->cores.end())) {
        inside.push_back(facts);
      }
    }
    if (mask.empty() || inside.size() <= mask.size()) continue;
    const bool one = mask.size() == 1;
    const std::string cores = std::string(one ? "core " : "cores ") + format_cpu_list(mask);
    if (mask.size() < ranks.front()->host_cores.size()) {
      return problem("cores",
                     name_ranks(numbers(inside)) + " on " + ranks.front()->hostname + " share " + cores +
                         ", though the host has " + std::to_string(ranks.front()->host_cores.size()),
                     "give each rank a core of its own: see taskset, numactl, the launcher's binding options "
                     "and the container's cpuset");
    }
    return warning("cores",
                   std::to_string(inside.size()) + " ranks on the " + std::to_string(mask.size()) +
                       (one ? " core" : " cores") + " of " + ranks.front()->hostname + ": they take turns",
                   "start at most " + std::to_string(mask.size()));
  }
  return std::nullopt;
}

void judge_cores(const Ranks& ranks, Findings& findings) {
  if (auto crowded = find_crowding(ranks)) {
    findings.push_back(std::move(*crowded));
    return;
  }
  std::set<int> usable;
  size_t threads = 0;
  double quota = 1e9;
  for (const RankFacts* facts : ranks) {
    usable.insert(facts->cores.begin(), facts->cores.end());
    threads += threads_of(*facts);
    quota = std::min(quota, facts->core_quota.value_or(quota));
  }
  const std::string host = ranks.front()->hostname;
  const std::string text = counted(ranks.size(), "rank") + " with " + counted(threads, "thread") +
                           " in all on the " + counted(usable.size(), "core") + " of " + host;
  if (usable.empty()) {
    findings.push_back(
        warning("cores", "the usable cores of " + host + " are unknown", "mount /proc and /sys"));
  } else if (static_cast<double>(ranks.size()) > quota) {
    findings.push_back(
        warning("cores", text + ", but the control group's quota is less than one for each",
                "raise the quota (docker --cpus, Kubernetes limits.cpu), or start fewer ranks"));
  } else if (threads > usable.size()) {
    findings.push_back(warning(
        "cores", text + ": threads wait for each other's turns",
        "set OMP_NUM_THREADS to " + std::to_string(std::max<size_t>(1, usable.size() / ranks.size()))));
  } else {
    findings.push_back(ok("cores", text));
  }
}

/// The GPU that a rank takes, as its host counts them (or its UUID); nothing without GPUs.
std::optional<std::string> device_of(const RankFacts& facts) {
  if (facts.gpus == 0) return std::nullopt;
  const int local = std::max(0, facts.local_rank);
  const auto visible = facts.environment.find("CUDA_VISIBLE_DEVICES");
  if (visible == facts.environment.end()) return std::to_string(local);
  std::vector<std::string> list;
  std::istringstream entries(visible->second);
  for (std::string entry; std::getline(entries, entry, ',');) list.push_back(entry);
  if (list.empty() || list.front().starts_with('-')) return std::nullopt;
  if (list.size() == 1) return list.front();  // each rank sees its own
  return local < static_cast<int>(list.size()) ? list[static_cast<size_t>(local)] : "none";
}

void judge_devices(const Ranks& ranks, Findings& findings) {
  const auto devices = group_by(ranks, [](const RankFacts& facts) { return device_of(facts).value_or(""); });
  bool any = false;
  bool good = true;
  for (const auto& [device, there] : devices) {
    if (device.empty()) continue;
    any = true;
    const auto number = parse_number<int64_t>(device);
    const bool exists = device != "none" && (!number || *number < there.front()->gpus);
    if (exists && there.size() == 1) continue;
    good = false;
    if (!exists) {
      findings.push_back(problem(
          "devices",
          name_ranks(numbers(there)) + " would take a GPU that " + there.front()->hostname + ", which has " +
              std::to_string(there.front()->gpus) + ", or CUDA_VISIBLE_DEVICES does not offer",
          "start no more ranks on a host than it has GPUs, and see LOCAL_RANK and "
          "CUDA_VISIBLE_DEVICES"));
    } else {
      findings.push_back(warning(
          "devices",
          name_ranks(numbers(there)) + " would share GPU " + device + " of " + there.front()->hostname +
              ": NCCL refuses that, and Lockstep sends their tensors through shared memory",
          "start no more ranks on a host than it has GPUs, let the launcher set LOCAL_RANK, and "
          "CUDA_VISIBLE_DEVICES to a GPU for each rank, or for none"));
    }
  }
  if (any && good) findings.push_back(ok("devices", "each rank has a GPU of its own"));
}

/// Whether a variable should have one value in the whole job. What binds to cores, interfaces and files is
/// different by rank or host with good reason.
bool must_agree(const std::string& name) {
  for (const char* part : {"_IFNAME", "_DEVICES", "_HCA", "_FILE", "_AFFINITY", "_PLACES", "_HOST"}) {
    if (name.find(part) != std::string::npos) return false;
  }
  for (const char* prefix : {"NCCL_", "UCX_", "GLOO_", "TORCH_", "OMP_", "MKL_", "KMP_"}) {
    if (name.starts_with(prefix)) return true;
  }
  return name == "LOCKSTEP_CPU_CAPABILITY" || name == "LOCKSTEP_SEGMENT_MB" ||
         name == "LOCKSTEP_MAX_OBJECT_BYTES" || name == "WORLD_SIZE";
}

void judge_variables(const Ranks& ranks, Findings& findings) {
  std::set<std::string> names;
  for (const RankFacts* facts : ranks) {
    for (const auto& [name, value] : facts->environment) {
      if (must_agree(name)) names.insert(name);
    }
  }
  bool equal = true;
  for (const std::string& name : names) {
    const auto values = group_by(ranks, [&](const RankFacts& facts) {
      const auto found = facts.environment.find(name);
      return found == facts.environment.end() ? "unset" : "'" + found->second + "'";
    });
    if (values.size() == 1) continue;
    equal = false;
    findings.push_back(
        warning("variables", name + " differs: " + tell_groups(values), "set it alike for all ranks"));
  }
  if (equal) findings.push_back(ok("variables", "variables that should agree do"));
}

/// Seconds against the first host's clock, by host, as its wires to the others show; empty without such.
std::map<std::string, double> host_clocks(const JobObservations& job) {
  std::map<std::string, double> offsets;
  int first = std::numeric_limits<int>::max();
  for (const WireResult& wire : job.wires) first = std::min(first, wire.ranks.first);
  for (const WireResult& wire : job.wires) {
    if (wire.clock_offsets.empty() || wire.ranks.first != first) continue;
    offsets[job.host_name(wire.ranks.first)] = 0;
    offsets[job.host_name(wire.ranks.second)] = median(wire.clock_offsets);
  }
  return offsets;
}

void judge_clocks(const JobObservations& job, Findings& findings) {
  std::map<std::string, double> offsets = host_clocks(job);
  if (offsets.empty()) {
    for (const auto& [rank, offset] : job.clock_offsets) offsets["rank " + std::to_string(rank)] = offset;
  }
  if (offsets.size() < 2) return;
  const auto [earliest, latest] = std::minmax_element(
      offsets.begin(), offsets.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  const double spread = latest->second - earliest->second;
  const std::string apart = formatted("%.1f ms", spread * 1e3);
  if (spread > thresholds::kClockSeconds) {
    findings.push_back(
        warning("clocks", latest->first + "'s clock is " + apart + " ahead of " + earliest->first + "'s",
                "run chrony or systemd-timesyncd on all hosts: times in logs and traces do not "
                "compare"));
  } else {
    findings.push_back(ok("clocks", "within " + apart));
  }
}

}  // namespace

Findings judge_ranks(const JobObservations& job) {
  Findings findings;
  Ranks ranks;
  for (const auto& facts : job.ranks) {
    if (facts) ranks.push_back(&*facts);
  }
  if (ranks.empty()) return findings;
  judge_hosts(ranks, findings);
  judge_versions(ranks, findings);
  for (const auto& [host, there] : group_by(ranks, [](const RankFacts& facts) { return facts.host; })) {
    judge_cores(there, findings);
    judge_devices(there, findings);
  }
  judge_variables(ranks, findings);
  judge_clocks(job, findings);
  return findings;
}

}  // namespace lockstep::doctor
