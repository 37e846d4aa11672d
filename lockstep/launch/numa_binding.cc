#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/files/kernel_file.h>
#include <lockstep/base/process/cpu_list.h>
#include <lockstep/launch/numa_binding.h>

namespace lockstep::launch {
namespace {

namespace fs = std::filesystem;

std::vector<int> read_cores(const fs::path& file) {
  std::vector<int> cores = parse_cpu_list(read_kernel_file(file).value_or(""));
  TORCH_CHECK_VALUE(!cores.empty(), "the kernel does not tell of its cores in ", file.string());
  return cores;
}

fs::path folder_of_core(const fs::path& system, int core) {
  return system / "devices/system/cpu" / ("cpu" + std::to_string(core));
}

/// The first of the cores that share the last-level cache of this one.
int last_level_cache_of(const fs::path& system, int core) {
  const fs::path folder = folder_of_core(system, core) / "cache";
  int64_t highest = -1;
  int first = core;  // where the kernel tells of no cache, as in some virtual machines
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    const auto kind = read_kernel_file(entry.path() / "type");
    const auto level = read_kernel_integer(entry.path() / "level");
    if (!level || *level <= highest || (kind != "Unified" && kind != "Data")) continue;
    highest = *level;
    first = read_cores(entry.path() / "shared_cpu_list").front();
  }
  return first;
}

/// Cores by what `key` tells of each, in the order of the keys.
template <class Key>
std::vector<std::vector<int>> group(const std::vector<int>& cores, const Key& key) {
  std::map<int, std::vector<int>> groups;
  for (const int core : cores) groups[key(core)].push_back(core);
  std::vector<std::vector<int>> result;
  for (auto& [unused, members] : groups) result.push_back(std::move(members));
  return result;
}

/// The part of the physical cores, each with its hardware threads, that this one of so many cards gets: the first ones have one
/// more where they are not divisible.
std::vector<int> share(const std::vector<std::vector<int>>& physical, size_t which, size_t cards) {
  const size_t each = physical.size() / cards;
  const size_t more = physical.size() % cards;
  const size_t begin = which * each + std::min(which, more);
  const size_t end = begin + each + (which < more ? 1 : 0);
  std::vector<int> cores;
  for (size_t i = begin; i < end; ++i) cores.insert(cores.end(), physical[i].begin(), physical[i].end());
  std::sort(cores.begin(), cores.end());
  return cores;
}

}  // namespace

NumaTopology::NumaTopology(fs::path system, std::vector<std::string> cards, std::vector<int> allowed)
    : system_(std::move(system)), cards_(std::move(cards)), allowed_(std::move(allowed)) {
  std::sort(allowed_.begin(), allowed_.end());
}

int NumaTopology::node_of(size_t card) const {
  const fs::path file = system_ / "bus/pci/devices" / cards_[card] / "numa_node";
  const auto node = read_kernel_integer(file);
  TORCH_CHECK_VALUE(node, "the kernel does not tell in ", file.string(), " near which cores card ", card,
                    " is");
  return static_cast<int>(std::max<int64_t>(*node, 0));  // -1 on hosts with one node
}

std::vector<int> NumaTopology::cores_of_node(int node) const {
  std::vector<int> all = parse_cpu_list(
      read_kernel_file(system_ / "devices/system/node" / ("node" + std::to_string(node)) / "cpulist")
          .value_or(""));
  std::sort(all.begin(), all.end());
  std::vector<int> cores;
  std::set_intersection(all.begin(), all.end(), allowed_.begin(), allowed_.end(), std::back_inserter(cores));
  return cores;
}

std::vector<int> NumaTopology::cores_of_socket(int node) const {
  const auto socket_of = [&](const std::vector<int>& cores) {
    return read_kernel_integer(folder_of_core(system_, cores.front()) / "topology/physical_package_id");
  };
  const auto socket = socket_of(cores_of_node(node));
  std::vector<int> result;
  for (const int other : read_cores(system_ / "devices/system/node/possible")) {
    const std::vector<int> cores = cores_of_node(other);  // none where it has memory alone
    if (!cores.empty() && socket_of(cores) == socket) result.insert(result.end(), cores.begin(), cores.end());
  }
  std::sort(result.begin(), result.end());
  return result;
}

std::vector<size_t> NumaTopology::cards_of_node(int node) const {
  std::vector<size_t> cards;
  for (size_t card = 0; card < cards_.size(); ++card) {
    if (node_of(card) == node) cards.push_back(card);
  }
  return cards;
}

std::vector<int> NumaTopology::cores(NumaBinding binding, size_t card) const {
  TORCH_CHECK_VALUE(card < cards_.size(), "local rank ", card, " has no card: this host shows ",
                    cards_.size());
  const int node = node_of(card);
  const std::vector<int> cores = cores_of_node(node);
  const auto described = [&] {
    return c10::str("NUMA node ", node, " of card ", card, " (", cards_[card], ")");
  };
  TORCH_CHECK_VALUE(!cores.empty(), described(), " has no core that may be used (", format_cpu_list(allowed_),
                    " may; taskset, --cpu-list and a cgroup's cpuset decide)");
  if (binding == NumaBinding::kNode) return cores;
  if (binding == NumaBinding::kSocket) return cores_of_socket(node);
  const std::vector<size_t> cards = cards_of_node(node);
  const auto which = static_cast<size_t>(std::find(cards.begin(), cards.end(), card) - cards.begin());
  if (binding == NumaBinding::kExclusive) {
    const auto physical = group(cores, [&](int core) {
      return read_cores(folder_of_core(system_, core) / "topology/thread_siblings_list").front();
    });
    TORCH_CHECK_VALUE(physical.size() >= cards.size(), described(), " has ", physical.size(),
                      " physical cores that may be used, and ", cards.size(), " cards");
    return share(physical, which, cards.size());
  }
  auto complexes = group(cores, [&](int core) { return last_level_cache_of(system_, core); });
  std::stable_sort(complexes.begin(), complexes.end(),
                   [](const auto& one, const auto& other) { return one.size() > other.size(); });
  return complexes[which % complexes.size()];
}

}  // namespace lockstep::launch
