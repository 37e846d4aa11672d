#include <algorithm>
#include <cmath>

#include <c10/util/Exception.h>

#include <lockstep/optim/lr_scheduler/decay.h>

// The formulas are written as in torch/optim/lr_scheduler.py, operation by operation, so that they round
// alike.
namespace lockstep::lr_scheduler {
namespace {

using torch::optim::Optimizer;

std::vector<LrLambda> for_each_group(const Optimizer& optimizer, const LrLambda& lr_lambda) {
  return std::vector<LrLambda>(optimizer.param_groups().size(), lr_lambda);
}

/// Python's //.
int64_t floor_divide(int64_t a, int64_t b) {
  return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}

double power(double base, int64_t exponent) {
  return std::pow(base, static_cast<double>(exponent));
}

}  // namespace

LambdaScheduler::LambdaScheduler(Optimizer& optimizer, std::string name, std::vector<LrLambda> lr_lambdas,
                                 int64_t last_epoch)
    : LRScheduler(optimizer, std::move(name), last_epoch), lr_lambdas_(std::move(lr_lambdas)) {
  TORCH_CHECK_VALUE(lr_lambdas_.size() == optimizer.param_groups().size(), "Expected ",
                    optimizer.param_groups().size(), " lr_lambdas, but got ", lr_lambdas_.size(),
                    ": one function for all parameter groups, or one for each");
  for (const LrLambda& lr_lambda : lr_lambdas_) {
    TORCH_CHECK_VALUE(lr_lambda, this->name(), ": lr_lambda should be a function, but is empty");
  }
}

StateDict LambdaScheduler::state_dict() const {
  StateDict state = LRScheduler::state_dict();
  state["lr_lambdas"] = to_object(std::vector<c10::IValue>(lr_lambdas_.size()));
  return state;
}

void LambdaScheduler::load_state_dict(const StateDict& state) {
  const auto lambdas = state_value<std::vector<c10::IValue>>(state, "lr_lambdas", name());
  for (const c10::IValue& lambda : lambdas) {
    TORCH_CHECK_VALUE(lambda.isNone(), name(),
                      "::load_state_dict: 'lr_lambdas' has the attributes of a Python object, which a C++ "
                      "function can't take: put them into the function, and None into the state");
  }
  LRScheduler::load_state_dict(state);
}

LambdaLR::LambdaLR(Optimizer& optimizer, const LrLambda& lr_lambda, int64_t last_epoch)
    : LambdaLR(optimizer, for_each_group(optimizer, lr_lambda), last_epoch) {}

LambdaLR::LambdaLR(Optimizer& optimizer, std::vector<LrLambda> lr_lambda, int64_t last_epoch)
    : LambdaScheduler(optimizer, "LambdaLR", std::move(lr_lambda), last_epoch) {
  initial_step();
}

std::vector<double> LambdaLR::get_lr() {
  std::vector<double> lrs;
  for (size_t group = 0; group < base_lrs_.size(); ++group) {
    lrs.push_back(base_lrs_[group] * lr_lambdas_[group](last_epoch_));
  }
  return lrs;
}

MultiplicativeLR::MultiplicativeLR(Optimizer& optimizer, const LrLambda& lr_lambda, int64_t last_epoch)
    : MultiplicativeLR(optimizer, for_each_group(optimizer, lr_lambda), last_epoch) {}

MultiplicativeLR::MultiplicativeLR(Optimizer& optimizer, std::vector<LrLambda> lr_lambda, int64_t last_epoch)
    : LambdaScheduler(optimizer, "MultiplicativeLR", std::move(lr_lambda), last_epoch) {
  initial_step();
}

std::vector<double> MultiplicativeLR::get_lr() {
  std::vector<double> lrs = current_lrs();
  if (is_initial_) return lrs;
  check_group_count(lr_lambdas_.size());
  for (size_t group = 0; group < lrs.size(); ++group) lrs[group] *= lr_lambdas_[group](last_epoch_);
  return lrs;
}

StepLR::StepLR(Optimizer& optimizer, int64_t step_size, double gamma, int64_t last_epoch)
    : LRScheduler(optimizer, "StepLR", last_epoch), step_size_(step_size), gamma_(gamma) {
  TORCH_CHECK_VALUE(step_size >= 1, "StepLR: step_size is ", step_size, ", but must be 1 at least");
  state_fields().add("step_size", step_size_);
  state_fields().add("gamma", gamma_);
  initial_step();
}

std::vector<double> StepLR::get_lr() {
  if (last_epoch_ == 0 || last_epoch_ % step_size_ != 0) return current_lrs();
  return scaled_lrs(gamma_);
}

std::optional<std::vector<double>> StepLR::get_closed_form_lr() const {
  return scaled_base_lrs(power(gamma_, floor_divide(last_epoch_, step_size_)));
}

MultiStepLR::MultiStepLR(Optimizer& optimizer, const std::vector<int64_t>& milestones, double gamma,
                         int64_t last_epoch)
    : LRScheduler(optimizer, "MultiStepLR", last_epoch), gamma_(gamma) {
  for (const int64_t milestone : milestones) ++milestones_[milestone];
  state_fields().add("milestones", milestones_);
  state_fields().add("gamma", gamma_);
  initial_step();
}

std::vector<double> MultiStepLR::get_lr() {
  const auto milestone = milestones_.find(last_epoch_);
  if (milestone == milestones_.end()) return current_lrs();
  return scaled_lrs(power(gamma_, milestone->second));
}

std::optional<std::vector<double>> MultiStepLR::get_closed_form_lr() const {
  int64_t passed = 0;
  for (auto each = milestones_.begin(); each != milestones_.upper_bound(last_epoch_); ++each) {
    passed += each->second;
  }
  return scaled_base_lrs(power(gamma_, passed));
}

ConstantLR::ConstantLR(Optimizer& optimizer, double factor, int64_t total_iters, int64_t last_epoch)
    : LRScheduler(optimizer, "ConstantLR", last_epoch), factor_(factor), total_iters_(total_iters) {
  TORCH_CHECK_VALUE(factor >= 0 && factor <= 1,
                    "Constant multiplicative factor expected to be between 0 and 1, got ", factor);
  state_fields().add("factor", factor_);
  state_fields().add("total_iters", total_iters_);
  initial_step();
}

std::vector<double> ConstantLR::get_lr() {
  if (last_epoch_ == 0) return scaled_lrs(factor_);
  if (last_epoch_ != total_iters_) return current_lrs();
  return scaled_lrs(1.0 / factor_);
}

std::optional<std::vector<double>> ConstantLR::get_closed_form_lr() const {
  return scaled_base_lrs(factor_ + (last_epoch_ >= total_iters_ ? 1.0 : 0.0) * (1 - factor_));
}

LinearLR::LinearLR(Optimizer& optimizer, double start_factor, double end_factor, int64_t total_iters,
                   int64_t last_epoch)
    : LRScheduler(optimizer, "LinearLR", last_epoch),
      start_factor_(start_factor),
      end_factor_(end_factor),
      total_iters_(total_iters) {
  TORCH_CHECK_VALUE(
      start_factor > 0 && start_factor <= 1,
      "Starting multiplicative factor expected to be greater than 0 and less or equal to 1, got ",
      start_factor);
  TORCH_CHECK_VALUE(end_factor >= 0 && end_factor <= 1,
                    "Ending multiplicative factor expected to be between 0 and 1, got ", end_factor);
  state_fields().add("start_factor", start_factor_);
  state_fields().add("end_factor", end_factor_);
  state_fields().add("total_iters", total_iters_);
  initial_step();
}

std::vector<double> LinearLR::get_lr() {
  if (last_epoch_ == 0) return scaled_lrs(start_factor_);
  if (is_initial_ || last_epoch_ > total_iters_) return current_lrs();
  return scaled_lrs(1.0 + (end_factor_ - start_factor_) /
                              (static_cast<double>(total_iters_) * start_factor_ +
                               static_cast<double>(last_epoch_ - 1) * (end_factor_ - start_factor_)));
}

std::optional<std::vector<double>> LinearLR::get_closed_form_lr() const {
  return scaled_base_lrs(start_factor_ + (end_factor_ - start_factor_) *
                                             static_cast<double>(std::min(total_iters_, last_epoch_)) /
                                             static_cast<double>(total_iters_));
}

ExponentialLR::ExponentialLR(Optimizer& optimizer, double gamma, int64_t last_epoch)
    : LRScheduler(optimizer, "ExponentialLR", last_epoch), gamma_(gamma) {
  state_fields().add("gamma", gamma_);
  initial_step();
}

std::vector<double> ExponentialLR::get_lr() {
  return is_initial_ ? current_lrs() : scaled_lrs(gamma_);
}

std::optional<std::vector<double>> ExponentialLR::get_closed_form_lr() const {
  return scaled_base_lrs(power(gamma_, last_epoch_));
}

PolynomialLR::PolynomialLR(Optimizer& optimizer, int64_t total_iters, double power, int64_t last_epoch)
    : LRScheduler(optimizer, "PolynomialLR", last_epoch), total_iters_(total_iters), power_(power) {
  state_fields().add("total_iters", total_iters_);
  state_fields().add("power", power_);
  initial_step();
}

std::vector<double> PolynomialLR::get_lr() {
  if (is_initial_ || last_epoch_ > total_iters_) return current_lrs();
  const auto total = static_cast<double>(total_iters_);
  return scaled_lrs(std::pow(
      (1.0 - static_cast<double>(last_epoch_) / total) / (1.0 - static_cast<double>(last_epoch_ - 1) / total),
      power_));
}

std::optional<std::vector<double>> PolynomialLR::get_closed_form_lr() const {
  const auto done = static_cast<double>(std::min(total_iters_, last_epoch_));
  return scaled_base_lrs(std::pow(1.0 - done / static_cast<double>(total_iters_), power_));
}

}  // namespace lockstep::lr_scheduler
