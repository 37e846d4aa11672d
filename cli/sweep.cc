#include "sweep.h"

#include <cerrno>
#include <filesystem>
#include <string>
#include <system_error>
#include <unistd.h>
#include <vector>

#include <CLI/CLI.hpp>

#include <lockstep/base/environment.h>

namespace lockstep::cli {
namespace {

constexpr const char* kSweepExamples = R"(
Examples:
  lockstep sweep --param lr=log:1e-4:1e-1 --param batch=choice:32,64 --metric validation/loss \
      --trials 30 -- ./train --lr {lr} --batch-size {batch}
  lockstep sweep --file sweep.toml                      the same from a file
  lockstep sweep status, best, plot or resume [FOLDER]  of one that runs, or has ended

Optuna chooses the parameters, and each trial is a job of lockstep run. It is a part of Lockstep's Python
package, of the Python that LOCKSTEP_SWEEP_PYTHON names, or else python3. lockstep sweep --help lists its options;
docs/sweep.md is the guide.)";

// Modules do not come from the folder in which the command is typed, where a random.py may lie.
constexpr const char* kStart = R"(
import sys
if '' in sys.path: sys.path.remove('')
try:
    from lockstep_sweep.__main__ import main
except ModuleNotFoundError as error:
    if error.name != 'lockstep_sweep': raise
    sys.exit(f"lockstep sweep: error: {sys.executable} has not Lockstep's Python package, of which it is a part; "
             "do: pip install './python[sweep]' in Lockstep's repository, or name a Python that has it in "
             "LOCKSTEP_SWEEP_PYTHON")
sys.exit(main(sys.argv[1:]))
)";

}  // namespace

void add_sweep(CLI::App& program) {
  CLI::App* sweep = program.add_subcommand("sweep", "Look for a program's best hyperparameters");
  sweep->footer(kSweepExamples);
}

void run_sweep(const std::vector<std::string>& words) {
  const std::string python = environment::text("LOCKSTEP_SWEEP_PYTHON").value_or("python3");
  std::vector<std::string> command = {python, "-c", kStart, "--launcher",
                                      std::filesystem::read_symlink("/proc/self/exe").string()};
  command.insert(command.end(), words.begin(), words.end());
  std::vector<char*> arguments;
  for (std::string& word : command) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  ::execvp(python.c_str(), arguments.data());
  throw std::system_error(errno, std::generic_category(),
                          "sweep: can't start '" + python + "'; name a Python in LOCKSTEP_SWEEP_PYTHON");
}

}  // namespace lockstep::cli
