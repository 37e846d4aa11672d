#pragma once

#include <CLI/App.hpp>

namespace lockstep::cli {

/// Adds `lockstep bench` to the program. `status` becomes its exit status when it was chosen.
void add_bench(CLI::App& program, int& status);

}  // namespace lockstep::cli
