#pragma once

#include <string>

#include <nlohmann/json.hpp>

namespace lockstep {

/// A JSON value's text, on one line unless `indent` is 0 or more. Bytes of strings that are no UTF-8 become U+FFFD: names and
/// errors are bytes, and must not keep a text from being written. Thread-safe.
template <class Json = nlohmann::json>
std::string json_text(const Json& value, int indent = -1) {
  return value.dump(indent, ' ', false, Json::error_handler_t::replace);
}

}  // namespace lockstep
