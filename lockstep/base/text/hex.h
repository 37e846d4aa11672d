#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace lockstep {

/// Hexadecimal, two digits a byte, lower-case.
std::string to_hex(std::span<const uint8_t> bytes);
std::string to_hex(std::string_view bytes);

/// The bytes of such a text; nothing for any other one. Takes upper-case digits, too.
std::optional<std::string> from_hex(std::string_view text);

}  // namespace lockstep
