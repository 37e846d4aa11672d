#include <atomic>
#include <cmath>

#include <c10/util/Exception.h>

#include <lockstep/base/log.h>
#include <lockstep/optim/internal/scheduled_groups.h>
#include <lockstep/optim/lr_scheduler/scheduler.h>

namespace lockstep::lr_scheduler {

using internal::ScheduledGroups;
using torch::optim::Optimizer;

std::vector<double> PerGroup::expanded(const std::string& name, size_t groups) const {
  if (!is_list()) return std::vector<double>(groups, std::get<0>(values_));
  const auto& values = std::get<1>(values_);
  TORCH_CHECK_VALUE(values.size() == groups, name, " must have the same length as optimizer.param_groups. ",
                    name, " has ", values.size(), " values, param_groups has ", groups, ".");
  return values;
}

LRScheduler::LRScheduler(Optimizer& optimizer, std::string name)
    : optimizer_(optimizer), name_(std::move(name)), scheduled_groups_(ScheduledGroups::of(optimizer)) {
  last_lr_ = current_lrs();
}

LRScheduler::LRScheduler(Optimizer& optimizer, std::string name, int64_t last_epoch)
    : LRScheduler(optimizer, std::move(name)) {
  begin(last_epoch);
}

void LRScheduler::begin(int64_t last_epoch) {
  last_epoch_ = last_epoch;
  const std::vector<double> lrs = current_lrs();
  auto& groups = scheduled_groups_->groups();
  for (size_t group = 0; group < groups.size(); ++group) {
    if (last_epoch == -1 && !groups[group].initial_lr) groups[group].initial_lr = lrs[group];
    TORCH_CHECK_VALUE(
        groups[group].initial_lr, "param 'initial_lr' is not specified in param_groups[", group,
        "] when resuming ", name_, " with last_epoch ", last_epoch,
        ". LibTorch's optimizers and their checkpoints don't hold it: tell it by "
        "lockstep::lr_scheduler::InitialLr, or leave last_epoch at -1 and use load_state_dict().");
    base_lrs_.push_back(*groups[group].initial_lr);
  }
  state_fields_.add("base_lrs", base_lrs_);
  state_fields_.add("last_epoch", last_epoch_);
  state_fields_.add("_step_count", step_count_);
  state_fields_.add("_last_lr", last_lr_);
}

LRScheduler::~LRScheduler() = default;

void LRScheduler::initial_step() {
  step_count_ = 0;
  is_initial_ = true;
  step();
  is_initial_ = false;
}

void LRScheduler::step() {
  if (step_count_ == 1 && !scheduled_groups_->optimizer_has_stepped()) {
    LOCKSTEP_LOG(kWarning) << "Detected call of `" << name_
                           << "::step()` before `optimizer.step()`: no parameter "
                           << "has changed since the scheduler was made. Call them in the opposite order: "
                              "`optimizer.step()` before the scheduler's. Failure to do this will result in "
                              "skipping the first value of the learning rate schedule.";
  }
  ++step_count_;
  update_lr(std::nullopt);
}

void LRScheduler::step(double epoch) {
  TORCH_CHECK_VALUE(std::floor(epoch) == epoch, name_, "::step: epoch ", epoch, " is not a whole number");
  warn_about_epoch();
  ++step_count_;
  update_lr(static_cast<int64_t>(epoch));
}

void LRScheduler::warn_about_epoch() {
  static std::atomic<bool> warned = false;
  if (warned.exchange(true)) return;
  LOCKSTEP_LOG(kWarning)
      << "The epoch parameter in `scheduler.step()` was not necessary and is being deprecated "
         "where possible. Please use `scheduler.step()` to step the scheduler. During the "
         "deprecation, if epoch is given, the closed form is used instead of the new "
         "chainable form, where available.";
}

void LRScheduler::update_lr(std::optional<int64_t> epoch) {
  std::optional<std::vector<double>> values;
  if (epoch) {
    last_epoch_ = *epoch;
    values = get_closed_form_lr();
  } else {
    ++last_epoch_;
  }
  set_lrs(values ? *values : get_lr());
}

void LRScheduler::set_lrs(const std::vector<double>& values) {
  auto& groups = optimizer_.param_groups();
  check_group_count(values.size());
  for (size_t group = 0; group < groups.size(); ++group) {
    TORCH_CHECK_VALUE(!std::isnan(values[group]), name_, ": the learning rate of param_groups[", group,
                      "] in epoch ", last_epoch_, " would be NaN: its formula divides by zero there");
  }
  for (size_t group = 0; group < groups.size(); ++group) groups[group].options().set_lr(values[group]);
  last_lr_ = current_lrs();
}

void LRScheduler::check_group_count(size_t known) const {
  const size_t groups = optimizer_.param_groups().size();
  TORCH_CHECK_VALUE(known == groups, name_, " was made for ", known,
                    " parameter groups, but the optimizer has ", groups,
                    " now; make a new scheduler after add_param_group()");
}

std::vector<double> LRScheduler::current_lrs() const {
  return scaled_lrs(1.0);
}

std::vector<double> LRScheduler::scaled_lrs(double factor) const {
  std::vector<double> lrs;
  for (const auto& group : std::as_const(optimizer_).param_groups()) {
    lrs.push_back(group.options().get_lr() * factor);
  }
  return lrs;
}

std::vector<double> LRScheduler::scaled_base_lrs(double factor) const {
  std::vector<double> lrs;
  for (const double base_lr : base_lrs_) lrs.push_back(base_lr * factor);
  return lrs;
}

StateDict LRScheduler::state_dict() const {
  StateDict state;
  state_fields_.save(state);
  // Python has them in every state; they are true within calls only.
  state["_is_initial"] = false;
  state["_get_lr_called_within_step"] = false;
  return state;
}

void LRScheduler::load_state_dict(const StateDict& state) {
  state_fields_.load(state, name_);
}

InitialLr::InitialLr(Optimizer& optimizer, const PerGroup& initial_lr)
    : scheduled_groups_(ScheduledGroups::of(optimizer)) {
  const auto values = initial_lr.expanded("initial_lr", optimizer.param_groups().size());
  for (size_t group = 0; group < values.size(); ++group) {
    scheduled_groups_->groups()[group].initial_lr = values[group];
  }
}

}  // namespace lockstep::lr_scheduler
