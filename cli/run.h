#pragma once

#include <string>
#include <vector>

#include <CLI/App.hpp>

namespace lockstep::cli {

/// Adds `lockstep run` to the program. `status` becomes its exit status when it was chosen.
void add_run(CLI::App& program, int& status);

/// The words of a command line "run …" as CLI11 takes them: of one dash it knows only single letters, not
/// mpirun's "-np", and a "--" before PROGRAM ends the command for it. The words from PROGRAM on are left as
/// they are.
std::vector<std::string> run_words(const CLI::App& program, std::vector<std::string> words);

}  // namespace lockstep::cli
