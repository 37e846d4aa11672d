#pragma once

#include <string>

#include <lockstep/parallel/pipeline/schedule.h>

/// A schedule for people and programs, at the times of theory: forward takes 1, the backward of the inputs 1, that of the
/// weights 1, the full backward 2, messages nothing. Pure functions; they throw what pipeline_table() throws.
namespace lockstep::pipeline {

/// One line a rank, one column a unit of time: "0F1" is stage 0, forward, micro-batch 1; "=" goes on with the action before,
/// "." is idle. Above it the share of idle time, beside it the most activations that a rank keeps.
std::string describe(PipelineSchedule schedule, const PipelineShape& shape);
/// {"schedule", "ranks", "stages_per_rank", "micro_batches", "bubble", "end", "rows": [{"rank", "peak_activations",
/// "actions": [{"stage", "type", "micro_batch", "begin", "end"}]}]}
std::string to_json(PipelineSchedule schedule, const PipelineShape& shape);
/// A picture: a row a rank, time from left to right.
std::string to_svg(PipelineSchedule schedule, const PipelineShape& shape);

}  // namespace lockstep::pipeline
