#pragma once

#include <string>
#include <vector>

#include <CLI/App.hpp>

namespace lockstep::cli {

/// Adds `lockstep sweep` to the program, for its help, manual page and completion.
void add_sweep(CLI::App& program);

/// `lockstep sweep` with these words: replaces this process by Python, whose package lockstep_sweep reads them.
/// Throws std::system_error when there is no Python.
[[noreturn]] void run_sweep(const std::vector<std::string>& words);

}  // namespace lockstep::cli
