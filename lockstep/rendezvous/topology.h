#pragma once

#include <string>
#include <vector>

#include <lockstep/rendezvous/host_identity.h>

namespace lockstep {

/// On which host each rank is. A value; without more, that of a process alone.
struct Topology {
  struct Host {
    std::string name;        ///< for messages; the second host of one name is NAME#2
    std::vector<int> ranks;  ///< ascending
  };
  std::vector<Host> hosts = {{.name = "", .ranks = {0}}};  ///< in the order of their first ranks
  std::vector<int> host_of = {0};                          ///< by rank: index into hosts
  int rank = 0;                                            ///< this process's

  /// From the identities of all ranks, by rank. Linear in their number but for a logarithm.
  static Topology make(const std::vector<HostIdentity>& identities, int rank);

  /// The topology of a part of the ranks, which get new numbers by their places in `ranks`; `rank` is this process's among
  /// them.
  Topology among(const std::vector<int>& ranks, int rank) const;

  int nodes() const { return static_cast<int>(hosts.size()); }
  bool spans_hosts() const { return hosts.size() > 1; }
  int node_rank() const { return host_of[static_cast<size_t>(rank)]; }
  const std::vector<int>& neighbours() const { return hosts[static_cast<size_t>(node_rank())].ranks; }
  int local_rank() const;  ///< this process's place among neighbours()
  int local_world_size() const { return static_cast<int>(neighbours().size()); }
  std::vector<std::vector<int>> ranks_by_host() const;  ///< of each host, in the order of hosts
  const std::string& host_name(int rank) const {
    return hosts[static_cast<size_t>(host_of.at(static_cast<size_t>(rank)))].name;
  }
  /// "2 hosts: node-a (ranks 0-3), node-b (ranks 4-7)"
  std::string describe() const;
};

}  // namespace lockstep
