// The `lockstep` program. Each subcommand stands in a file of its own and only translates its flags.
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>

#include <lockstep/base/exception_text.h>

#include "bench.h"
#include "doctor.h"
#include "help.h"
#include "hosts_arguments.h"
#include "inspect.h"
#include "run.h"
#include "scaling.h"
#include "sweep.h"
#include "top.h"

namespace {

constexpr int kUsageError = 2;

/// The command of the Python package (python/_lockstep_command.py) puts torch's libraries into
/// LD_LIBRARY_PATH, for this program alone.
void restore_library_path() {
  constexpr const char* kFormer = "LOCKSTEP_FORMER_LD_LIBRARY_PATH";
  const char* former = std::getenv(kFormer);
  if (former == nullptr) return;
  if (*former == '\0') {
    ::unsetenv("LD_LIBRARY_PATH");
  } else {
    ::setenv("LD_LIBRARY_PATH", former, 1);
  }
  ::unsetenv(kFormer);
}

/// Where LOCKSTEP_PROFILE is on_signal, the library has taken the signal for this process, before main(). It is for those
/// that `lockstep run` starts, to which the launcher passes it on.
void give_back_signal_of_profiles() {
  struct sigaction action = {};
  ::sigaction(SIGUSR2, nullptr, &action);
  if (action.sa_handler != SIG_IGN) ::signal(SIGUSR2, SIG_DFL);
}

int report(const CLI::App& program, const std::string& message) {
  const auto chosen = program.get_subcommands();
  const std::string name = chosen.empty() ? "lockstep" : "lockstep " + chosen.front()->get_name();
  std::cerr << name << ": error: " << message << "\nTry: " << name << " --help\n";
  return kUsageError;
}

/// The whole program; returns its exit status.
int run_command(int argc, char** argv) {
  CLI::App program("Lockstep: distributed data-parallel training for C++ programs that use LibTorch",
                   "lockstep");
  program.set_version_flag("--version", "lockstep " LOCKSTEP_VERSION);
  program.footer("\nlockstep COMMAND --help says more about each command.");
  program.require_subcommand(0, 1);  // `lockstep run bench` runs a program of that name
  int status = 0;
  give_back_signal_of_profiles();
  lockstep::cli::add_run(program, status);
  lockstep::cli::add_secret(program);
  lockstep::cli::add_bench(program, status);
  lockstep::cli::add_scaling(program, status, restore_library_path);
  lockstep::cli::add_sweep(program);
  lockstep::cli::add_inspect(program, status);
  lockstep::cli::add_top(program, status);
  lockstep::cli::add_doctor(program, status);
  lockstep::cli::add_help(program);

  if (argc < 2) {
    std::cout << program.help();
    return kUsageError;
  }
  try {
    std::vector<std::string> words(argv + 1, argv + argc);
    if (words.front() == "sweep") lockstep::cli::run_sweep({words.begin() + 1, words.end()});
    if (words.front() == "run" || words.front() == "scaling") {
      words = lockstep::cli::run_words(program, words);
    }
    // bench, doctor and, at first, scaling start this program again, which needs the libraries.
    if (words.front() == "run") restore_library_path();
    std::reverse(words.begin(), words.end());  // as CLI11 takes them
    program.parse(std::move(words));
    if (program.get_subcommands().empty()) throw CLI::RequiredError("a command");
    TORCH_CHECK(std::cout.flush(), "standard output can't be written: is the disk full?");
    return status;
  } catch (const CLI::Success& help_or_version) {
    return program.exit(help_or_version);
  } catch (const CLI::ParseError& error) {
    const std::string first = argv[1];
    if (program.get_subcommands().empty() && !first.starts_with('-')) {
      return report(program, "there is no command '" + first +
                                 "'; the commands are: " + lockstep::cli::command_names(program));
    }
    return report(program, error.what());
  } catch (const c10::ValueError& error) {
    return report(program, error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::cerr << "lockstep: error: " << lockstep::text_of(error)
              << "\nSee: docs/troubleshooting.md, which says what messages mean and what to do\n";
  }
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  const int status = run_command(argc, argv);
  std::fflush(nullptr);
  // Without the destructors of libtorch's static objects and the handlers of exit(3), which take a tenth of a second and do
  // nothing for a command.
  std::_Exit(status);
}
