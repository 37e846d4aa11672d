#pragma once

#include <exception>
#include <string>
#include <typeinfo>

#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <gtest/gtest.h>

namespace lockstep::testing {

/// What the error says that `action` must throw, without backtrace. Fails the test, and returns nothing, when
/// it throws another type or nothing.
template <class Error = c10::DistBackendError, class Action>
std::string message_of(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "threw another error, " << c10::demangle(typeid(error).name()) << ": " << error.what();
    return "";
  }
  ADD_FAILURE() << "should have thrown";
  return "";
}

}  // namespace lockstep::testing
