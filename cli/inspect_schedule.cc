#include <fstream>
#include <iostream>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>

#include <lockstep/parallel/pipeline/schedule_view.h>

#include "inspect.h"

namespace lockstep::cli {
namespace {

constexpr const char* kScheduleExamples = R"(
Examples:
  lockstep inspect schedule 1F1B --ranks 4 --micro-batches 8               who computes what when, what is idle
  lockstep inspect schedule Interleaved1F1B --ranks 4 --stages-per-rank 2 --micro-batches 8 --svg schedule.svg
  lockstep inspect schedule InterleavedZeroBubble --ranks 4 --micro-batches 8 --json

Schedules: GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble. 2F0 is stage 2, forward of micro-batch 0; B is backward, which
InterleavedZeroBubble splits into I (gradients of the inputs) and W (of the weights). docs/pipelines.md says which is for what.)";

struct ScheduleWishes {
  std::string name;
  PipelineShape shape;
  std::string svg;
  bool json = false;
};

void inspect_schedule(const ScheduleWishes& wishes) {
  const auto schedule = parse_pipeline_schedule(wishes.name);
  if (!wishes.svg.empty()) {
    std::ofstream file(wishes.svg);
    file << pipeline::to_svg(schedule, wishes.shape) << std::flush;
    TORCH_CHECK_VALUE(file.good(), "the picture can't be written to '", wishes.svg,
                      "'; give --svg a file in a folder that is there");
  }
  std::cout << (wishes.json ? pipeline::to_json(schedule, wishes.shape)
                            : pipeline::describe(schedule, wishes.shape))
            << std::flush;
}

}  // namespace

void add_inspect_schedule(CLI::App& inspect) {
  CLI::App* schedule =
      inspect.add_subcommand("schedule", "Which rank of a pipeline computes what when, before it is built");
  schedule->footer(kScheduleExamples);
  auto wishes = std::make_shared<ScheduleWishes>();
  schedule->add_option("NAME", wishes->name, "The schedule, by the name that PyTorch gives it")->required();
  schedule->add_option("--ranks", wishes->shape.ranks, "The ranks that the pipeline goes over")
      ->type_name("P")
      ->required();
  schedule->add_option("--micro-batches", wishes->shape.micro_batches, "The micro-batches of one step")
      ->type_name("M")
      ->required();
  schedule->add_option("--stages-per-rank", wishes->shape.stages_per_rank, "The stages of each rank")
      ->type_name("S")
      ->capture_default_str();
  schedule->add_option("--svg", wishes->svg, "Also draw it there")->type_name("FILE");
  schedule->add_flag("--json", wishes->json, "Write JSON");
  schedule->callback([wishes] { inspect_schedule(*wishes); });
}

}  // namespace lockstep::cli
