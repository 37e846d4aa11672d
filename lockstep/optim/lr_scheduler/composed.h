#pragma once

#include <memory>
#include <vector>

#include <lockstep/optim/lr_scheduler/scheduler.h>

/// Schedulers made of schedulers of the same optimizer. Their states hold those of their parts; when loading
/// throws, some parts may have loaded theirs. (A ReduceLROnPlateau can't be a part, as in Python: its step()
/// takes a metric.)
namespace lockstep::lr_scheduler {

using Schedulers = std::vector<std::shared_ptr<LRScheduler>>;

/// What both have in common.
class ComposedScheduler : public LRScheduler {
 public:
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

 protected:
  /// `optimizer`: the schedulers', unless null.
  ComposedScheduler(Schedulers schedulers, torch::optim::Optimizer* optimizer, const char* name);
  /// The parts' only: Python leaves the epoch of a SequentialLR within a SequentialLR as it is.
  void undo_initial_step() override;
  [[noreturn]] void step(double epoch) override;

  Schedulers schedulers_;

 private:
  std::vector<double> get_lr() override;
};

/// One after the other: the first until epoch milestones[0], from there the second, beginning with its own
/// epoch 0, and so on. Warm-up, then decay:
///
///     namespace lr = lockstep::lr_scheduler;
///     auto warm_up = std::make_shared<lr::LinearLR>(optimizer, /*start_factor=*/0.01, 1.0,
///     /*total_iters=*/100); auto cosine = std::make_shared<lr::CosineAnnealingLR>(optimizer, /*T_max=*/900);
///     lr::SequentialLR schedule(optimizer, {warm_up, cosine}, {100});
class SequentialLR final : public ComposedScheduler {
 public:
  /// Throws c10::ValueError for no scheduler, one of another optimizer, another number of milestones than
  /// schedulers less one; and for a SequentialLR or ChainedScheduler that is not the first, as these can't
  /// begin in the middle (Python fails when it is their turn).
  SequentialLR(torch::optim::Optimizer& optimizer, Schedulers schedulers, std::vector<int64_t> milestones,
               int64_t last_epoch = -1);

  void step() override;

 private:
  using ComposedScheduler::step;

  std::vector<int64_t> milestones_;
};

/// All at once: each multiplies in its turn.
class ChainedScheduler final : public ComposedScheduler {
 public:
  /// `optimizer`: theirs, unless null. Throws c10::ValueError for no scheduler, and for one of another
  /// optimizer.
  explicit ChainedScheduler(Schedulers schedulers, torch::optim::Optimizer* optimizer = nullptr);

  void step() override;

 private:
  using ComposedScheduler::step;
};

}  // namespace lockstep::lr_scheduler
