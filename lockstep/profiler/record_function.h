#pragma once

#include <algorithm>
#include <string>
#include <utility>

#include <ATen/record_function.h>

namespace lockstep::profiler {

/// A part of the program with a name, from construction to destruction: torch.profiler.record_function. It is a row of
/// key_averages(), and a bar in the trace, of whichever thread it is in; of threads that the Profiler does not record it
/// shows these scopes alone, and no operators. Costs some 25 ns without a profiler. Used by one thread.
///
/// In the name, `"` becomes `'`, for Kineto writes it into the trace as it is, which no reader could read then. A name with
/// tabs or letters beyond ASCII is "unknown" in Kineto's files; in key_averages() it is whole.
///
///     lockstep::profiler::RecordFunction scope("augment");
class RecordFunction {
 public:
  explicit RecordFunction(std::string name) : name_(std::move(name)), scope_(at::RecordScope::USER_SCOPE) {
    if (!scope_.isActive()) return;
    std::replace(name_.begin(), name_.end(), '"', '\'');
    scope_.before(name_);
  }
  RecordFunction(const RecordFunction&) = delete;
  RecordFunction& operator=(const RecordFunction&) = delete;

 private:
  std::string name_;  // the scope refers to it
  at::RecordFunction scope_;
};

}  // namespace lockstep::profiler
