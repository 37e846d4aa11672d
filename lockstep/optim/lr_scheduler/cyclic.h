#pragma once

#include <functional>
#include <string>
#include <vector>

#include <lockstep/optim/lr_scheduler/scheduler.h>

/// Schedules that lead learning rates, and momentum the other way, up and down; meant to be stepped after
/// every batch. Momentum is SGD's and RMSprop's momentum, and the first of Adam's and AdamW's betas; for
/// optimizers without, cycle_momentum is a c10::ValueError.
namespace lockstep::lr_scheduler {

struct CyclicLROptions {
  int64_t step_size_up = 2000;                 ///< batches from base_lr to max_lr
  std::optional<int64_t> step_size_down = {};  ///< and back; as many unless told
  /// "triangular": all cycles the same; "triangular2": each half as high as the one before; "exp_range":
  /// scaled by gamma^batches. Without effect when there is a scale_fn.
  std::string mode = "triangular";
  double gamma = 1.0;
  /// The height of a cycle, from its number (from 1 on), or from the number of batches.
  std::function<double(double)> scale_fn = {};
  std::string scale_mode = "cycle";  ///< what scale_fn takes: "cycle" or "iterations"
  bool cycle_momentum = true;
  PerGroup base_momentum = 0.8;  ///< at max_lr
  PerGroup max_momentum = 0.9;   ///< at base_lr
  int64_t last_epoch = -1;
};

/// Between base_lr and max_lr, up and down in straight lines (Smith: Cyclical learning rates for training
/// neural networks, arXiv:1506.01186).
///
/// Throws c10::ValueError for lists of other lengths than the groups, an unknown mode without scale_fn, and
/// step sizes that make no cycle.
class CyclicLR final : public LRScheduler {
 public:
  CyclicLR(torch::optim::Optimizer& optimizer, const PerGroup& base_lr, const PerGroup& max_lr,
           const CyclicLROptions& options = {});

  /// Without scale_fn, which a state doesn't hold.
  StateDict state_dict() const override;
  /// Throws c10::ValueError, too, for the attributes of a Python object that was scale_fn there.
  void load_state_dict(const StateDict& state) override;

 private:
  std::vector<double> get_lr() override;
  double scale(double cycle) const;

  std::vector<double> max_lrs_;
  double total_size_ = 0;  // of a cycle
  double step_ratio_ = 0;  // the part of it that goes up
  std::string mode_;
  double gamma_;
  std::function<double(double)> scale_fn_;
  std::string scale_mode_;
  bool cycle_momentum_;
  bool use_beta1_ = false;
  std::vector<double> base_momentums_;
  std::vector<double> max_momentums_;
};

struct OneCycleLROptions {
  /// Batches in all; or else epochs and steps_per_epoch, both.
  std::optional<int64_t> total_steps = {};
  std::optional<int64_t> epochs = {};
  std::optional<int64_t> steps_per_epoch = {};
  double pct_start = 0.3;               ///< the part of it that goes up
  std::string anneal_strategy = "cos";  ///< or "linear"
  bool cycle_momentum = true;
  PerGroup base_momentum = 0.85;  ///< at max_lr
  PerGroup max_momentum = 0.95;   ///< at the beginning and the end
  double div_factor = 25.0;       ///< it begins with max_lr / div_factor
  double final_div_factor = 1e4;  ///< and ends with max_lr / div_factor / final_div_factor
  /// Down to where it began, as fast as up, and then to the end; instead of down to the end at once.
  bool three_phase = false;
  int64_t last_epoch = -1;
};

/// One cycle: up to max_lr, and down to almost nothing at the last step (Smith, Topin: Super-convergence,
/// arXiv:1708.07120, as in fastai). The learning rates that the optimizer was made with don't matter.
///
/// The bounds come from the arguments, also when last_epoch is not -1 or a state is loaded (Python takes them
/// from the optimizer's checkpoint then). Throws c10::ValueError for arguments out of range, and when stepped
/// more than total_steps times.
class OneCycleLR final : public LRScheduler {
 public:
  OneCycleLR(torch::optim::Optimizer& optimizer, const PerGroup& max_lr,
             const OneCycleLROptions& options = {});

  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

 private:
  /// Until end_step, from one of the groups' bounds to another; they have Python's names.
  struct Phase {
    double end_step = 0;
    std::string start_lr, end_lr, start_momentum, end_momentum;
  };

  static std::vector<Phase> phases_of(const OneCycleLROptions& options, int64_t total_steps);
  void note_bounds(const PerGroup& max_lr, const OneCycleLROptions& options);
  std::vector<double> get_lr() override;
  double anneal(double start, double end, double done) const;
  double bound(size_t group, const std::string& name) const;

  int64_t total_steps_ = 0;
  std::vector<Phase> phases_;
  std::string anneal_func_type_;
  bool cycle_momentum_;
  bool use_beta1_ = false;
};

}  // namespace lockstep::lr_scheduler
