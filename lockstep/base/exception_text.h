#pragma once

#include <exception>
#include <string>

namespace lockstep {

/// What an exception says, c10's without its backtrace and those of errors that its message quotes. The pointer is not null.
/// Thread-safe.
std::string text_of(const std::exception& error);
std::string text_of(const std::exception_ptr& error);

}  // namespace lockstep
