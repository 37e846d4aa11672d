#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <tuple>

#include <c10/util/Exception.h>

#include <lockstep/parallel/pipeline/schedule_times.h>

namespace lockstep {
namespace {

using Key = std::tuple<int64_t, ComputationType, int64_t>;  // stage, type, micro-batch

Key key_of(const PipelineAction& action) {
  return {action.stage, action.type, action.micro_batch};
}

/// The actions that must have ended before this one begins.
std::vector<PipelineAction> needs(const PipelineAction& action, int64_t last_stage) {
  const auto [stage, type, m] = action;
  switch (type) {
    case ComputationType::kForward:
      if (stage == 0) return {};
      return {{stage - 1, type, m}};
    case ComputationType::kFullBackward:
    case ComputationType::kBackwardInput:
      if (stage == last_stage) return {{stage, ComputationType::kForward, m}};
      return {{stage, ComputationType::kForward, m}, {stage + 1, type, m}};
    case ComputationType::kBackwardWeight:
      return {{stage, ComputationType::kBackwardInput, m}};
  }
  return {};
}

}  // namespace

double PipelineDurations::of(ComputationType type) const {
  switch (type) {
    case ComputationType::kForward:
      return forward;
    case ComputationType::kFullBackward:
      return backward_input + backward_weight;
    case ComputationType::kBackwardInput:
      return backward_input;
    case ComputationType::kBackwardWeight:
      return backward_weight;
  }
  return 0;
}

PipelineTimes pipeline_times(const PipelineTable& table, const PipelineDurations& durations) {
  return pipeline_times(table, [&](const PipelineAction& action) { return durations.of(action.type); });
}

PipelineTimes pipeline_times(const PipelineTable& table,
                             const std::function<double(const PipelineAction&)>& duration_of) {
  std::vector<std::vector<PipelineAction>> rows;
  int64_t last_stage = 0;
  for (const auto& row : table) {
    rows.emplace_back();
    for (const auto& action : row) {
      if (!action) continue;
      rows.back().push_back(*action);
      last_stage = std::max(last_stage, action->stage);
    }
  }
  PipelineTimes times;
  times.ranks.resize(rows.size());
  std::map<Key, double> ends;
  const auto missing = [&](const PipelineAction& action) -> std::optional<PipelineAction> {
    for (const auto& need : needs(action, last_stage)) {
      if (!ends.contains(key_of(need))) return need;
    }
    return std::nullopt;
  };
  double busy = 0;
  for (bool any = true; any;) {
    any = false;
    for (size_t rank = 0; rank < rows.size(); ++rank) {
      auto& done = times.ranks[rank];
      while (done.size() < rows[rank].size()) {
        const auto& action = rows[rank][done.size()];
        if (missing(action)) break;
        double begin = done.empty() ? 0 : done.back().end;
        for (const auto& need : needs(action, last_stage)) begin = std::max(begin, ends.at(key_of(need)));
        const double end = begin + duration_of(action);
        ends[key_of(action)] = end;
        busy += end - begin;
        times.end = std::max(times.end, end);
        done.push_back({action, begin, end});
        any = true;
      }
    }
  }
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    const size_t done = times.ranks[rank].size();
    if (done == rows[rank].size()) continue;
    const auto& action = rows[rank][done];
    TORCH_CHECK_VALUE(false, "the table can't be run: rank ", rank, " comes to ", to_string(action),
                      ", which needs ", to_string(*missing(action)),
                      ", and that is not there or waits itself for an action after this one");
  }
  if (times.end > 0) times.bubble = 1 - busy / (times.end * static_cast<double>(rows.size()));
  return times;
}

}  // namespace lockstep
