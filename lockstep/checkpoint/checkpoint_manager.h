#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include <c10/util/Exception.h>

#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/serialization/state_dict.h>

namespace lockstep {

struct CheckpointManagerOptions {
  /// Whether a metric is best when it is lowest or highest.
  enum class Mode { min, max };

  /// Checkpoints are step-00000100, step-00000200, … below it. Made where it is missing, but for must_resume.
  std::filesystem::path directory = {};

  // ---- When; several may be given. With none of them, every(…) and automatic included, only save() saves.
  int64_t every_steps = 0;            ///< whenever the step is a multiple; 0: never
  int64_t every_epochs = 0;           ///< whenever the epochs done are a multiple; 0: never
  std::chrono::nanoseconds every{0};  ///< when so much time has passed since the last one; 0: never
  /// As often as saving takes no more than `automatic_share` of the run time, by what it was measured to
  /// take.
  bool automatic = false;
  double automatic_share = 0.02;

  // ---- Which are kept
  int64_t keep_last = 3;       ///< of those saved by plan; at least 1
  int64_t keep_best = 1;       ///< beside them, by `metric`; 0: none
  std::string metric = {};     ///< a key of CheckpointInfo::metrics; empty: none is best
  Mode mode = Mode::min;       ///< NaN is never best
  int64_t keep_emergency = 2;  ///< beside them, the last ones saved in an emergency; at least 1
  /// Beside them, for ever, those whose step is a multiple of it, whatever they were saved for; 0: none. It
  /// saves none itself. Orbax's keep_period.
  int64_t keep_period = 0;

  // ---- What restore() does
  /// There must be a checkpoint to go on from: where there is none it is an error, which says what is in the
  /// directory instead, and training does not begin at step 0. Then the directory is not made either, and
  /// the construction throws when it is missing. Not with from_scratch_if_all_damaged.
  bool must_resume = false;
  /// When there are checkpoints and all are damaged: train from scratch, as if there were none. Without it
  /// that is an error. What can't be read is an error in any case.
  bool from_scratch_if_all_damaged = false;

  // ---- How
  bool async = true;  ///< save() returns after copying the tensors, and a thread writes them
  /// With `async`: save() returns before tensors of more than 1 MiB are copied, and the thread copies them
  /// while the next forward and backward run. Then finish_copy() must be called before they change: in front
  /// of the optimizer's step(). A tensor that was changed all the same fails that checkpoint, as far as its version and, on
  /// the CPU, some of its values tell. Tensors on a device are copied on a stream beside the current one.
  bool copy_later = false;
  bool sharded = false;  ///< see SaveOptions
  bool fsync = true;     ///< see SaveOptions
};

/// Saves checkpoints in time, keeps the right ones, and finds the one to go on from.
///
///     CheckpointManager checkpoints({.directory = "run", .every_steps = 500, .metric = "validation_loss"});
///     if (auto info = checkpoints.restore(training)) step = info->step;
///     while (…) {
///       …
///       ++step;
///       if (checkpoints.should_save(step)) checkpoints.save(training, {.step = step});
///     }
///     checkpoints.wait();
///
/// All ranks of the group make one and call the same functions in the same order, with the same arguments. An
/// empty group is the default group, or this process alone if there is none. For asynchronous saving it makes
/// a group of its own at its construction, so that its thread and the program's collectives don't mix. The
/// destructor waits for the thread; an error that was not thrown by then is logged. Not thread-safe.
///
/// While it lives the folder belongs to this job: rank 0 holds a lock on it, which ends with its process at
/// the latest. To only read checkpoints beside a running job, take find_latest_checkpoint() and
/// load_checkpoint().
class CheckpointManager {
 public:
  /// Makes the directory. Throws c10::ValueError for options that make no sense, and on all ranks
  /// CheckpointError when another job has the directory, with its host and process, after waiting for it: 20
  /// seconds, or two minutes for a job of another host, but at most half of the group's timeout; or when
  /// must_resume finds no directory.
  explicit CheckpointManager(CheckpointManagerOptions options, ProcessGroup group = {});
  CheckpointManager(const CheckpointManager&) = delete;
  CheckpointManager& operator=(const CheckpointManager&) = delete;
  ~CheckpointManager();

  const CheckpointManagerOptions& options() const;

  /// Whether a checkpoint is due after `step`. Call it once for each step, on all ranks, which get the same
  /// answer: where time decides, rank 0's clock does. For that it tells the others, ahead, after which step
  /// it will look at its clock, so that nearly all calls communicate nothing.
  bool should_save(int64_t step);
  /// The same at the end of an epoch: `epoch` epochs are done. Also true when the epoch's last step was
  /// saved, in whose place the checkpoint then comes: only now are the epoch's metrics known.
  bool should_save_at_epoch_end(int64_t epoch);

  /// Saves what `training_state` (a TrainingState, or whatever has state_dict() and rank_state_dict()) holds
  /// now. Asynchronous: returns when it is copied; a save before that is still being written is waited for.
  /// Throws what save_checkpoint() throws, also for the last asynchronous save; then nothing was saved by
  /// this call. With `info.emergency` it writes at once, returns when it is on the disk, and only warns of
  /// what was wrong with the last save.
  template <class S>
  void save(S& training_state, CheckpointInfo info) {
    save_state(training_state.state_dict(), training_state.rank_state_dict(), std::move(info));
  }
  /// save() of this process alone, at once, with no collective: for the one that survives its peers. What
  /// other ranks alone have is missing then, so this is not for sharded optimizers; of a sharded model it throws
  /// c10::Error. False, and nothing is written, when the last save was by plan, of the same step and epoch: that checkpoint is
  /// complete.
  template <class S>
  bool save_alone(S& training_state, CheckpointInfo info) {
    if constexpr (requires { training_state.is_collective(); }) {
      TORCH_CHECK(!training_state.is_collective(),
                  "the model is sharded, so that no rank can save it without the others");
    }
    return save_state_alone(training_state.state_dict(), training_state.rank_state_dict(), std::move(info));
  }
  void save_state(const StateDict& state, const StateDict& rank_state, CheckpointInfo info);
  bool save_state_alone(const StateDict& state, const StateDict& rank_state, CheckpointInfo info);

  /// Waits until the tensors of the last save() are copied, and may change; nothing without `copy_later`.
  /// Costs nothing when they are. A forked child does not wait: what is copied is its parent's.
  /// torch.distributed.checkpoint's synchronize_staging().
  void finish_copy();

  /// Loads the latest good checkpoint into `training_state`: load_state_dict(), then load_rank_state_dict()
  /// of what is this rank's own (empty if another number of ranks wrote it). Nothing when there is none. All
  /// ranks load the same one: if it is damaged for any, all take the one before, and say so in the log.
  /// Throws on all ranks CheckpointError when there are some and all are damaged (see
  /// from_scratch_if_all_damaged) or when there is none and one must be there (see must_resume), and
  /// CheckpointIoError when one can't be read, after some attempts: it may be good.
  template <class S>
  std::optional<CheckpointInfo> restore(S& training_state) {
    std::optional<LoadedCheckpoint> loaded = load_latest();
    if (!loaded) return {};
    training_state.load_state_dict(loaded->state);
    training_state.load_rank_state_dict(loaded->rank_state);
    return loaded->info;
  }
  /// restore() without putting it anywhere.
  std::optional<LoadedCheckpoint> load_latest(const LoadOptions& options = {});

  /// Waits until the last save is on the disk; throws what went wrong with it. Collective only in that the
  /// ranks get the same answer.
  void wait();

  /// The last checkpoint that is complete, as far as this rank knows; nothing before the first.
  std::optional<CheckpointInfo> last_saved() const;

 private:
  class Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace lockstep
