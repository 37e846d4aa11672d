#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <lockstep/testing/driver.h>

/// A fuzz target is a function that gets any bytes and must neither crash, hang, use memory without bound,
/// nor throw. NAME_fuzz.cc beside the parser NAME defines it (catching what its parser documents to throw)
/// and a function that returns valid inputs, from which mutations start; lockstep_fuzzer(NAME) in the room's
/// CMakeLists.txt makes the program NAME_fuzz:
///
///     LOCKSTEP_FUZZ_TARGET(name, seeds) {
///       parse({reinterpret_cast<const char*>(data), size});
///       return 0;
///     }
///
/// That program is a driver (driver.h) that fuzz_driver.cc makes of the target: see NAME_fuzz --help.
#define LOCKSTEP_FUZZ_TARGET(name, seeds)                                          \
  static int fuzz_##name(const uint8_t* data, size_t size);                        \
  LOCKSTEP_DRIVER(name##_fuzz) {                                                   \
    return ::lockstep::testing::run_fuzz_driver({fuzz_##name, seeds}, argc, argv); \
  }                                                                                \
  static int fuzz_##name(const uint8_t* data, size_t size)

namespace lockstep::testing {

struct FuzzTarget {
  int (*run)(const uint8_t* data, size_t size);  ///< returns 0
  std::vector<std::string> (*seeds)();
};

/// The main() of a target.
int run_fuzz_driver(const FuzzTarget& target, int argc, char** argv);

}  // namespace lockstep::testing
