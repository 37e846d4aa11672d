#pragma once

#include <functional>

#include <CLI/App.hpp>

namespace lockstep::cli {

/// Adds `lockstep scaling` to the program. `status` becomes its exit status when it was chosen;
/// `before_program` is called before the user's program is started for the first time.
void add_scaling(CLI::App& program, int& status, const std::function<void()>& before_program);

}  // namespace lockstep::cli
