// The `lockstep` program. Each subcommand stands in a file of its own and only translates its flags.
#include <exception>
#include <iostream>

#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>

#include "bench.h"
#include "doctor.h"
#include "inspect.h"
#include "run.h"

namespace {

constexpr int kUsageError = 2;

int report(const CLI::App& program, const std::string& message) {
  const auto chosen = program.get_subcommands();
  const std::string name = chosen.empty() ? "lockstep" : "lockstep " + chosen.front()->get_name();
  std::cerr << name << ": error: " << message << "\nTry: " << name << " --help\n";
  return kUsageError;
}

std::string command_names(const CLI::App& program) {
  std::string names;
  for (const CLI::App* command : program.get_subcommands([](const CLI::App*) { return true; })) {
    names += (names.empty() ? "" : ", ") + command->get_name();
  }
  return names;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App program("Lockstep: distributed data-parallel training for C++ programs that use LibTorch",
                   "lockstep");
  program.set_version_flag("--version", "lockstep " LOCKSTEP_VERSION);
  program.footer("\nlockstep COMMAND --help says more about each command.");
  int status = 0;
  lockstep::cli::add_run(program, status);
  lockstep::cli::add_bench(program, status);
  lockstep::cli::add_inspect(program, status);
  lockstep::cli::add_doctor(program, status);

  if (argc < 2) {
    std::cout << program.help();
    return kUsageError;
  }
  try {
    program.parse(argc, argv);
    if (program.get_subcommands().empty()) throw CLI::RequiredError("a command");
    return status;
  } catch (const CLI::Success& help_or_version) {
    return program.exit(help_or_version);
  } catch (const CLI::ParseError& error) {
    const std::string first = argv[1];
    if (program.get_subcommands().empty() && !first.starts_with('-')) {
      return report(program,
                    "there is no command '" + first + "'; the commands are: " + command_names(program));
    }
    return report(program, error.what());
  } catch (const c10::ValueError& error) {
    return report(program, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    std::cerr << "lockstep: error: " << error.what_without_backtrace() << '\n';
  } catch (const std::exception& error) {
    std::cerr << "lockstep: error: " << error.what() << '\n';
  }
  return 1;
}
