#pragma once

#include <vector>

namespace lockstep::transport {

/// On which host each member of a group is. Hosts stand in the order of their first member, a host's members in group
/// order; reductions fold in that order, so that all ranks get the same bits.
struct GroupLayout {
  std::vector<std::vector<int>> hosts;  // group ranks
  std::vector<int> host_of;             // by group rank: index into hosts …
  std::vector<int> place_of;            // … and into hosts[host_of[rank]]
  int rank = 0;                         // this process's group rank

  /// `hosts_of_members`: by group rank, a number that is equal for ranks of one host.
  static GroupLayout make(const std::vector<int>& hosts_of_members, int rank);

  int size() const { return static_cast<int>(host_of.size()); }
  bool spans_hosts() const { return hosts.size() > 1; }
  int host() const { return host_of[rank]; }
  int place() const { return place_of[rank]; }
  const std::vector<int>& neighbours() const { return hosts[host()]; }
  /// Tensors are cut in so many slices between hosts: the smallest number of members that a host has.
  int slices() const;
  /// The member of `host` in the place of `rank`, modulo that host's size.
  int counterpart(int rank, int host) const {
    const auto& members = hosts[host];
    return members[place_of[rank] % members.size()];
  }
  /// The members on other hosts whose place is this rank's, modulo the smaller host's size: so each rank has at least one
  /// on each other host, and is one of its counterparts' own.
  std::vector<int> counterparts() const;
};

}  // namespace lockstep::transport
