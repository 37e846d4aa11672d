#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/base/training/held_tensors.h>
#include <lockstep/profiler/internal/cover.h>
#include <lockstep/profiler/internal/held_memory.h>
#include <lockstep/profiler/internal/trace_reader.h>

namespace lockstep::profiler::internal {
namespace {

constexpr std::pair<const char*, int64_t HeldMemory::*> kHeldUses[] = {
    {"parameters", &HeldMemory::parameters},
    {"gradients", &HeldMemory::gradients},
    {"optimizer_state", &HeldMemory::optimizer_state}};

/// Tensors may share storages, and storages memory, as gradients in a bucket do.
void add_held(const std::vector<at::Tensor>& tensors, int64_t HeldMemory::*use, HeldByDevice& held) {
  std::map<std::string, std::vector<Span>> memory;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.is_meta() || !tensor.has_storage()) continue;
    const c10::Device device = tensor.device();
    const auto begin = reinterpret_cast<int64_t>(tensor.storage().data());
    memory[name_of_device(static_cast<int64_t>(device.type()), device.index())].push_back(
        {begin, begin + static_cast<int64_t>(tensor.storage().nbytes())});
  }
  for (auto& [device, spans] : memory) held[device].*use = Cover(std::move(spans)).length();
}

}  // namespace

std::string name_of_device(int64_t type, int64_t index) {
  if (type == static_cast<int64_t>(c10::DeviceType::CPU)) return "CPU";
  const bool is_cuda = type == static_cast<int64_t>(c10::DeviceType::CUDA);
  return (is_cuda ? "CUDA" : "device type " + std::to_string(type)) + " " + std::to_string(index);
}

HeldByDevice held_memory() {
  const HeldTensors tensors = held_tensors();
  HeldByDevice held;
  add_held(tensors.parameters, &HeldMemory::parameters, held);
  add_held(tensors.gradients, &HeldMemory::gradients, held);
  add_held(tensors.optimizer_state, &HeldMemory::optimizer_state, held);
  return held;
}

nlohmann::ordered_json json_of_held(const HeldMemory& held) {
  auto json = nlohmann::ordered_json::object();
  for (const auto& [name, use] : kHeldUses) {
    if (held.*use > 0) json[name] = held.*use;
  }
  return json;
}

nlohmann::ordered_json json_of_held(const HeldByDevice& held) {
  auto json = nlohmann::ordered_json::object();
  for (const auto& [device, memory] : held) json[device] = json_of_held(memory);
  return json;
}

HeldByDevice held_of_json(const nlohmann::json& held) {
  constexpr int64_t kMostBytes = int64_t{1} << 50;  // sums don't overflow
  HeldByDevice by_device;
  if (!held.is_object()) return by_device;
  for (const auto& [device, memory] : held.items()) {
    if (!memory.is_object()) continue;
    HeldMemory of_device;
    for (const auto& [name, use] : kHeldUses) {
      of_device.*use = std::clamp<int64_t>(integer_of(memory, name), 0, kMostBytes);
    }
    if (of_device.total() > 0) by_device[device] = of_device;
  }
  return by_device;
}

}  // namespace lockstep::profiler::internal
