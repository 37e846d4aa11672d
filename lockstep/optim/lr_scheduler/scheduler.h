#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <torch/optim/optimizer.h>

#include <lockstep/optim/lr_scheduler/state_fields.h>
#include <lockstep/serialization/state_dict.h>

namespace lockstep::internal {
class ScheduledGroups;
}

/// Learning-rate schedules: torch/optim/lr_scheduler.py, with its names, defaults, order of arguments and
/// arithmetic. Include <lockstep/optim/lr_scheduler.h> for all of them.
namespace lockstep::lr_scheduler {

/// One number for all parameter groups, or one for each: what Python takes as "float or list".
class PerGroup {
 public:
  PerGroup(double value) : values_(value) {}                            // NOLINT: as Python
  PerGroup(std::vector<double> values) : values_(std::move(values)) {}  // NOLINT
  PerGroup(std::initializer_list<double> values) : values_(std::vector<double>(values)) {}  // NOLINT

  bool is_list() const { return values_.index() == 1; }
  /// One number for each of `groups` groups. Throws c10::ValueError, with `name`, for a list of another
  /// length.
  std::vector<double> expanded(const std::string& name, size_t groups) const;

 private:
  std::variant<double, std::vector<double>> values_;
};

/// Sets the learning rates of an optimizer's parameter groups, step by step.
///
///     lockstep::lr_scheduler::CosineAnnealingLR schedule(optimizer, /*T_max=*/epochs);
///     for (int epoch = 0; epoch < epochs; ++epoch) { train(optimizer); schedule.step(); }
///
/// Works with any torch::optim::Optimizer whose options have get_lr() and set_lr() (all of LibTorch's), and
/// so with ZeroRedundancyOptimizer and PostLocalSGDOptimizer. The constructor sets the learning rates of
/// epoch 0. Under data parallelism every rank has its own scheduler and steps it alike; there is no
/// communication.
///
/// Where Python notes `initial_lr` (and other bounds) in the optimizer's param_groups, which LibTorch's have
/// no room for, the schedulers of one optimizer share a note that lives as long as one of them. So a second
/// scheduler of the same optimizer finds the learning rates from before the first, as in Python. For
/// `last_epoch` other than -1, which asks for that note, see InitialLr.
///
/// To resume, construct the scheduler as before, then load the optimizer, then load_state_dict():
/// constructing overwrites learning rates. After add_param_group(), schedulers that compute from base_lrs()
/// throw at the next step, as Python's; the others go on with the new group.
///
/// A scheduler of your own derives from this, overrides get_lr(), and calls initial_step() at the end of its
/// constructor. The optimizer must outlive it. Used by one thread at a time.
class LRScheduler {
 public:
  LRScheduler(const LRScheduler&) = delete;
  LRScheduler& operator=(const LRScheduler&) = delete;
  virtual ~LRScheduler();

  /// The next learning rates. Call it after optimizer.step(), once for what the schedule counts (an epoch, or
  /// a batch). Logs a warning when the first call finds that no parameter has changed yet (LibTorch's SGD
  /// does not show that it changes them, so there is none with it). Throws c10::ValueError when a learning
  /// rate would be NaN, and when parameter groups were added that this schedule doesn't know.
  virtual void step();
  /// The learning rates of this epoch, by the closed form where the schedule has one. Deprecated in Python,
  /// which says so; this logs it once per process. Throws c10::ValueError for a fraction, which only
  /// CosineAnnealingWarmRestarts takes.
  virtual void step(double epoch);

  /// By parameter group, as of the last step.
  const std::vector<double>& get_last_lr() const { return last_lr_; }

  /// Python's keys and values, but for callables, which are None. Python's load_state_dict() takes it.
  virtual StateDict state_dict() const;
  /// Takes what state_dict() returned, here or in Python, and with it the hyperparameters. Throws
  /// c10::ValueError, and changes nothing, when a key is missing or there are other numbers of groups.
  virtual void load_state_dict(const StateDict& state);

  torch::optim::Optimizer& optimizer() const { return optimizer_; }
  const std::string& name() const { return name_; }
  int64_t last_epoch() const { return last_epoch_; }
  const std::vector<double>& base_lrs() const { return base_lrs_; }

 protected:
  /// `name`: for messages. `last_epoch` other than -1: the epoch that a run before this has reached; throws
  /// c10::ValueError when the groups' initial learning rates are not known.
  LRScheduler(torch::optim::Optimizer& optimizer, std::string name, int64_t last_epoch);
  /// Without initial learning rates and state: for what calls begin() later, and for schedulers of
  /// schedulers.
  LRScheduler(torch::optim::Optimizer& optimizer, std::string name);
  /// The rest of the first constructor.
  void begin(int64_t last_epoch);

  /// Sets the learning rates of epoch last_epoch + 1; what each concrete constructor does last.
  virtual void initial_step();
  /// The learning rates of epoch last_epoch().
  virtual std::vector<double> get_lr() = 0;
  /// The same from nothing but base_lrs(), where there is such a formula.
  virtual std::optional<std::vector<double>> get_closed_form_lr() const { return std::nullopt; }
  /// Takes back what the constructor's step has counted, for SequentialLR.
  virtual void undo_initial_step() { --last_epoch_; }

  /// The groups' learning rates of now.
  std::vector<double> current_lrs() const;
  /// Those multiplied by `factor`.
  std::vector<double> scaled_lrs(double factor) const;
  /// base_lrs() multiplied by `factor`.
  std::vector<double> scaled_base_lrs(double factor) const;
  /// Sets `values` as the groups' learning rates. Throws as step() does.
  void set_lrs(const std::vector<double>& values);
  void update_lr(std::optional<int64_t> epoch);
  /// Logs Python's warning about step(epoch), once per process.
  static void warn_about_epoch();
  void check_group_count(size_t known) const;

  /// To add members to, under Python's names.
  StateFields& state_fields() { return state_fields_; }
  const StateFields& state_fields() const { return state_fields_; }
  internal::ScheduledGroups& scheduled_groups() const { return *scheduled_groups_; }

  int64_t last_epoch_ = -1;
  int64_t step_count_ = 0;
  bool is_initial_ = false;  // within initial_step()
  std::vector<double> base_lrs_;
  std::vector<double> last_lr_;

 private:
  friend class ComposedScheduler;
  friend class SequentialLR;

  torch::optim::Optimizer& optimizer_;
  std::string name_;
  std::shared_ptr<internal::ScheduledGroups> scheduled_groups_;
  StateFields state_fields_;
};

/// Tells the initial learning rates of an optimizer's groups to schedulers that are constructed, with a
/// last_epoch other than -1, while it lives: Python has them in the optimizer's checkpoint, LibTorch has not.
/// (A scheduler with a state_dict() needs no last_epoch.)
///
///     lockstep::lr_scheduler::InitialLr initial_lr(optimizer, 0.1);
///     lockstep::lr_scheduler::StepLR schedule(optimizer, 30, 0.1, /*last_epoch=*/41);
class InitialLr {
 public:
  /// Throws c10::ValueError for a list that is not as long as there are groups.
  InitialLr(torch::optim::Optimizer& optimizer, const PerGroup& initial_lr);

 private:
  std::shared_ptr<internal::ScheduledGroups> scheduled_groups_;
};

}  // namespace lockstep::lr_scheduler
