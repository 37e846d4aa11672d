#include "inspect.h"

#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <lockstep/flight/analysis.h>
#include <lockstep/flight/records.h>

#include "help.h"

namespace lockstep::cli {
namespace {

constexpr const char* kFlightExamples = R"(
Examples:
  lockstep inspect flight /tmp/flight          who waits for whom, and where the ranks diverged
  lockstep inspect flight --json /tmp/flight   the same for programs
  lockstep inspect flight gathered/*           records that were brought here from several hosts
  kill -USR1 PID                               makes a rank that hangs write its record

The records of a job are rank_0.json, rank_1.json, …; the program's log says where it wrote them, and
LOCKSTEP_FLIGHT_DIR chooses the directory. They are written on a timeout, on abort() and failure, and on
SIGUSR1. The more ranks wrote one, the more can be said.
Exit status: 0 nothing is wrong, 1 a hang, a failure or a divergence was found, 2 DIR can't be read.)";

void inspect_flight(const std::vector<std::string>& directories, bool json, int& status) {
  const auto analysis = flight::analyze(flight::read_directories(directories));
  std::cout << (json ? flight::to_json(analysis) : flight::describe(analysis)) << std::flush;
  status = analysis.problem() ? 1 : 0;
}

}  // namespace

void add_inspect(CLI::App& program, int& status) {
  CLI::App* inspect = program.add_subcommand(
      "inspect", "Say in words what files of Lockstep hold, and what a pipeline will do");
  inspect->footer("\nlockstep inspect KIND --help says more about each kind.");
  inspect->callback([inspect] {
    if (!inspect->get_subcommands().empty()) return;
    const std::vector<std::string> words = inspect->remaining();
    if (words.empty()) throw CLI::RequiredError("KIND (" + command_names(*inspect) + ")");
    throw CLI::ExtrasError(std::vector<std::string>{words.front()});
  });
  CLI::App* flight = inspect->add_subcommand("flight", "Who waits for whom, from the ranks' flight records");
  flight->footer(kFlightExamples);
  auto directories = std::make_shared<std::vector<std::string>>();
  auto json = std::make_shared<bool>(false);
  flight->add_option("DIR", *directories, "The directory with the records, or several: one of each host")
      ->envname("LOCKSTEP_FLIGHT_DIR")
      ->required();
  flight->add_flag("--json", *json, "Write JSON");
  flight->callback([directories, json, &status] { inspect_flight(*directories, *json, status); });
#ifdef LOCKSTEP_CLI_TRAINING  // the Python package is built without what trains
  add_inspect_checkpoint(*inspect, status);
  add_inspect_schedule(*inspect);
  add_inspect_trace(*inspect);
#endif
}

}  // namespace lockstep::cli
