#pragma once

#include <CLI/App.hpp>

namespace lockstep::cli {

/// Adds `lockstep inspect` to the program. `status` becomes its exit status when it was chosen.
void add_inspect(CLI::App& program, int& status);

/// Adds `checkpoint` to `lockstep inspect`.
void add_inspect_checkpoint(CLI::App& inspect, int& status);

/// Adds `schedule` to `lockstep inspect`.
void add_inspect_schedule(CLI::App& inspect);

/// Adds `trace` to `lockstep inspect`.
void add_inspect_trace(CLI::App& inspect);

}  // namespace lockstep::cli
