#pragma once

#include <atomic>
#include <optional>

namespace lockstep {

/// What shows that a training step begins, the more telling last.
enum class StepMark {
  kBatch,    ///< a loader is asked for a batch
  kForward,  ///< the first forward of a wrapper (DistributedDataParallel, say) after a finished backward, a pipeline's step
};

/// When a program that calls no step() begins one: at these marks, but each step at one of them alone. Marks of the most
/// telling kind heard so far count, of the first source of that kind; once that one makes none any more, for another model
/// trains now, those of the next. Used by one thread.
class StepCounter {
 public:
  /// So many marks of others without one of the source: it makes none any more.
  static constexpr int kPatience = 100;
  /// Whether a step begins.
  bool begins(StepMark mark, const void* source);

 private:
  std::optional<StepMark> mark_;
  const void* source_ = nullptr;
  int of_others_ = 0;  // since the last one of the source
};

/// Hears of each, beside training_phases.h; null: nothing does. For a profiler of programs that know nothing of it. In the
/// thread that trains. May throw.
inline std::atomic<void (*)(StepMark mark, const void* source)> step_mark_listener{nullptr};

/// `source`: the loader or the model, told apart by its address alone.
void mark_step(StepMark mark, const void* source);

}  // namespace lockstep
