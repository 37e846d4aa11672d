#include <iostream>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>

#include <lockstep/checkpoint/inspect_checkpoint.h>

#include "inspect.h"

namespace lockstep::cli {
namespace {

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

}  // namespace

void add_inspect_checkpoint(CLI::App& inspect, int& status) {
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

}  // namespace lockstep::cli
