#include <algorithm>
#include <array>
#include <cctype>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/parallel/pipeline/schedule.h>

namespace lockstep {
namespace {

using Row = std::vector<std::optional<PipelineAction>>;

/// Stages times the sum of micro-batches and ranks, which bounds idle steps too: a table must fit into memory.
constexpr int64_t kMostSteps = int64_t{1} << 24;

constexpr std::array<std::pair<PipelineSchedule, const char*>, 4> kNames{{
    {PipelineSchedule::kGPipe, "GPipe"},
    {PipelineSchedule::k1F1B, "1F1B"},
    {PipelineSchedule::kInterleaved1F1B, "Interleaved1F1B"},
    {PipelineSchedule::kInterleavedZeroBubble, "InterleavedZeroBubble"},
}};

void idle(Row& row, int64_t steps) {
  row.insert(row.end(), static_cast<size_t>(std::max<int64_t>(steps, 0)), std::nullopt);
}

Row gpipe_row(int64_t rank, const PipelineShape& shape) {
  Row row;
  idle(row, rank);
  for (int64_t m = 0; m < shape.micro_batches; ++m) row.push_back({{rank, ComputationType::kForward, m}});
  idle(row, 3 * (shape.ranks - 1 - rank));
  for (int64_t m = 0; m < shape.micro_batches; ++m)
    row.push_back({{rank, ComputationType::kFullBackward, m}});
  return row;
}

Row one_forward_one_backward_row(int64_t rank, const PipelineShape& shape) {
  const int64_t following = shape.ranks - 1 - rank;  // stages after this one
  const int64_t warmup = std::min(following, shape.micro_batches);
  Row row;
  idle(row, rank);
  for (int64_t m = 0; m < warmup; ++m) row.push_back({{rank, ComputationType::kForward, m}});
  idle(row, following - warmup + 2 * following);
  for (int64_t m = 0; m < shape.micro_batches; ++m) {
    if (warmup + m < shape.micro_batches) {
      row.push_back({{rank, ComputationType::kForward, warmup + m}});
    } else {
      idle(row, 1);  // where the stages after this one still have a forward
    }
    row.push_back({{rank, ComputationType::kFullBackward, m}});
  }
  return row;
}

/// Micro-batches go through a rank's stages in rounds: all of a round through the first stage, then through the next.
struct Rounds {
  int64_t number;
  int64_t micro_batches;  // of one round

  static Rounds of(PipelineSchedule schedule, const PipelineShape& shape) {
    const int64_t number = std::max<int64_t>(1, shape.micro_batches / shape.ranks);
    const int64_t rest = shape.micro_batches % number;
    TORCH_CHECK_VALUE(rest == 0, to_string(schedule), " goes in ", number, " rounds over ", shape.ranks,
                      " ranks with ", shape.micro_batches,
                      " micro-batches, which must be a multiple of that number; give ",
                      shape.micro_batches - rest, " or ", shape.micro_batches - rest + number,
                      ", or a multiple of the number of ranks");
    return {number, shape.micro_batches / number};
  }
};

Row interleaved_row(int64_t rank, const PipelineShape& shape, const Rounds& rounds, bool zero_bubble) {
  const int64_t stages = shape.stages_per_rank;
  const int64_t all = stages * shape.micro_batches;  // forwards of this rank
  const int64_t following = shape.ranks - 1 - rank;  // ranks after this one
  const int64_t warmup =
      std::min((stages - 1) * rounds.micro_batches + (zero_bubble ? 1 : 2) * following, all);
  Row row;
  // The rank's k-th forward, and its k-th backward, which goes through the rank's stages from the last to the first.
  const auto add = [&](ComputationType type, int64_t k) {
    const int64_t forward_index = k / rounds.micro_batches % stages;
    const int64_t index = type == ComputationType::kForward ? forward_index : stages - 1 - forward_index;
    const int64_t round = k / (rounds.micro_batches * stages);
    row.push_back(
        {{index * shape.ranks + rank, type, round * rounds.micro_batches + k % rounds.micro_batches}});
  };
  idle(row, rank);
  for (int64_t k = 0; k < warmup; ++k) add(ComputationType::kForward, k);
  if (warmup > 0) idle(row, zero_bubble ? following : stages * shape.ranks + 2 * following - (warmup + rank));
  int64_t weights = 0;
  for (int64_t k = 0; k < all; ++k) {
    if (warmup + k < all) {
      add(ComputationType::kForward, warmup + k);
    } else if (!zero_bubble) {
      idle(row, 1);
    }
    add(zero_bubble ? ComputationType::kBackwardInput : ComputationType::kFullBackward, k);
    if (zero_bubble && k >= rank) add(ComputationType::kBackwardWeight, weights++);
  }
  while (zero_bubble && weights < all) add(ComputationType::kBackwardWeight, weights++);
  return row;
}

/// Delays each forward to the time step after that of the same micro-batch in the stage before.
PipelineTable with_forwards_in_order(const PipelineTable& rows, const PipelineShape& shape) {
  const auto place = [&](int64_t stage, int64_t micro_batch) {
    return static_cast<size_t>(stage * shape.micro_batches + micro_batch);
  };
  std::vector<bool> done(place(shape.ranks * shape.stages_per_rank, 0));
  PipelineTable delayed(rows.size());
  std::vector<size_t> next(rows.size());
  for (bool any = true; any;) {
    any = false;
    std::vector<size_t> done_now;
    for (size_t rank = 0; rank < rows.size(); ++rank) {
      if (next[rank] == rows[rank].size()) continue;
      any = true;
      const auto& action = rows[rank][next[rank]];
      const bool is_forward = action && action->type == ComputationType::kForward;
      if (is_forward && action->stage > 0 && !done[place(action->stage - 1, action->micro_batch)]) {
        idle(delayed[rank], 1);
        continue;
      }
      if (is_forward) done_now.push_back(place(action->stage, action->micro_batch));
      delayed[rank].push_back(action);
      ++next[rank];
    }
    for (const size_t each : done_now) done[each] = true;
  }
  return delayed;
}

}  // namespace

PipelineTable pipeline_table(PipelineSchedule schedule, const PipelineShape& shape) {
  const std::pair<const char*, int64_t> numbers[] = {{"ranks", shape.ranks},
                                                     {"stages a rank", shape.stages_per_rank},
                                                     {"micro-batches", shape.micro_batches}};
  for (const auto& [name, value] : numbers) {
    TORCH_CHECK_VALUE(value >= 1, "the schedule ", to_string(schedule), " was asked for with ", value, " ",
                      name, "; there must be at least one");
    TORCH_CHECK_VALUE(value <= kMostSteps, "the schedule ", to_string(schedule), " was asked for with ",
                      value, " ", name, "; there can be ", kMostSteps, " at most");
  }
  const int64_t stages = shape.ranks * shape.stages_per_rank;
  TORCH_CHECK_VALUE(stages <= kMostSteps && stages * (shape.micro_batches + shape.ranks) <= kMostSteps,
                    "the schedule ", to_string(schedule), " of ", stages, " stages for ", shape.micro_batches,
                    " micro-batches is too large for a table");
  const bool is_interleaved =
      schedule == PipelineSchedule::kInterleaved1F1B || schedule == PipelineSchedule::kInterleavedZeroBubble;
  TORCH_CHECK_VALUE(is_interleaved || shape.stages_per_rank == 1, "the schedule ", to_string(schedule),
                    " has one stage on each rank, not ", shape.stages_per_rank,
                    "; Interleaved1F1B and InterleavedZeroBubble take several");
  PipelineTable rows;
  for (int64_t rank = 0; rank < shape.ranks; ++rank) {
    if (schedule == PipelineSchedule::kGPipe) {
      rows.push_back(gpipe_row(rank, shape));
    } else if (schedule == PipelineSchedule::k1F1B) {
      rows.push_back(one_forward_one_backward_row(rank, shape));
    } else {
      rows.push_back(interleaved_row(rank, shape, Rounds::of(schedule, shape),
                                     schedule == PipelineSchedule::kInterleavedZeroBubble));
    }
  }
  return schedule == PipelineSchedule::kInterleavedZeroBubble ? with_forwards_in_order(rows, shape) : rows;
}

int64_t rank_of_stage(int64_t stage, int64_t ranks) {
  return stage % ranks;
}

int64_t peak_activations(const PipelineTable& table, int64_t rank) {
  int64_t kept = 0;
  int64_t peak = 0;
  for (const auto& action : table.at(static_cast<size_t>(rank))) {
    if (!action || action->type == ComputationType::kBackwardInput) continue;
    kept += action->type == ComputationType::kForward ? 1 : -1;
    peak = std::max(peak, kept);
  }
  return peak;
}

std::string to_string(ComputationType type) {
  switch (type) {
    case ComputationType::kForward:
      return "F";
    case ComputationType::kFullBackward:
      return "B";
    case ComputationType::kBackwardInput:
      return "I";
    case ComputationType::kBackwardWeight:
      return "W";
  }
  return "?";
}

std::string to_string(PipelineSchedule schedule) {
  for (const auto& [each, name] : kNames) {
    if (each == schedule) return name;
  }
  return "unknown";
}

PipelineSchedule parse_pipeline_schedule(std::string_view name) {
  const auto same_letter = [](char a, char b) {
    return std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b));
  };
  std::string names;
  for (const auto& [schedule, each] : kNames) {
    if (std::ranges::equal(std::string_view(each), name, same_letter)) return schedule;
    names += (names.empty() ? "" : ", ") + std::string(each);
  }
  TORCH_CHECK_VALUE(false, "there is no schedule of pipelines '", name, "'; there are ", names);
}

std::string to_string(const PipelineAction& action) {
  return std::to_string(action.stage) + to_string(action.type) + std::to_string(action.micro_batch);
}

}  // namespace lockstep
