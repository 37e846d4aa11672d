#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/doctor/judge.h>
#include <lockstep/doctor/judge_job.h>

namespace lockstep::doctor {
namespace {

/// One host's ranks; what is the host's stands for all of them in the first one's facts.
struct HostOfJob {
  std::vector<const RankFacts*> ranks;
  const RankFacts& facts() const { return *ranks.front(); }
};

std::vector<HostOfJob> hosts_of(const JobObservations& job) {
  std::vector<HostOfJob> hosts;
  for (const auto& facts : job.ranks) {
    if (!facts) continue;
    auto found = std::find_if(hosts.begin(), hosts.end(),
                              [&](const HostOfJob& host) { return host.facts().host == facts->host; });
    if (found == hosts.end()) found = hosts.insert(hosts.end(), HostOfJob{});
    found->ranks.push_back(&*facts);
  }
  return hosts;
}

/// "node-a and node-b: 6.1, node-c: 5.10", and whether all have the same. Hosts that tell nothing are left out.
struct Comparison {
  std::string text;
  bool equal = true;
};

template <class Value>
Comparison compare_hosts(const std::vector<HostOfJob>& hosts, const Value& value_of) {
  std::vector<std::pair<std::string, std::string>> groups;  // a value, and who has it
  for (const HostOfJob& host : hosts) {
    const std::string value = value_of(host);
    if (value.empty()) continue;
    const auto found =
        std::find_if(groups.begin(), groups.end(), [&](const auto& group) { return group.first == value; });
    if (found == groups.end()) {
      groups.emplace_back(value, host.facts().hostname);
    } else {
      found->second += ", " + host.facts().hostname;
    }
  }
  Comparison result;
  for (const auto& [value, names] : groups)
    result.text += (result.text.empty() ? "" : "; ") + names + ": " + value;
  result.equal = groups.size() < 2;
  return result;
}

void judge_between_hosts(const JobObservations& job, const std::vector<HostOfJob>& hosts,
                         Findings& findings) {
  const auto kernels = compare_hosts(hosts, [](const HostOfJob& host) { return host.facts().kernel; });
  if (!kernels.equal) {
    findings.push_back(
        note("kernel", "kernels differ: " + kernels.text, "nothing; remember it when one host is slower"));
  }
  const auto mtus = compare_hosts(hosts, [](const HostOfJob& host) {
    return host.facts().mtu == 0 ? "" : std::to_string(host.facts().mtu);
  });
  const auto interfaces = compare_hosts(hosts, [](const HostOfJob& host) {
    const RankFacts& facts = host.facts();
    return facts.interface.empty()
               ? ""
               : facts.interface + " (" + facts.address + ", MTU " + std::to_string(facts.mtu) + ")";
  });
  if (!mtus.equal) {
    findings.push_back(
        warning("mtu",
                "the interfaces between hosts have different MTUs, so that small messages pass and large "
                "ones may vanish: " +
                    interfaces.text,
                "set one on all (ip link set IFACE mtu N), no larger than the switches', or choose others "
                "(LOCKSTEP_SOCKET_IFNAME)"));
  } else if (!interfaces.text.empty()) {
    findings.push_back(ok("interfaces", interfaces.text));
  }
  const auto libraries = compare_hosts(hosts, [&](const HostOfJob& host) {
    const auto used = job.wires_used.find(host.facts().rank);
    return used == job.wires_used.end() ? std::string() : used->second.substr(0, used->second.find(" ("));
  });
  if (!libraries.equal) {
    findings.push_back(warning("versions",
                               "what passes the messages between hosts differs: " + libraries.text,
                               "install one version of UCX on all hosts, and see LOCKSTEP_UCX_LIBRARY"));
  }
}

/// Each rank takes one port for messages, and one more may be under way; rank 0's store has MASTER_PORT.
void judge_ports(const std::vector<HostOfJob>& hosts, Findings& findings) {
  const auto ranges = compare_hosts(hosts, [](const HostOfJob& host) {
    return host.facts().ports ? "LOCKSTEP_PORT_RANGE is set" : "not set";
  });
  if (!ranges.equal) {
    findings.push_back(warning("ports", "not all hosts keep to a range of ports: " + ranges.text,
                               "set LOCKSTEP_PORT_RANGE on all hosts, or on none"));
  }
  for (const HostOfJob& host : hosts) {
    const auto needed = 2 * static_cast<int>(host.ranks.size());
    if (host.facts().ports.value_or(needed) >= needed) continue;
    findings.push_back(
        warning("ports",
                "LOCKSTEP_PORT_RANGE has " + std::to_string(*host.facts().ports) + " ports for the " +
                    std::to_string(host.ranks.size()) + " rank(s) of " + host.facts().hostname,
                "give it at least " + std::to_string(needed) + ", and more for jobs side by side"));
  }
}

std::string mebibytes(int64_t bytes) {
  return std::to_string(bytes >> 20) + " MiB";
}

/// What one host alone is judged by without --job, where that stops this job.
void judge_resources(const HostOfJob& host, size_t world_size, Findings& findings) {
  const RankFacts& facts = host.facts();
  if (facts.memory > 0 && facts.memory < thresholds::kMemoryWarning) {
    const bool little = facts.memory < thresholds::kMemoryProblem;
    const std::string text = facts.hostname + " has " + mebibytes(facts.memory) +
                             " of memory left, of which its ranks' shared memory is a part";
    const char* remedy =
        "end what else runs there, raise the control group's limit, or start fewer ranks on it";
    findings.push_back(little ? problem("memory", text, remedy) : warning("memory", text, remedy));
  }
  // Some 3 for each neighbour, one or two for each rank elsewhere, and the libraries' own.
  const auto needed = static_cast<int64_t>(64 + 3 * host.ranks.size() + 2 * world_size);
  for (const RankFacts* rank : host.ranks) {
    if (rank->open_files.value_or(needed) >= needed) continue;
    findings.push_back(warning("nofile",
                               "rank " + std::to_string(rank->rank) + " on " + facts.hostname + " may have " +
                                   std::to_string(*rank->open_files) +
                                   " files open (ulimit -n); in this job it needs some " +
                                   std::to_string(needed),
                               "ulimit -n 4096, or LimitNOFILE of the service that starts it"));
    return;
  }
}

}  // namespace

Findings judge_hosts(const JobObservations& job) {
  Findings findings;
  const std::vector<HostOfJob> hosts = hosts_of(job);
  if (hosts.size() > 1) {
    judge_between_hosts(job, hosts, findings);
    judge_ports(hosts, findings);
  }
  for (const HostOfJob& host : hosts) judge_resources(host, job.ranks.size(), findings);
  return findings;
}

}  // namespace lockstep::doctor
