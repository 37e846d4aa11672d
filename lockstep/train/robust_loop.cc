#include <algorithm>
#include <cstring>
#include <unistd.h>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/optim/zero_redundancy_optimizer.h>
#include <lockstep/train/internal/failure_agreement.h>
#include <lockstep/train/internal/stop_signals.h>
#include <lockstep/train/robust_loop.h>

namespace lockstep {

using train::internal::FailureCause;

RobustLoop::RobustLoop(TrainerCore& trainer, RobustLoopOptions options)
    : trainer_(trainer), options_(std::move(options)) {
  TORCH_CHECK_VALUE(trainer_.options().checkpoint,
                    "RobustLoop: the Trainer saves no checkpoints; give it options.checkpoint");
  TORCH_CHECK_VALUE(!trainer_.process_group() || trainer_.process_group() == default_group(),
                    "RobustLoop: the Trainer's process group is not the default group, which is what is made "
                    "anew after a failure; leave out options.process_group");
  TORCH_CHECK_VALUE(options_.agree_timeout.count() > 0, "RobustLoop: agree_timeout is ",
                    options_.agree_timeout.count(), " ms; it must be more than 0");
}

RobustLoop::~RobustLoop() = default;

int RobustLoop::run() {
  const int status = options_.stop_status;
  train::internal::StopSignals signals(options_.stop_signals, options_.deadline, [status] {
    LOCKSTEP_LOG(kError) << "RobustLoop: the deadline after the signal has passed before there was a "
                            "checkpoint; ending with status "
                         << status << ", and the checkpoint before counts";
    ::_exit(status);
  });
  trainer_.interrupted = [&signals] { return signals.received() != 0; };
  trainer_.recover = [this](const std::exception_ptr& failure) { recover(failure); };
  struct Unset {
    TrainerCore& trainer;
    ~Unset() { trainer.interrupted = {}, trainer.recover = {}; }
  } unset{trainer_};
  struct Finalize {
    TrainerCore& trainer;
    ~Finalize() { trainer.finalize_writers(); }
  } finalize{trainer_};  // after the checkpoint, for a slow server may take its time
  agreement_.reset();
  gave_up_ = false;
  std::exception_ptr failure;
  try {
    training_ = false;
    trainer_.restore();
    training_ = true;
    trainer_.train();
    if (trainer_.stopped() && !trainer_.finished()) {
      const int signal = signals.received();
      trainer_.save(signal == 0 ? "stopped by stop(), or by another rank's signal"
                                : std::string("stopped by ") + ::strsignal(signal));
      if (trainer_.rank() == 0) {
        LOCKSTEP_LOG(kWarning) << "RobustLoop: stopped after step " << trainer_.step()
                               << "; the checkpoint is saved, and the status is " << status;
      }
      return status;
    }
    return 0;
  } catch (...) {
    failure = std::current_exception();
  }
  if (gave_up_) std::rethrow_exception(failure);
  if (!agreement_) {
    try {
      agree(failure, /*can_repeat=*/false);
    } catch (const std::exception& error) {
      LOCKSTEP_LOG(kError)
          << "RobustLoop: no emergency checkpoint, for the ranks could not agree on what failed: "
          << text_of(std::current_exception());
      std::rethrow_exception(failure);
    }
  }
  save_what_is_left();
  trainer_.finalize_writers();  // here, as the caller may not catch what comes
  throw_first_cause(failure);
}

void RobustLoop::agree(const std::exception_ptr& failure, bool can_repeat) {
  agreement_ = std::make_unique<train::internal::FailureAgreement>(
      train::internal::agree_on_failure({.kind = train::internal::kind_of(failure),
                                         .text = text_of(failure),
                                         .step = trainer_.step(),
                                         .largest_micro_batch = trainer_.largest_micro_batch(),
                                         .can_repeat = can_repeat,
                                         .can_save = training_ && trainer_.consistent()},
                                        options_.agree_timeout));
}

/// In a step, on each rank on which it failed.
void RobustLoop::recover(const std::exception_ptr& failure) {
  const bool sharded = dynamic_cast<ZeroRedundancyOptimizer*>(&trainer_.optimizer()) != nullptr ||
                       trainer_.state().is_collective();
  try {
    agree(failure, options_.lower_micro_batch && !sharded);
  } catch (const std::exception&) {
    gave_up_ = true;
    LOCKSTEP_LOG(kError)
        << "RobustLoop: no emergency checkpoint, for the ranks could not agree on what failed: "
        << text_of(std::current_exception());
    std::rethrow_exception(failure);
  }
  if (!all_can_repeat()) std::rethrow_exception(failure);
  const auto agreement = std::move(agreement_);
  int64_t largest = 0;
  for (const auto& report : agreement->reports) largest = std::max(largest, report.largest_micro_batch);
  trainer_.set_max_micro_batch((largest + 1) / 2);
  // Also when it is the same: the model's round was left in its middle.
  if (agreement->group) trainer_.update_process_group(agreement->group);
  if (trainer_.rank() == 0) {
    LOCKSTEP_LOG(kWarning) << "RobustLoop: out of memory in step " << trainer_.step() + 1
                           << "; it is done again with at most " << (largest + 1) / 2
                           << " samples at once on each rank, accumulated to the same batch";
  }
}

bool RobustLoop::all_can_repeat() const {
  const auto& reports = agreement_->reports;
  bool out_of_memory = false, can_lower = false;
  for (const auto& report : reports) {
    if (!report.can_repeat || !report.can_save || report.kind == FailureCause::kOther) return false;
    if (report.step != reports.front().step) return false;
    out_of_memory = out_of_memory || report.kind == FailureCause::kOutOfMemory;
    can_lower = can_lower || report.largest_micro_batch > 1;
  }
  return out_of_memory && can_lower && !agreement_->any_rank_died;
}

/// The lowest rank's error of its own; else that a peer is gone, as the lowest rank was told.
std::string RobustLoop::first_cause() const {
  for (size_t i = 0; i < agreement_->reports.size(); ++i) {
    const auto& report = agreement_->reports[i];
    if (report.kind == FailureCause::kPeer) continue;
    return "rank " + std::to_string(agreement_->former_ranks[i]) + " failed after step " +
           std::to_string(report.step) + ": " + report.text;
  }
  return agreement_->reports.front().text;
}

void RobustLoop::save_what_is_left() {
  const auto& reports = agreement_->reports;
  const std::string cause = first_cause();
  const int rank = agreement_->group ? get_rank(agreement_->group) : 0;
  // Together if all are there and between the same two steps; else one of those that are furthest, alone.
  bool together = !agreement_->any_rank_died;
  int saver = -1;
  for (int i = 0; i < static_cast<int>(reports.size()); ++i) {
    const auto& report = reports[static_cast<size_t>(i)];
    together = together && report.can_save && report.step == reports.front().step;
    if (!report.can_save) continue;
    if (saver < 0 || report.step > reports[static_cast<size_t>(saver)].step) saver = i;
  }
  bool saved = true;
  try {
    // Its memory went with its group.
    TORCH_CHECK(!trainer_.state().is_collective(),
                "the model is sharded, or its stages are on several ranks: it can't be saved without the "
                "group that it was made for");
    if (together) {
      trainer_.set_group(agreement_->group);
      trainer_.save(cause);
    } else if (rank == saver) {
      TORCH_CHECK(dynamic_cast<ZeroRedundancyOptimizer*>(&trainer_.optimizer()) == nullptr,
                  "the optimizer is sharded, and a part of its state is gone");
      saved = trainer_.save_alone(cause);
    }
  } catch (...) {
    LOCKSTEP_LOG(kError) << "RobustLoop: no emergency checkpoint: " << text_of(std::current_exception());
    return;
  }
  if (saver < 0 && rank == 0) {
    LOCKSTEP_LOG(kError) << "RobustLoop: no emergency checkpoint: no rank is between two steps of this run";
  } else if (rank == (together ? 0 : saver)) {
    LOCKSTEP_LOG(kWarning) << "RobustLoop: "
                           << (saved ? "saved an emergency checkpoint of step "
                                     : "there is a checkpoint by plan of step ")
                           << trainer_.step() << ", because " << cause;
  }
}

void RobustLoop::throw_first_cause(const std::exception_ptr& own) const {
  const bool own_cause = train::internal::kind_of(own) != FailureCause::kPeer;
  const bool peers_cause = std::any_of(agreement_->reports.begin(), agreement_->reports.end(),
                                       [](const auto& report) { return report.kind != FailureCause::kPeer; });
  if (own_cause || !peers_cause) std::rethrow_exception(own);
  C10_THROW_ERROR(DistBackendError, first_cause());
}

}  // namespace lockstep
