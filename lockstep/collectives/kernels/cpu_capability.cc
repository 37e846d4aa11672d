#include <array>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/collectives/kernels/cpu_capability.h>

namespace lockstep {
namespace {

constexpr const char* kCapabilityVariable = "LOCKSTEP_CPU_CAPABILITY";

/// What this machine can run, best first.
const std::vector<CpuCapability>& capabilities_here() {
  static const std::vector<CpuCapability> all = [] {
    std::vector<CpuCapability> list;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      list.push_back(CpuCapability::kAvx512);
    }
    if (avx2) list.push_back(CpuCapability::kAvx2);
#endif
    list.push_back(CpuCapability::kDefault);
    return list;
  }();
  return all;
}

/// `asked_by` says what asks for it, for the error message.
CpuCapability find_capability(const std::string& name, const std::string& asked_by) {
  std::string offered;
  for (const CpuCapability capability : capabilities_here()) {
    if (name == to_string(capability)) return capability;
    offered += (offered.empty() ? "" : ", ") + std::string(to_string(capability));
  }
  const bool known = name == "avx2" || name == "avx512";
  TORCH_CHECK_VALUE(false, asked_by, " asks for the CPU capability '", name, "', which ",
                    known ? "this machine does not have" : "does not exist",
                    "; this machine offers: ", offered);
}

}  // namespace

const char* to_string(CpuCapability capability) {
  static constexpr std::array<const char*, 3> kNames = {"default", "avx2", "avx512"};
  return kNames[static_cast<size_t>(capability)];
}

CpuCapability cpu_capability() {
  static const CpuCapability chosen = [] {
    const std::optional<std::string> wanted = environment::text(kCapabilityVariable);
    return wanted ? find_capability(*wanted, kCapabilityVariable) : capabilities_here().front();
  }();
  return chosen;
}

CpuCapability cpu_capability_named(const char* name) {
  return find_capability(name, "The caller");
}

}  // namespace lockstep
