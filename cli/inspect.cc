#include "inspect.h"

#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <lockstep/checkpoint/inspect_checkpoint.h>
#include <lockstep/collectives/flight_analysis.h>
#include <lockstep/collectives/flight_records.h>

namespace lockstep::cli {
namespace {

constexpr const char* kFlightExamples = R"(
Examples:
  lockstep inspect flight /tmp/flight          who waits for whom, and where the ranks diverged
  lockstep inspect flight --json /tmp/flight   the same for programs
  kill -USR1 PID                               makes a rank that hangs write its record

The records of a job are rank_0.json, rank_1.json, …; the program's log says where it wrote them, and
LOCKSTEP_FLIGHT_DIR chooses the directory. They are written on a timeout, on abort() and failure, and on
SIGUSR1. The more ranks wrote one, the more can be said.
Exit status: 0 nothing is wrong, 1 a hang, a failure or a divergence was found, 2 DIR can't be read.)";

void inspect_flight(const std::string& directory, bool json, int& status) {
  const auto analysis = flight::analyze(flight::read_directory(directory));
  std::cout << (json ? flight::to_json(analysis) : flight::describe(analysis)) << std::flush;
  status = analysis.problem() ? 1 : 0;
}

constexpr const char* kCheckpointExamples = R"(
Examples:
  lockstep inspect checkpoint run/step-00000500              what it holds, and whether it is whole
  lockstep inspect checkpoint run                            a line for each checkpoint in run
  lockstep inspect checkpoint --no-verify run                without reading the tensors
  lockstep inspect checkpoint run/step-00000500 --compare run/step-00001000
                                                             which tensors differ, and by how much at most

Exit status: 0 all is well, or the two do not differ; 1 damage, an incomplete checkpoint, or a difference; 2 there
is no checkpoint, or it can't be read.)";

void inspect_checkpoint_files(const std::string& directory, const std::string& other,
                              const InspectCheckpointOptions& options, int& status) try {
  const CheckpointInspection inspection =
      other.empty() ? inspect_checkpoint(directory, options) : compare_checkpoints(directory, other, options);
  std::cout << inspection.text << std::flush;
  status = inspection.problem ? 1 : 0;
} catch (
    const CheckpointError& error) {  // 1 would mean that there is a checkpoint, and something wrong with it
  std::cerr << "lockstep: error: " << error.what_without_backtrace() << std::endl;
  status = 2;
}

void add_checkpoint(CLI::App& inspect, int& status) {
  CLI::App* checkpoint =
      inspect.add_subcommand("checkpoint", "What checkpoints hold, whether they are whole, how two differ");
  checkpoint->footer(kCheckpointExamples);
  auto directory = std::make_shared<std::string>();
  auto other = std::make_shared<std::string>();
  auto options = std::make_shared<InspectCheckpointOptions>();
  checkpoint->add_option("DIR", *directory, "A checkpoint, or the directory with many")->required();
  checkpoint->add_option("--compare", *other, "Another checkpoint: say in what it differs from DIR");
  checkpoint->add_flag("!--no-verify", options->verify, "Look at the manifest and the files' sizes alone");
  checkpoint->add_flag("--json", options->json, "Write JSON");
  checkpoint->callback([directory, other, options, &status] {
    inspect_checkpoint_files(*directory, *other, *options, status);
  });
}

}  // namespace

void add_inspect(CLI::App& program, int& status) {
  CLI::App* inspect = program.add_subcommand("inspect", "Say in words what files of Lockstep hold");
  inspect->footer("\nlockstep inspect KIND --help says more about each kind.");
  inspect->callback([inspect] {
    if (!inspect->get_subcommands().empty()) return;
    const std::vector<std::string> words = inspect->remaining();
    if (words.empty()) throw CLI::RequiredError("KIND (flight or checkpoint)");
    throw CLI::ExtrasError(std::vector<std::string>{words.front()});
  });
  CLI::App* flight = inspect->add_subcommand("flight", "Who waits for whom, from the ranks' flight records");
  flight->footer(kFlightExamples);
  auto directory = std::make_shared<std::string>();
  auto json = std::make_shared<bool>(false);
  flight->add_option("DIR", *directory, "The directory with the records")
      ->envname("LOCKSTEP_FLIGHT_DIR")
      ->required();
  flight->add_flag("--json", *json, "Write JSON");
  flight->callback([directory, json, &status] { inspect_flight(*directory, *json, status); });
  add_checkpoint(*inspect, status);
}

}  // namespace lockstep::cli
