#pragma once

#include <string_view>

#include <c10/core/Device.h>

namespace lockstep {

/// The device with its number, if its kind has numbers. Throws c10::ValueError, whose message begins with
/// `who`, for a device that is not there. Thread-safe.
c10::Device existing_device(c10::Device device, std::string_view who);

}  // namespace lockstep
