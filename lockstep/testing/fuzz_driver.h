#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

/// A fuzz target is a function that gets any bytes and must neither crash, hang, use memory without bound,
/// nor throw. NAME_fuzz.cc beside the parser NAME defines it (catching what its parser documents to throw)
/// and, where random bytes would not get far, fuzz_seeds(); lockstep_fuzzer(NAME) in the room's
/// CMakeLists.txt makes the program NAME_fuzz.
///
/// With libFuzzer (clang, LOCKSTEP_LIBFUZZER=ON) that program is libFuzzer's; otherwise fuzz_driver.cc gives
/// it a main(): see NAME_fuzz --help.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace lockstep::testing {

/// Defined by a target: valid inputs, from which mutations start. Optional.
__attribute__((weak)) std::vector<std::string> fuzz_seeds();

}  // namespace lockstep::testing
