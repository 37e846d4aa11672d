#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// In which order the ranks of a pipeline compute; the classes ScheduleGPipe, Schedule1F1B, … of
/// torch.distributed.pipelining.
enum class PipelineSchedule { kGPipe, k1F1B, kInterleaved1F1B, kInterleavedZeroBubble };

/// kBackwardInput gives the gradients of a stage's inputs, which the stage before waits for, and kBackwardWeight later those
/// of its parameters; kFullBackward gives both.
enum class ComputationType { kForward, kFullBackward, kBackwardInput, kBackwardWeight };

/// What a rank does with one micro-batch in one of its stages.
struct PipelineAction {
  int64_t stage = 0;
  ComputationType type = ComputationType::kForward;
  int64_t micro_batch = 0;

  bool operator==(const PipelineAction&) const = default;
};

/// By rank, by time step; none where the rank is idle. A rank runs its actions in this order, each as soon as what it needs
/// has arrived; the time steps themselves are torch's, and bind no runner.
using PipelineTable = std::vector<std::vector<std::optional<PipelineAction>>>;

/// Stages are numbered as the data go through them: ranks * stages_per_rank of them.
struct PipelineShape {
  int64_t ranks = 1;
  int64_t stages_per_rank = 1;
  int64_t micro_batches = 1;
};

/// The actions of all ranks. A pure function. Each action is there once, and the rows can be run to their end,
/// each in its order, where sends do not wait for their receivers. Throws c10::ValueError: for numbers below 1, and for more than
/// fits into memory (2^24 is the most for stages times the sum of micro-batches and ranks); for several stages a rank
/// with kGPipe and k1F1B; and with kInterleaved1F1B and kInterleavedZeroBubble for a number of micro-batches that is not a
/// multiple of the number of rounds, max(1, micro_batches / ranks). Tables are those of
/// torch/distributed/pipelining/schedules.py, without its REDUCE_GRAD; k1F1B also takes fewer micro-batches than stages,
/// which torch refuses.
PipelineTable pipeline_table(PipelineSchedule schedule, const PipelineShape& shape);

/// Stages go round the ranks.
int64_t rank_of_stage(int64_t stage, int64_t ranks);

/// The most micro-batches, counted for each of its stages, of which the rank keeps activations at one time: from the forward
/// to the end of the full backward, or of the backward of the weights.
int64_t peak_activations(const PipelineTable& table, int64_t rank);

/// torch's letter: "F", "B" (the full backward), "I" (of the inputs), "W" (of the weights).
std::string to_string(ComputationType type);
/// "GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble".
std::string to_string(PipelineSchedule schedule);
/// The reverse, whatever the case of letters. Throws c10::ValueError, which names those that there are.
PipelineSchedule parse_pipeline_schedule(std::string_view name);
/// As torch writes it: "2F0" is stage 2, forward, micro-batch 0.
std::string to_string(const PipelineAction& action);

}  // namespace lockstep
