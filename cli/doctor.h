#pragma once

#include <CLI/App.hpp>

namespace lockstep::cli {

/// Adds `lockstep doctor` to the program. `status` becomes its exit status when it was chosen.
void add_doctor(CLI::App& program, int& status);

}  // namespace lockstep::cli
