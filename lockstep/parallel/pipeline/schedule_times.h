#pragma once

#include <functional>
#include <vector>

#include <lockstep/parallel/pipeline/schedule.h>

namespace lockstep {

/// How long one stage computes with one micro-batch, in any unit; from theory, backward takes twice as long as forward.
struct PipelineDurations {
  double forward = 1;
  double backward_input = 1;
  double backward_weight = 1;  // the full backward takes the sum of both

  double of(ComputationType type) const;
};

struct TimedPipelineAction {
  PipelineAction action;
  double begin = 0;
  double end = 0;
};

/// When a table's actions run at the earliest, if messages take no time.
struct PipelineTimes {
  std::vector<std::vector<TimedPipelineAction>> ranks;
  double end = 0;
  /// The share of the ranks' time, from the first action of all to the last, in which they are idle: 0 to 1.
  double bubble = 0;
};

/// Runs each row in its order. A pure function. Throws c10::ValueError, naming the action and what it waits for, when the
/// rows can't be run to their end: an action needs one that is not there, or rows wait for each other.
PipelineTimes pipeline_times(const PipelineTable& table, const PipelineDurations& durations = {});
/// The same with a duration of each action's own.
PipelineTimes pipeline_times(const PipelineTable& table,
                             const std::function<double(const PipelineAction&)>& duration_of);

}  // namespace lockstep
