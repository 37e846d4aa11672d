#pragma once

#include <optional>
#include <string>
#include <vector>

#include <torch/optim/optimizer.h>

#include <lockstep/optim/lr_scheduler/scheduler.h>
#include <lockstep/optim/lr_scheduler/state_fields.h>
#include <lockstep/serialization/state_dict.h>

namespace lockstep::lr_scheduler {

struct ReduceLROnPlateauOptions {
  std::string mode = "min";  ///< whether a smaller metric is the better one, or a larger, "max"
  double factor = 0.1;       ///< below 1
  int64_t patience = 10;     ///< epochs without improvement that are allowed
  double threshold = 1e-4;   ///< what counts as improvement
  /// "rel": better than the best by that part of it; "abs": by that much.
  std::string threshold_mode = "rel";
  int64_t cooldown = 0;  ///< epochs after a reduction in which nothing is counted
  PerGroup min_lr = 0.0;
  double eps = 1e-8;  ///< smaller changes of a learning rate are not made
};

/// Multiplies learning rates by a factor when a metric has stopped improving. Each rank must pass the same
/// metric, or their models part: all-reduce the validation loss first.
///
///     lockstep::lr_scheduler::ReduceLROnPlateau schedule(optimizer, {.patience = 5});
///     schedule.step(validation_loss);
///
/// It is no LRScheduler, as its step() takes a metric. State and lifetime are as there. After
/// add_param_group(), a min_lr that is one number goes for the new group too; with a list the next reduction
/// throws c10::ValueError. Used by one thread at a time. torch/optim/lr_scheduler.py.
class ReduceLROnPlateau {
 public:
  /// Throws c10::ValueError for a factor of 1 or more, an unknown mode, and another number of min_lr than
  /// groups.
  explicit ReduceLROnPlateau(torch::optim::Optimizer& optimizer,
                             const ReduceLROnPlateauOptions& options = {});
  ReduceLROnPlateau(const ReduceLROnPlateau&) = delete;
  ReduceLROnPlateau& operator=(const ReduceLROnPlateau&) = delete;

  /// At the end of an epoch. NaN is no improvement. `epoch`: deprecated in Python.
  void step(double metrics, std::optional<int64_t> epoch = std::nullopt);

  const std::vector<double>& get_last_lr() const { return last_lr_; }
  bool in_cooldown() const { return cooldown_counter_ > 0; }
  double best() const { return best_; }
  int64_t num_bad_epochs() const { return num_bad_epochs_; }
  int64_t last_epoch() const { return last_epoch_; }
  torch::optim::Optimizer& optimizer() const { return optimizer_; }

  /// As LRScheduler's.
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);

 private:
  static void check_modes(const std::string& mode, const std::string& threshold_mode);
  double worst() const;
  bool is_better(double value) const;
  void reduce_lr();
  void note_last_lr();

  torch::optim::Optimizer& optimizer_;
  std::string mode_;
  double factor_;
  int64_t patience_;
  double threshold_;
  std::string threshold_mode_;
  int64_t cooldown_;
  double eps_;
  std::optional<double> default_min_lr_;  // none: a list was given
  std::vector<double> min_lrs_;
  double best_;
  int64_t cooldown_counter_ = 0;
  int64_t num_bad_epochs_ = 0;
  int64_t last_epoch_ = 0;
  std::vector<double> last_lr_;
  StateFields state_fields_;
};

}  // namespace lockstep::lr_scheduler
