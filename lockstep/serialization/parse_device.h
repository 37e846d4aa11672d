#pragma once

#include <algorithm>
#include <exception>
#include <optional>
#include <string>

#include <c10/core/Device.h>

namespace lockstep::serialization {

/// The device of a name such as "cuda:1". None where torch knows no such device, or would take another one for it: of an index
/// c10::Device keeps 8 bits, so that "cuda:300" is cuda:44 to it.
inline std::optional<c10::Device> parse_device(const std::string& name) {
  try {
    const c10::Device device(name);
    const std::string index = device.has_index() ? ":" + std::to_string(device.index()) : "";
    return name.substr(std::min(name.find(':'), name.size())) == index ? std::optional(device) : std::nullopt;
  } catch (const std::exception&) {  // c10::Error, and those of std::stoi for huge indices
    return std::nullopt;
  }
}

}  // namespace lockstep::serialization
