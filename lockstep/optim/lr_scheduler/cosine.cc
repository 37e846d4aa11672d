#include <cmath>
#include <numbers>

#include <c10/util/Exception.h>

#include <lockstep/optim/lr_scheduler/cosine.h>

// The formulas are written as in torch/optim/lr_scheduler.py, operation by operation, so that they round
// alike.
namespace lockstep::lr_scheduler {
namespace {

using std::numbers::pi;
using torch::optim::Optimizer;

}  // namespace

CosineAnnealingLR::CosineAnnealingLR(Optimizer& optimizer, int64_t T_max, double eta_min, int64_t last_epoch)
    : LRScheduler(optimizer, "CosineAnnealingLR", last_epoch), t_max_(T_max), eta_min_(eta_min) {
  TORCH_CHECK_VALUE(T_max >= 1, "CosineAnnealingLR: T_max is ", T_max, ", but must be 1 at least");
  state_fields().add("T_max", t_max_);
  state_fields().add("eta_min", eta_min_);
  initial_step();
}

std::vector<double> CosineAnnealingLR::get_lr() {
  std::vector<double> lrs = current_lrs();
  if (is_initial_) return lrs;
  const auto t_max = static_cast<double>(t_max_);
  const auto epoch = static_cast<double>(last_epoch_);
  if (step_count_ == 1 && last_epoch_ > 0) {
    check_group_count(base_lrs_.size());
    for (size_t group = 0; group < lrs.size(); ++group) {
      lrs[group] = eta_min_ + (base_lrs_[group] - eta_min_) * (1 + std::cos(epoch * pi / t_max)) / 2;
    }
  } else if ((last_epoch_ - 1 - t_max_) % (2 * t_max_) == 0) {
    // Up again from eta_min, where the quotient below would be 0 / 0.
    check_group_count(base_lrs_.size());
    for (size_t group = 0; group < lrs.size(); ++group) {
      lrs[group] = lrs[group] + (base_lrs_[group] - eta_min_) * (1 - std::cos(pi / t_max)) / 2;
    }
  } else {
    for (double& lr : lrs) {
      lr = (1 + std::cos(pi * epoch / t_max)) / (1 + std::cos(pi * (epoch - 1) / t_max)) * (lr - eta_min_) +
           eta_min_;
    }
  }
  return lrs;
}

std::optional<std::vector<double>> CosineAnnealingLR::get_closed_form_lr() const {
  std::vector<double> lrs;
  for (const double base_lr : base_lrs_) {
    lrs.push_back(eta_min_ +
                  (base_lr - eta_min_) *
                      (1 + std::cos(pi * static_cast<double>(last_epoch_) / static_cast<double>(t_max_))) /
                      2);
  }
  return lrs;
}

CosineAnnealingWarmRestarts::CosineAnnealingWarmRestarts(Optimizer& optimizer, int64_t T_0, int64_t T_mult,
                                                         double eta_min, int64_t last_epoch)
    : LRScheduler(optimizer, "CosineAnnealingWarmRestarts", last_epoch),
      t_0_(T_0),
      t_i_(T_0),
      t_mult_(T_mult),
      eta_min_(eta_min),
      t_cur_(static_cast<double>(last_epoch)) {
  TORCH_CHECK_VALUE(T_0 >= 1, "Expected positive integer T_0, but got ", T_0);
  TORCH_CHECK_VALUE(T_mult >= 1, "Expected integer T_mult >= 1, but got ", T_mult);
  state_fields().add("T_0", t_0_);
  state_fields().add("T_i", t_i_);
  state_fields().add("T_mult", t_mult_);
  state_fields().add("eta_min", eta_min_);
  state_fields().add("T_cur", t_cur_);
  initial_step();
}

void CosineAnnealingWarmRestarts::step() {
  if (last_epoch_ < 0) {
    step(0.0);
    return;
  }
  t_cur_ += 1;
  if (t_cur_ >= static_cast<double>(t_i_)) {
    t_cur_ = std::fmod(t_cur_, static_cast<double>(t_i_));
    t_i_ *= t_mult_;
  }
  ++last_epoch_;
  set_lrs(get_lr());
}

void CosineAnnealingWarmRestarts::step(double epoch) {
  TORCH_CHECK_VALUE(epoch >= 0, "Expected non-negative epoch, but got ", epoch);
  const auto t_0 = static_cast<double>(t_0_);
  const auto t_mult = static_cast<double>(t_mult_);
  if (epoch < t_0) {
    t_i_ = t_0_;
    t_cur_ = epoch;
  } else if (t_mult_ == 1) {
    t_cur_ = std::fmod(epoch, t_0);
  } else {
    const double restarts = std::trunc(std::log(epoch / t_0 * (t_mult - 1) + 1) / std::log(t_mult));
    t_cur_ = epoch - t_0 * (std::pow(t_mult, restarts) - 1) / (t_mult - 1);
    t_i_ = static_cast<int64_t>(t_0 * std::pow(t_mult, restarts));
  }
  last_epoch_ = static_cast<int64_t>(std::floor(epoch));
  set_lrs(get_lr());
}

std::vector<double> CosineAnnealingWarmRestarts::get_lr() {
  std::vector<double> lrs;
  for (const double base_lr : base_lrs_) {
    lrs.push_back(eta_min_ +
                  (base_lr - eta_min_) * (1 + std::cos(pi * t_cur_ / static_cast<double>(t_i_))) / 2);
  }
  return lrs;
}

}  // namespace lockstep::lr_scheduler
