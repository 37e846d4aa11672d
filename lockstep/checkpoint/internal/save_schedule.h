#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>

#include <lockstep/checkpoint/checkpoint_manager.h>

namespace lockstep::checkpoint::internal {

/// When a checkpoint is due. Steps and epochs every rank counts for itself. Time is the leader's business:
/// after steps that it names ahead it looks at its clock and tells the others whether to save now, and
/// after which step it will look again: at half the steps that are likely to be left, so that a wait of a
/// thousand steps costs some ten such messages. Not thread-safe.
class SaveSchedule {
 public:
  using Clock = std::chrono::steady_clock;
  /// What the leader says at a look: save now, and the step of the next look.
  struct Look {
    bool save = false;
    int64_t next_step = 0;
  };
  /// Gives all ranks the leader's look.
  using Agree = std::function<Look(const Look&)>;

  SaveSchedule(const CheckpointManagerOptions& options, bool leads, Agree agree);

  bool due_at_step(int64_t step, Clock::time_point now);
  bool due_at_epoch(int64_t epoch);

  /// A save has begun, which held the program up for `held_up` (of the leader).
  void saved(int64_t step, Clock::time_point now, std::chrono::nanoseconds held_up);
  /// The last save has held the program up once more.
  void also_held_up(std::chrono::nanoseconds held_up);
  /// The whole of the last save, with what a thread wrote, took so long.
  void written(std::chrono::nanoseconds took);

  /// The time between two saves at present; nothing where time does not decide.
  std::optional<std::chrono::nanoseconds> interval() const;

 private:
  Look look(int64_t step, Clock::time_point now);

  const CheckpointManagerOptions& options_;
  bool leads_;
  Agree agree_;
  std::optional<int64_t> last_saved_step_;
  std::optional<int64_t> last_epoch_;  // that due_at_epoch() was true for
  std::optional<int64_t> next_look_;
  // The leader's:
  std::optional<Clock::time_point> last_saved_;
  std::optional<std::pair<int64_t, Clock::time_point>> last_look_;
  std::optional<std::chrono::nanoseconds> cost_;
  std::chrono::nanoseconds whole_{0};
};

}  // namespace lockstep::checkpoint::internal
