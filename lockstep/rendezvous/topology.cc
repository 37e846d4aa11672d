#include <algorithm>
#include <map>

#include <lockstep/base/ranks.h>
#include <lockstep/base/text/counted.h>
#include <lockstep/rendezvous/topology.h>

namespace lockstep {

Topology Topology::make(const std::vector<HostIdentity>& identities, int rank) {
  Topology topology{.hosts = {}, .host_of = {}, .rank = rank};
  std::map<std::string, int> known;
  std::map<std::string, int> names;
  for (const HostIdentity& identity : identities) {
    const auto [host, is_new] = known.emplace(identity.key(), topology.nodes());
    if (is_new) {
      const int number = ++names[identity.hostname];
      topology.hosts.push_back(
          {.name = identity.hostname + (number > 1 ? "#" + std::to_string(number) : ""), .ranks = {}});
    }
    auto& ranks = topology.hosts[static_cast<size_t>(host->second)].ranks;
    ranks.push_back(static_cast<int>(topology.host_of.size()));
    topology.host_of.push_back(host->second);
  }
  return topology;
}

Topology Topology::among(const std::vector<int>& ranks, int rank) const {
  Topology part{.hosts = {}, .host_of = {}, .rank = rank};
  std::vector<int> new_index(hosts.size(), -1);
  for (const int old : ranks) {
    const auto host = static_cast<size_t>(host_of.at(static_cast<size_t>(old)));
    if (new_index[host] < 0) {
      new_index[host] = part.nodes();
      part.hosts.push_back({.name = hosts[host].name, .ranks = {}});
    }
    part.hosts[static_cast<size_t>(new_index[host])].ranks.push_back(static_cast<int>(part.host_of.size()));
    part.host_of.push_back(new_index[host]);
  }
  return part;
}

int Topology::local_rank() const {
  const auto& ranks = neighbours();
  return static_cast<int>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

std::vector<std::vector<int>> Topology::ranks_by_host() const {
  std::vector<std::vector<int>> lists;
  for (const Host& host : hosts) lists.push_back(host.ranks);
  return lists;
}

std::string Topology::describe() const {
  constexpr size_t kMost = 8;
  std::string text = counted(hosts.size(), "host") + ": ";
  for (size_t i = 0; i < std::min(hosts.size(), kMost); ++i) {
    text += (i == 0 ? "" : ", ") + hosts[i].name + " (" + name_ranks(hosts[i].ranks) + ")";
  }
  if (hosts.size() > kMost) text += " and " + std::to_string(hosts.size() - kMost) + " more";
  return text;
}

}  // namespace lockstep
