#include <algorithm>
#include <limits>

#include <c10/util/Exception.h>

#include <lockstep/optim/lr_scheduler/reduce_lr_on_plateau.h>

namespace lockstep::lr_scheduler {

using torch::optim::Optimizer;

ReduceLROnPlateau::ReduceLROnPlateau(Optimizer& optimizer, const ReduceLROnPlateauOptions& options)
    : optimizer_(optimizer),
      mode_(options.mode),
      factor_(options.factor),
      patience_(options.patience),
      threshold_(options.threshold),
      threshold_mode_(options.threshold_mode),
      cooldown_(options.cooldown),
      eps_(options.eps) {
  TORCH_CHECK_VALUE(factor_ < 1.0, "Factor should be < 1.0, got ", factor_);
  min_lrs_ = options.min_lr.expanded("min_lr", optimizer.param_groups().size());
  if (!options.min_lr.is_list()) default_min_lr_ = options.min_lr.expanded("min_lr", 1)[0];
  check_modes(mode_, threshold_mode_);
  best_ = worst();
  note_last_lr();

  state_fields_.add("mode", mode_);
  state_fields_.add("factor", factor_);
  state_fields_.add("patience", patience_);
  state_fields_.add("threshold", threshold_);
  state_fields_.add("threshold_mode", threshold_mode_);
  state_fields_.add("cooldown", cooldown_);
  state_fields_.add("eps", eps_);
  state_fields_.add("default_min_lr", default_min_lr_);
  state_fields_.add("min_lrs", min_lrs_);
  state_fields_.add("best", best_);
  state_fields_.add("cooldown_counter", cooldown_counter_);
  state_fields_.add("num_bad_epochs", num_bad_epochs_);
  state_fields_.add("last_epoch", last_epoch_);
  state_fields_.add("_last_lr", last_lr_);
}

void ReduceLROnPlateau::check_modes(const std::string& mode, const std::string& threshold_mode) {
  TORCH_CHECK_VALUE(mode == "min" || mode == "max", "mode ", mode, " is unknown!");
  TORCH_CHECK_VALUE(threshold_mode == "rel" || threshold_mode == "abs", "threshold mode ", threshold_mode,
                    " is unknown!");
}

double ReduceLROnPlateau::worst() const {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  return mode_ == "min" ? kInfinity : -kInfinity;
}

bool ReduceLROnPlateau::is_better(double value) const {
  const bool relative = threshold_mode_ == "rel";
  if (mode_ == "min") return value < (relative ? best_ * (1.0 - threshold_) : best_ - threshold_);
  return value > (relative ? best_ * (threshold_ + 1.0) : best_ + threshold_);
}

void ReduceLROnPlateau::step(double metrics, std::optional<int64_t> epoch) {
  last_epoch_ = epoch.value_or(last_epoch_ + 1);
  if (is_better(metrics)) {
    best_ = metrics;
    num_bad_epochs_ = 0;
  } else {
    ++num_bad_epochs_;
  }
  if (in_cooldown()) {
    --cooldown_counter_;
    num_bad_epochs_ = 0;
  }
  if (num_bad_epochs_ > patience_) {
    reduce_lr();
    cooldown_counter_ = cooldown_;
    num_bad_epochs_ = 0;
  }
  note_last_lr();
}

void ReduceLROnPlateau::reduce_lr() {
  auto& groups = optimizer_.param_groups();
  if (groups.size() != min_lrs_.size()) {
    TORCH_CHECK_VALUE(default_min_lr_, "The number of param groups in the `optimizer` (", groups.size(),
                      ") differs from when `ReduceLROnPlateau` was initialized (", min_lrs_.size(),
                      "), usually due to a new param group being added to the optimizer. Make a new "
                      "ReduceLROnPlateau with a min_lr for each group, or with one for all.");
    min_lrs_.assign(groups.size(), *default_min_lr_);
  }
  for (size_t group = 0; group < groups.size(); ++group) {
    const double old_lr = groups[group].options().get_lr();
    const double new_lr = std::max(old_lr * factor_, min_lrs_[group]);
    if (old_lr - new_lr > eps_) groups[group].options().set_lr(new_lr);
  }
}

void ReduceLROnPlateau::note_last_lr() {
  last_lr_.clear();
  for (auto& group : optimizer_.param_groups()) last_lr_.push_back(group.options().get_lr());
}

StateDict ReduceLROnPlateau::state_dict() const {
  StateDict state;
  state_fields_.save(state);
  state["mode_worse"] = worst();
  return state;
}

void ReduceLROnPlateau::load_state_dict(const StateDict& state) {
  const std::string owner = "ReduceLROnPlateau";
  check_modes(state_value<std::string>(state, "mode", owner),
              state_value<std::string>(state, "threshold_mode", owner));
  state_fields_.load(state, owner);
}

}  // namespace lockstep::lr_scheduler
