#pragma once

#include <string>

#include <c10/util/Exception.h>

namespace lockstep::data {

/// What the c10::ValueError says that `function` throws, or "no ValueError".
template <class Function>
std::string value_error(Function function) {
  try {
    function();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no ValueError";
}

}  // namespace lockstep::data
