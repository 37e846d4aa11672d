#pragma once

#include <atomic>

namespace lockstep {

/// What shows that a training step begins, the more telling last.
enum class StepMark {
  kBatch,    ///< a loader is asked for a batch
  kForward,  ///< the first forward of a DistributedDataParallel behind a finished backward
};

/// Hears of each; null: nothing does. For a profiler of programs that know nothing of it. In the thread that trains. May
/// throw.
inline std::atomic<void (*)(StepMark mark, const void* source)> step_mark_listener{nullptr};

/// `source`: the loader or the model, told apart by its address alone.
inline void mark_step(StepMark mark, const void* source) {
  if (auto* listener = step_mark_listener.load(std::memory_order_acquire)) listener(mark, source);
}

}  // namespace lockstep
