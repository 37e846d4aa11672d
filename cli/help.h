#pragma once

#include <string>

#include <CLI/App.hpp>

namespace lockstep::cli {

/// The names of an App's commands, "run, bench, …".
std::string command_names(const CLI::App& app);

/// Adds `lockstep help`, and `lockstep completion` and `lockstep man`, which print a completion script and a
/// manual page. All three are made of the program's own commands and options.
void add_help(CLI::App& program);

}  // namespace lockstep::cli
