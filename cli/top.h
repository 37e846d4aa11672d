#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <CLI/App.hpp>

namespace lockstep::cli {

/// Adds `lockstep top` to the program. `status` becomes its exit status when it was chosen.
void add_top(CLI::App& program, int& status);

/// For an agent: how the ranks that descend from this process do, as a HostReport's text, with its generation and whether
/// the host idles. To be called by one thread at a time; the first call takes half a second. `job`: its id, where none of
/// them runs.
std::function<std::string(uint64_t generation, bool idles)> make_host_report(const std::string& job);

}  // namespace lockstep::cli
