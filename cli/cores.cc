#include "cores.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/host_name.h>
#include <lockstep/base/process/cpu.h>
#include <lockstep/base/process/cpu_list.h>
#include <lockstep/device/visible_cards.h>
#include <lockstep/launch/numa_binding.h>

namespace lockstep::cli {
namespace {

using launch::NumaBinding;

constexpr std::array<std::pair<const char*, NumaBinding>, 4> kBindings = {
    {{"node", NumaBinding::kNode},
     {"socket", NumaBinding::kSocket},
     {"exclusive", NumaBinding::kExclusive},
     {"core-complex", NumaBinding::kCoreComplex}}};

}  // namespace

void stay_on_cores(const std::string& list) {
  const CoreMask mask(parse_cpu_list(list));
  TORCH_CHECK_VALUE(!mask.cores().empty(), "--cpu-list is '", list, "'; it takes cores as 0-3,8");
  // The kernel leaves out those that this process may not use, and refuses a set of none.
  TORCH_CHECK_VALUE(mask.apply(0) && CoreMask::current().cores() == mask.cores(), "--cpu-list is '", list,
                    "', which has cores that ", host_name(),
                    " has not, or that may not be used (taskset -cp $$ says which may)");
}

std::vector<std::vector<int>> cores_near_cards(const std::string& binding, int nprocs) {
  const auto* const named =
      std::find_if(kBindings.begin(), kBindings.end(), [&](const auto& one) { return binding == one.first; });
  std::vector<std::vector<int>> cores;
  try {
    const launch::NumaTopology topology("/sys", visible_card_addresses(), CoreMask::current().cores());
    for (int rank = 0; rank < nprocs; ++rank)
      cores.push_back(topology.cores(named->second, static_cast<size_t>(rank)));
  } catch (const c10::ValueError& error) {
    TORCH_CHECK_VALUE(false, "--numa-binding ", binding,
                      " keeps each process near the card of its local rank, but on ", host_name(), " ",
                      error.what_without_backtrace(),
                      "; --cpu-list keeps all processes on cores that you name");
  }
  return cores;
}

std::vector<std::string> numa_bindings() {
  std::vector<std::string> names;
  for (const auto& [name, unused] : kBindings) names.emplace_back(name);
  return names;
}

}  // namespace lockstep::cli
