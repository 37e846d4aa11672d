#pragma once

#include <chrono>
#include <exception>
#include <memory>
#include <signal.h>
#include <string>
#include <vector>

#include <lockstep/base/try_again.h>
#include <lockstep/train/trainer_core.h>

namespace lockstep {

namespace train::internal {
struct FailureAgreement;
}

struct RobustLoopOptions {
  /// Signals that schedulers send before they end a job.
  std::vector<int> stop_signals = {SIGTERM, SIGUSR1};
  /// From the signal until the checkpoint must be there: less than what the scheduler waits before SIGKILL
  /// (30 seconds with Kubernetes, Slurm and the launchers). Then the process ends with the stop status, and
  /// the checkpoint before counts.
  std::chrono::nanoseconds deadline = std::chrono::seconds(25);
  int stop_status = kTryAgain;    ///< EX_TEMPFAIL of sysexits.h: 75
  bool lower_micro_batch = true;  ///< after running out of memory
  /// How long the ranks wait for each other after a failure: longer than a step, as each must notice first.
  std::chrono::milliseconds agree_timeout = std::chrono::minutes(1);
};

/// Trains by a Trainer, and saves what can be saved when something goes wrong:
///
///     lockstep::Trainer trainer(model, optimizer, loader, loss_of, {.max_epochs = 90, .checkpoint = …});
///     return lockstep::RobustLoop(trainer).run();
///
/// - It goes on from the latest good checkpoint.
/// - **A rank runs out of memory** in a step, forward or backward: all go back to before the step and do it
///   again, with at most half as many samples at once, accumulated; the effective batch stays. The weights
///   are then those of a run that has accumulated from the start (BatchNorm sees smaller batches). Not with
///   sharded optimizers, whose groups end.
/// - **Another exception** on a rank: all save an emergency checkpoint of the last completed step. It is
///   thrown on from there; on the other ranks as a c10::DistBackendError that names rank and cause.
/// - **A rank dies**: the lowest of the others that can saves that checkpoint alone, and the first cause is
///   thrown on all. Each rank has all but the dead one's random numbers and place in the loader, which are
///   then derived. Of a sharded optimizer a part is gone: nothing is saved, and the log says so.
/// - **A FullyShardedDataParallel** goes with its group, and of a pipeline no rank has the whole: after a failure nothing is
///   saved or repeated, the log says so, and the checkpoint before counts. A stop signal saves.
/// - **A stop signal** to any rank: all stop before the same step, save, and run() returns stop_status.
/// - **Over several hosts** those meet again that reach the job's store. A rank that does not (its host is cut
///   off, or the store's is lost) saves nothing, and throws what failed there.
///
/// After a failure all process groups but the new default one are gone. docs/recovery.md is the guide, with
/// what schedulers make of the status. The Trainer must have options().checkpoint, and the default group, or
/// none. Used by one thread; one at a time runs in a process.
class RobustLoop {
 public:
  /// Throws c10::ValueError for a Trainer without checkpoints, or in another group than the default one.
  explicit RobustLoop(TrainerCore& trainer, RobustLoopOptions options = {});
  RobustLoop(const RobustLoop&) = delete;
  RobustLoop& operator=(const RobustLoop&) = delete;
  ~RobustLoop();

  /// restore(), then train(). Returns the status for main() to return: 0 when training is over, stop_status
  /// when it was stopped. Collective.
  int run();

 private:
  void recover(const std::exception_ptr& failure);
  void agree(const std::exception_ptr& failure, bool can_repeat);
  bool all_can_repeat() const;
  std::string first_cause() const;
  void save_what_is_left();
  [[noreturn]] void throw_first_cause(const std::exception_ptr& own) const;

  TrainerCore& trainer_;
  RobustLoopOptions options_;
  bool training_ = false;  // restore() is done: what the Trainer holds is worth saving
  std::unique_ptr<train::internal::FailureAgreement> agreement_;  // on what ends the run
  bool gave_up_ = false;                                          // to agree
};

}  // namespace lockstep
