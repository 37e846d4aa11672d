// Prints the cores that a process near each card gets, for comparison with torchrun's.
//
//   numa_binding_driver SYSTEM ALLOWED CARD…
//
// SYSTEM: a folder in the place of /sys; ALLOWED: cores as 0-3,8; CARD: a PCI address. A line for each card has the cores of node,
// socket, exclusive and core-complex, separated by blanks; "refused" where there are none.
#include <iostream>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

#include <lockstep/base/process/cpu_list.h>
#include <lockstep/launch/numa_binding.h>
#include <lockstep/testing/driver.h>

namespace numa_binding_driver {
namespace {

using lockstep::launch::NumaBinding;
using lockstep::launch::NumaTopology;

std::string cores_of(const NumaTopology& topology, NumaBinding binding, size_t card) {
  try {
    return lockstep::format_cpu_list(topology.cores(binding, card));
  } catch (const c10::ValueError& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return "refused";
  }
}

}  // namespace

LOCKSTEP_DRIVER(numa_binding_driver) {
  if (argc < 4) return 2;
  const std::vector<std::string> cards(argv + 3, argv + argc);
  const NumaTopology topology(argv[1], cards, lockstep::parse_cpu_list(argv[2]));
  for (size_t card = 0; card < cards.size(); ++card) {
    for (const NumaBinding binding :
         {NumaBinding::kNode, NumaBinding::kSocket, NumaBinding::kExclusive, NumaBinding::kCoreComplex}) {
      std::cout << cores_of(topology, binding, card) << ' ';
    }
    std::cout << '\n';
  }
  return 0;
}

}  // namespace numa_binding_driver
