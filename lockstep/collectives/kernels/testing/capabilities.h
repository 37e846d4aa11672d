#pragma once

#include <vector>

#include <c10/util/Exception.h>

#include <lockstep/collectives/kernels/cpu_capability.h>

namespace lockstep::testing {

/// The variants of the kernels that this machine can run, the best last.
inline std::vector<CpuCapability> capabilities() {
  std::vector<CpuCapability> list;
  for (const char* name : {"default", "avx2", "avx512"}) {
    try {
      list.push_back(cpu_capability_named(name));
    } catch (const c10::ValueError&) {
    }
  }
  return list;
}

}  // namespace lockstep::testing
