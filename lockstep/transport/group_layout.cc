#include <algorithm>

#include <c10/util/Exception.h>

#include <lockstep/transport/group_layout.h>

namespace lockstep::transport {

GroupLayout GroupLayout::make(const std::vector<int>& hosts_of_members, int rank) {
  GroupLayout layout;
  layout.rank = rank;
  std::vector<int> numbers;  // of the hosts, in the order of their first member
  for (const int number : hosts_of_members) {
    const auto known = std::find(numbers.begin(), numbers.end(), number);
    const auto host = static_cast<size_t>(known - numbers.begin());
    if (known == numbers.end()) {
      numbers.push_back(number);
      layout.hosts.emplace_back();
    }
    layout.place_of.push_back(static_cast<int>(layout.hosts[host].size()));
    layout.hosts[host].push_back(layout.size());
    layout.host_of.push_back(static_cast<int>(host));
  }
  TORCH_INTERNAL_ASSERT(rank >= 0 && rank < layout.size());
  return layout;
}

int GroupLayout::slices() const {
  const auto smallest = std::min_element(hosts.begin(), hosts.end(),
                                         [](const auto& a, const auto& b) { return a.size() < b.size(); });
  return static_cast<int>(smallest->size());
}

std::vector<int> GroupLayout::counterparts() const {
  std::vector<int> ranks;
  for (int other = 0; other < static_cast<int>(hosts.size()); ++other) {
    if (other == host()) continue;
    // The smaller host's places, again and again, beside the larger one's.
    const auto common = static_cast<int>(std::min(hosts[other].size(), neighbours().size()));
    for (const int member : hosts[other]) {
      if (place_of[member] % common == place() % common) ranks.push_back(member);
    }
  }
  return ranks;
}

}  // namespace lockstep::transport
