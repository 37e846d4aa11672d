#include <algorithm>
#include <cctype>
#include <map>
#include <sstream>

#include <c10/util/Exception.h>

#include <lockstep/collectives/internal/backend_names.h>

namespace lockstep::backend_names {
namespace {

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

/// Device to backend, for a list of pairs; a plain name stands for the CPU.
std::map<std::string, std::string> parse(const std::string& backend) {
  if (backend.find(':') == std::string::npos) return {{"cpu", backend}};
  std::map<std::string, std::string> backends;
  std::istringstream list(backend + ",");
  for (std::string pair; std::getline(list, pair, ',');) {
    const size_t colon = pair.find(':');
    TORCH_CHECK_VALUE(colon != std::string::npos && colon > 0 && colon + 1 < pair.size() &&
                          pair.find(':', colon + 1) == std::string::npos,
                      "Invalid device:backend pairing: '", pair, "' in '", backend,
                      "'; write it as \"DEVICE:BACKEND,DEVICE:BACKEND\", e.g. \"cpu:lockstep\"");
    TORCH_CHECK_VALUE(backends.emplace(pair.substr(0, colon), pair.substr(colon + 1)).second,
                      "Duplicate device type ", pair.substr(0, colon), " in backend string: '", backend, "'");
  }
  return backends;
}

}  // namespace

std::string check(const std::string& backend) {
  if (backend.empty()) return kLockstep;
  std::string name = lower(backend);
  for (const auto& [device, one] : parse(name)) {
    TORCH_CHECK_VALUE(
        one != "gloo",
        "backend 'gloo' is not part of Lockstep; leave the backend out, or say \"lockstep\", which does the "
        "same for CPU tensors, faster");
    TORCH_CHECK_VALUE(
        one != "nccl" && !(one == kLockstep && device != "cpu"), "backend '", backend,
        "' needs GPU support, which this version of Lockstep does not have yet; use \"lockstep\" with CPU "
        "tensors");
    TORCH_CHECK_VALUE(one == kLockstep, "unknown backend '", backend,
                      "'; Lockstep has \"lockstep\" (CPU tensors)");
  }
  return name;
}

bool is_available(const std::string& backend) {
  const auto backends = parse(lower(backend));
  return std::all_of(backends.begin(), backends.end(),
                     [](const auto& pair) { return pair.first == "cpu" && pair.second == kLockstep; });
}

std::string config(const std::string& backend) {
  std::string text;
  for (const auto& [device, name] : parse(backend)) {
    if (!text.empty()) text += ',';
    text += device;
    text += ':';
    text += name;
  }
  return text;
}

}  // namespace lockstep::backend_names
