#include <algorithm>
#include <mutex>
#include <sstream>

#include <c10/util/Exception.h>

#include <lockstep/base/log.h>
#include <lockstep/base/text/lower_case.h>
#include <lockstep/collectives/groups/internal/backend_names.h>
#include <lockstep/device/cuda_library.h>

namespace lockstep::collectives::internal::backend_names {
namespace {

/// Device and backend, by name.
using Pairs = std::vector<std::pair<std::string, std::string>>;

std::string without_gloo(const std::string& name) {
  return name == kGloo ? kLockstep : name;
}

/// A plain name stands for the devices that the backend is for.
Pairs parse(const std::string& backend) {
  if (backend == kNccl) return {{"cuda", backend}};
  if (backend.find(':') == std::string::npos) {
    return {{"cpu", without_gloo(backend)}, {"cuda", without_gloo(backend)}};
  }
  Pairs pairs;
  std::istringstream list(backend + ",");
  for (std::string pair; std::getline(list, pair, ',');) {
    const size_t colon = pair.find(':');
    TORCH_CHECK_VALUE(colon != std::string::npos && colon > 0 && colon + 1 < pair.size() &&
                          pair.find(':', colon + 1) == std::string::npos,
                      "Invalid device:backend pairing: '", pair, "' in '", backend,
                      "'; write it as \"DEVICE:BACKEND,DEVICE:BACKEND\", e.g. \"cpu:lockstep,cuda:nccl\"");
    const std::string device = pair.substr(0, colon);
    const bool twice =
        std::any_of(pairs.begin(), pairs.end(), [&](const auto& one) { return one.first == device; });
    TORCH_CHECK_VALUE(!twice, "Duplicate device type ", device, " in backend string: '", backend, "'");
    pairs.emplace_back(device, without_gloo(pair.substr(colon + 1)));
  }
  return pairs;
}

std::string join(const Pairs& pairs) {
  std::string text;
  for (const auto& [device, name] : pairs) {
    if (!text.empty()) text += ',';
    text += device;
    text += ':';
    text += name;
  }
  return text;
}

/// "privateuseone" is torch's name for a device that is not its own.
bool is_device(const std::string& device) {
  return device == "cpu" || device == "cuda" || device == "privateuseone";
}

c10::DeviceType type_of(const std::string& device) {
  if (device == "cpu") return c10::kCPU;
  return device == "cuda" ? c10::kCUDA : c10::kPrivateUse1;
}

bool serves(const std::string& backend, const std::string& device) {
  return is_device(device) && (backend == kLockstep || (backend == kNccl && device == "cuda"));
}

}  // namespace

std::string check(const std::string& backend) {
  const std::string name = lower_case(backend);
  if (name.empty()) return name;
  const Pairs pairs = parse(name);
  for (const auto& [device, one] : pairs) {
    TORCH_CHECK_VALUE(
        one == kLockstep || one == kNccl, "unknown backend '", backend,
        "'; Lockstep has \"lockstep\" (tensors on the CPU and on devices), \"nccl\" (CUDA tensors) and "
        "\"cpu:lockstep,cuda:nccl\"");
    TORCH_CHECK_VALUE(is_device(device), "unknown device type '", device, "' in backend '", backend,
                      "'; Lockstep serves \"cpu\" and \"cuda\"");
    TORCH_CHECK_VALUE(serves(one, device), "backend '", backend, "' gives ", device,
                      " tensors to NCCL, which takes CUDA tensors alone; write \"cpu:lockstep,cuda:nccl\"");
  }
  const std::string known = name.find(':') == std::string::npos ? without_gloo(name) : join(pairs);
  if (known != name) {
    static std::once_flag once;
    std::call_once(once, [&] {
      LOCKSTEP_LOG(kInfo) << "backend '" << backend << "' is taken as '" << known
                          << "': Lockstep's own engine does Gloo's work";
    });
  }
  return known;
}

bool is_available(const std::string& backend) {
  const Pairs pairs = parse(lower_case(backend));
  return std::all_of(pairs.begin(), pairs.end(), [](const auto& pair) {
    return serves(pair.second, pair.first) && (pair.second != kNccl || nccl_is_built());
  });
}

std::vector<std::pair<c10::DeviceType, std::string>> by_device(const std::string& backend) {
  std::vector<std::pair<c10::DeviceType, std::string>> result;
  for (const auto& [device, name] : parse(backend)) result.emplace_back(type_of(device), name);
  // It serves whatever device there is.
  if (backend == kLockstep) result.emplace_back(c10::kPrivateUse1, kLockstep);
  const bool cpu =
      std::any_of(result.begin(), result.end(), [](const auto& one) { return one.first == c10::kCPU; });
  if (!cpu) result.emplace_back(c10::kCPU, kLockstep);
  return result;
}

bool uses_nccl(const std::string& backend) {
  if (backend.empty()) return false;
  const Pairs pairs = parse(backend);
  return std::any_of(pairs.begin(), pairs.end(), [](const auto& pair) { return pair.second == kNccl; });
}

std::string config(const std::string& backend) {
  return join(parse(backend));
}

}  // namespace lockstep::collectives::internal::backend_names
