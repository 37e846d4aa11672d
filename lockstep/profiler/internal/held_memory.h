#pragma once

#include <cstdint>
#include <map>
#include <string>

#include <nlohmann/json.hpp>

#include <lockstep/profiler/trace_analysis.h>

/// What a training holds when a recording begins, which is in the trace's header, for no event tells of it.
namespace lockstep::profiler::internal {

/// By device, as MemoryPeak names it.
using HeldByDevice = std::map<std::string, HeldMemory>;

/// A device by the numbers of torch: c10::DeviceType, and the index.
std::string name_of_device(int64_t type, int64_t index);

/// What held_tensors() gives in this thread, each byte once.
HeldByDevice held_memory();

/// {"CPU": {"parameters": 8, "gradients": 8}}, without zeros.
nlohmann::ordered_json json_of_held(const HeldMemory& held);
nlohmann::ordered_json json_of_held(const HeldByDevice& held);
/// Empty where it is something else.
HeldByDevice held_of_json(const nlohmann::json& held);

}  // namespace lockstep::profiler::internal
