#pragma once

#include <cmath>
#include <cstdint>

#include <nlohmann/json.hpp>

namespace lockstep {

enum class NumberWords : uint8_t {
  kPython,    ///< nan, inf, -inf
  kProtobuf,  ///< NaN, Infinity, -Infinity
};

/// The number, or a word where JSON has no number for the value. Thread-safe.
inline nlohmann::json json_number(double value, NumberWords words = NumberWords::kPython) {
  if (std::isfinite(value)) return value;
  const bool python = words == NumberWords::kPython;
  if (std::isnan(value)) return python ? "nan" : "NaN";
  if (value > 0) return python ? "inf" : "Infinity";
  return python ? "-inf" : "-Infinity";
}

}  // namespace lockstep
