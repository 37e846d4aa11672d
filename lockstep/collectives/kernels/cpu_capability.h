#pragma once

#include <cstdint>

/// Which of the kernels' variants run: they exist once per instruction set, and all give the same bits. Thread-safe.
namespace lockstep {

/// kDefault is whatever the compiler takes for granted.
enum class CpuCapability : uint8_t { kDefault, kAvx2, kAvx512 };

/// "default", "avx2" or "avx512". Static storage.
const char* to_string(CpuCapability capability);

/// The best one of this machine, or the one that the environment variable LOCKSTEP_CPU_CAPABILITY names (read once).
/// Throws c10::ValueError that names the variable when its value is unknown or asks for more than the machine has.
CpuCapability cpu_capability();

/// For tests and benchmarks: the one of this name. Throws c10::ValueError if this machine does not have it.
CpuCapability cpu_capability_named(const char* name);

}  // namespace lockstep
