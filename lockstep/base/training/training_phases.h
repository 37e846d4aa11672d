#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

/// What the thread that trains does now, and how long it takes for it. Loaders, wrappers of models, pipelines and the
/// groups' operations tell of themselves; steps begin at the marks of step_mark.h. A step costs a few readings of the clock.
namespace lockstep {

enum class TrainingPhase : uint32_t {
  kNone,       ///< no step has begun
  kData,       ///< a loader is asked for a batch
  kForward,    ///< from the batch or the begin of forward on; the loss belongs to it
  kBackward,   ///< from the first gradient to the end of autograd
  kWaiting,    ///< in a group's operation
  kOptimizer,  ///< after backward; all else between steps belongs to it
};
inline constexpr size_t kTrainingPhases = 6;
/// "data", "forward", "backward", "waiting", "optimizer"; "" of kNone.
const char* to_string(TrainingPhase phase);

/// The times of a step in nanoseconds: medians over PhaseWindow::kSlots steps.
struct PhaseTimes {
  int64_t ended_ns = 0;  ///< when the last step ended, by the host's monotonic clock
  int64_t span_ns = 0;   ///< how long all of them took
  double step = 0;
  double own = 0;  ///< without kWaiting
  std::array<double, kTrainingPhases> phases{};

  double of(TrainingPhase phase) const { return phases[static_cast<size_t>(phase)]; }
};

/// Takes the phases of one step after the other. Steps that take less than kLeastSlot are taken together, so that a window
/// lasts 2 s at least, and what disturbs a host for a moment is no more than one of its 20 values. Used by one thread.
class PhaseWindow {
 public:
  static constexpr size_t kSlots = 20;
  static constexpr int64_t kLeastSlotNs = 100'000'000;

  void add(TrainingPhase phase, int64_t ns) { slot_.at(static_cast<size_t>(phase)) += ns; }
  /// The window's times when it ends with this step; the next one begins.
  std::optional<PhaseTimes> end_step(int64_t now_ns);

 private:
  struct Slot {
    double step = 0;
    double own = 0;
    std::array<double, kTrainingPhases> phases{};
  };
  std::array<int64_t, kTrainingPhases> slot_{};  // sums over its steps
  int64_t steps_ = 0;                            // of the slot
  int64_t span_ns_ = 0;
  std::array<Slot, kSlots> slots_;
  size_t filled_ = 0;
};

/// Where a process's training stands, in memory that others read. Written by one thread at a time.
struct alignas(64) PhaseBoard {
  std::atomic<uint64_t> samples{0};    // that loaders have given
  std::atomic<uint32_t> phase{0};      // a TrainingPhase
  std::atomic<int64_t> since_ns{0};    // when it began, by the host's monotonic clock
  std::atomic<int64_t> told_step{-1};  // see tell_progress()
  std::atomic<double> loss{0};         // with told_step
  std::atomic<uint64_t> action{0};     // see TellingAction; 0: none

  /// The step that has begun last.
  struct Step {
    uint64_t number = 0;   ///< from 1; 0: none has begun
    uint64_t samples = 0;  ///< that loaders had given before
    int64_t began_ns = 0;  ///< by the host's monotonic clock
  };
  void set_step(const Step& step);
  Step newest_step() const;

  void set_times(const PhaseTimes& times);
  /// The times of the last window; nothing before its end.
  std::optional<PhaseTimes> times() const;

 private:
  std::atomic<uint64_t> steps_{0};
  std::atomic<uint64_t> step_samples_{0};
  std::atomic<int64_t> step_began_ns_{0};
  static constexpr size_t kValues = kTrainingPhases + 4;
  std::atomic<uint64_t> version_{0};  // of all above and below; odd while they are written
  std::array<std::atomic<double>, kValues> values_{};
};

/// The listener may be told of a last window after end(). It runs in the thread that trains, and must not throw.
struct PhaseAudience {
  std::shared_ptr<PhaseBoard> board;
  std::function<void(const PhaseTimes& times)> on_window;
};
/// From now on this process's phases are written there, and to none before it.
void begin_telling_phases(const std::shared_ptr<const PhaseAudience>& audience);
/// Does nothing when another one has taken its place. The board is not written any more when this returns.
void end_telling_phases(const std::shared_ptr<const PhaseAudience>& audience);

/// In the thread that trains, once it has begun a step; any other thread's calls do nothing, unless `from_any_thread`, which
/// autograd's threads need.
void enter_phase(TrainingPhase phase, bool from_any_thread = false);
void count_samples(int64_t samples);

/// One action of a plan that other ranks know, a pipeline's schedule, is carried out from construction to destruction; by any
/// thread. When the process ends or is stopped during it, they name it. Not nested.
class TellingAction {
 public:
  /// `stage` below 2^24; `type`: a letter.
  TellingAction(uint32_t stage, char type, uint32_t micro_batch);
  TellingAction(const TellingAction&) = delete;
  TellingAction& operator=(const TellingAction&) = delete;
  ~TellingAction();

  /// "2B3" of a board's word; "" of 0.
  static std::string describe(uint64_t word);
};

/// For those who look at the training (`lockstep top`): how many steps it has made, those before a restart among them,
/// and the loss of the last one. The Trainer calls it; a loop of one's own may, where it knows the loss. From any thread;
/// some 20 ns.
void tell_progress(int64_t step, double loss);

/// kWaiting from construction to destruction, and then again what was before; likewise in the thread that trains alone.
class WaitingPhase {
 public:
  WaitingPhase();
  WaitingPhase(const WaitingPhase&) = delete;
  WaitingPhase& operator=(const WaitingPhase&) = delete;
  ~WaitingPhase();

 private:
  TrainingPhase before_;  // kNone: not in the thread that trains
};

}  // namespace lockstep
