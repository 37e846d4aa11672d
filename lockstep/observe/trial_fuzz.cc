// What LOCKSTEP_TRIAL may hold: any text is understood or a c10::ValueError.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <variant>
#include <vector>

#include <c10/util/Exception.h>

#include <lockstep/observe/trial.h>
#include <lockstep/testing/fuzz_driver.h>

namespace lockstep::trial_fuzz {
namespace {

std::vector<std::string> seeds() {
  return {
      R"({"number": 3, "parameters": {"lr": 1e-3, "batch": 64, "nesterov": true, "name": "adam"}, "report": "f"})",
      R"({"number": 0, "parameters": {"big": 18446744073709551615, "low": -1}, "report": "runs/f.jsonl"})",
      R"({"number": 1, "parameters": {"list": [1, 2]}, "report": "f"})",
      "[[[[[[",
  };
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(trial, seeds) {
  try {
    const Trial trial(std::string(reinterpret_cast<const char*>(data), size));
    if (!trial) std::abort();
    for (const auto& [name, value] : trial.parameters()) {
      const auto* number = std::get_if<int64_t>(&value);
      if (number != nullptr && trial.get(name, int64_t{0}) != *number) std::abort();
    }
  } catch (const c10::ValueError&) {
    // what is documented
  }
  return 0;
}

}  // namespace lockstep::trial_fuzz
