// What the members of a group leave for each other in the store: any text is an address and an identity, or a
// DistStoreError.
#include <cstdlib>
#include <string>

#include <c10/util/Exception.h>

#include <lockstep/collectives/groups/internal/group_making.h>
#include <lockstep/testing/fuzz_driver.h>

namespace lockstep::group_making_fuzz {
namespace {

std::vector<std::string> seeds() {
  return {"4097 new_group(ranks 0 and 2, name '1')", "18446744073709551615 x", "1 "};
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(group_making, seeds) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  try {
    const auto [word, identity] = lockstep::collectives::internal::group_making::parse_store_value(text, 1);
    if (word == 0 || !text.ends_with(" " + identity)) std::abort();
  } catch (const c10::DistStoreError&) {
    // what is documented
  }
  return 0;
}

}  // namespace lockstep::group_making_fuzz
