#pragma once

#include <CLI/App.hpp>

namespace lockstep::cli {

/// Adds `lockstep run` to the program. `status` becomes its exit status when it was chosen.
void add_run(CLI::App& program, int& status);

}  // namespace lockstep::cli
