#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace lockstep::launch {

/// Which cores the process of a local rank has near the card with this index: torchrun's --numa-binding (torch/numa/binding.py,
/// AffinityMode).
enum class NumaBinding {
  kNode,        ///< all of the card's NUMA node
  kSocket,      ///< all of the NUMA nodes in that node's socket
  kExclusive,   ///< a part of the card's NUMA node, whose cores are divided evenly among its cards
  kCoreComplex  ///< those of the card's NUMA node that share one last-level cache, another one for each of its cards where there
                ///< are as many
};

/// What a host tells of its cores, and where its cards are.
class NumaTopology {
 public:
  /// `system`: where sysfs(5) is mounted. `cards`: PCI addresses by index. `allowed`: the cores that may be used.
  NumaTopology(std::filesystem::path system, std::vector<std::string> cards, std::vector<int> allowed);

  /// Ascending, at least one. Throws c10::ValueError that names the card and its node where it has no core that may be used, or
  /// fewer than cards, or the host has no such card.
  std::vector<int> cores(NumaBinding binding, size_t card) const;

 private:
  int node_of(size_t card) const;
  std::vector<int> cores_of_node(int node) const;
  std::vector<int> cores_of_socket(int node) const;
  std::vector<size_t> cards_of_node(int node) const;

  std::filesystem::path system_;
  std::vector<std::string> cards_;
  std::vector<int> allowed_;
};

}  // namespace lockstep::launch
