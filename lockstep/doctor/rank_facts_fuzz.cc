// What the ranks of `lockstep doctor --job` publish in the store: any text is a rank's facts, which can be
// written again, or nothing.
#include <cstdlib>
#include <string>

#include <lockstep/doctor/rank_facts.h>
#include <lockstep/testing/fuzz_driver.h>

namespace lockstep::doctor::rank_facts_fuzz {
namespace {

std::vector<std::string> seeds() {
  RankFacts facts;
  facts.rank = 3;
  facts.pid = 4242;
  facts.hostname = "host-1";
  facts.cores = {0, 1, 5};
  facts.core_quota = 1.5;
  facts.environment = {{"OMP_NUM_THREADS", "1"}, {"LOCKSTEP_LOG", "info"}};
  return {to_json(facts), R"({"rank": 1, "cores": [1], "pid": null})"};
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(rank_facts, seeds) {
  const auto facts = parse_rank_facts({reinterpret_cast<const char*>(data), size});
  if (!facts) return 0;
  const std::string written = to_json(*facts);
  const auto again = parse_rank_facts(written);
  if (!again || to_json(*again) != written) std::abort();
  return 0;
}

}  // namespace lockstep::doctor::rank_facts_fuzz
