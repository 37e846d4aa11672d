#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include <c10/util/Exception.h>

#include <lockstep/optim/internal/momentum_access.h>
#include <lockstep/optim/internal/scheduled_groups.h>
#include <lockstep/optim/lr_scheduler/cyclic.h>

// The formulas are written as in torch/optim/lr_scheduler.py, operation by operation, so that they round
// alike.
namespace lockstep::lr_scheduler {

using internal::momentum_kind;
using internal::MomentumKind;
using internal::ScheduledGroups;
using internal::set_momentum;

namespace {

using torch::optim::Optimizer;
using Group = ScheduledGroups::Group;

/// Whether it is beta1 that is cycled. Throws when there is nothing to cycle.
bool uses_beta1(const Optimizer& optimizer, const std::string& scheduler) {
  bool beta1 = false;
  for (const auto& group : optimizer.param_groups()) {
    const MomentumKind kind = momentum_kind(group.options());
    TORCH_CHECK_VALUE(kind != MomentumKind::kNone,
                      "optimizer must support momentum or beta1 with `cycle_momentum` option enabled; ",
                      scheduler, " knows SGD, RMSprop, Adam and AdamW: set .cycle_momentum = false");
    beta1 = kind == MomentumKind::kBeta1;
  }
  return beta1;
}

void set_momentums(Optimizer& optimizer, const std::vector<double>& momentums) {
  for (size_t group = 0; group < momentums.size(); ++group) {
    set_momentum(optimizer.param_groups()[group].options(), momentums[group]);
  }
}

/// Sets the groups' highest momentum, with which both schedules begin, and notes their bounds.
void begin_momentum(Optimizer& optimizer, std::vector<Group>& groups,
                    const std::vector<double>& base_momentums, const std::vector<double>& max_momentums) {
  set_momentums(optimizer, max_momentums);
  for (size_t group = 0; group < groups.size(); ++group) {
    groups[group].base_momentum = base_momentums[group];
    groups[group].max_momentum = max_momentums[group];
  }
}

}  // namespace

CyclicLR::CyclicLR(Optimizer& optimizer, const PerGroup& base_lr, const PerGroup& max_lr,
                   const CyclicLROptions& options)
    : LRScheduler(optimizer, "CyclicLR"),
      mode_(options.mode),
      gamma_(options.gamma),
      scale_fn_(options.scale_fn),
      scale_mode_(options.scale_mode),
      cycle_momentum_(options.cycle_momentum) {
  const size_t groups = optimizer.param_groups().size();
  const std::vector<double> base_lrs = base_lr.expanded("base_lr", groups);
  if (options.last_epoch == -1) set_lrs(base_lrs);
  max_lrs_ = max_lr.expanded("max_lr", groups);

  const int64_t step_size_down = options.step_size_down.value_or(options.step_size_up);
  TORCH_CHECK_VALUE(options.step_size_up >= 1 && step_size_down >= 0, "CyclicLR: step_size_up is ",
                    options.step_size_up, " and step_size_down ", step_size_down,
                    "; they must be 1 and 0 at least");
  const auto up = static_cast<double>(options.step_size_up);
  total_size_ = up + static_cast<double>(step_size_down);
  step_ratio_ = up / total_size_;

  if (!scale_fn_) {
    constexpr std::array kModes = {"triangular", "triangular2", "exp_range"};
    TORCH_CHECK_VALUE(std::ranges::find(kModes, mode_) != kModes.end(),
                      "mode is invalid and scale_fn is None: mode is '", mode_,
                      "', not 'triangular', 'triangular2' or 'exp_range'");
    scale_mode_ = mode_ == "exp_range" ? "iterations" : "cycle";
  }

  state_fields().add("max_lrs", max_lrs_);
  state_fields().add("total_size", total_size_);
  state_fields().add("step_ratio", step_ratio_);
  state_fields().add("mode", mode_);
  state_fields().add("gamma", gamma_);
  state_fields().add("scale_mode", scale_mode_);
  state_fields().add("cycle_momentum", cycle_momentum_);
  if (cycle_momentum_) {
    use_beta1_ = uses_beta1(optimizer, name());
    base_momentums_ = options.base_momentum.expanded("base_momentum", groups);
    max_momentums_ = options.max_momentum.expanded("max_momentum", groups);
    if (options.last_epoch == -1) {
      begin_momentum(optimizer, scheduled_groups().groups(), base_momentums_, max_momentums_);
    }
    state_fields().add("use_beta1", use_beta1_);
    state_fields().add("base_momentums", base_momentums_);
    state_fields().add("max_momentums", max_momentums_);
  }
  begin(options.last_epoch);
  initial_step();
  base_lrs_ = base_lrs;
}

double CyclicLR::scale(double cycle) const {
  const double x = scale_mode_ == "cycle" ? cycle : static_cast<double>(last_epoch_);
  if (scale_fn_) return scale_fn_(x);
  if (mode_ == "triangular2") return 1 / std::pow(2.0, x - 1);
  return mode_ == "exp_range" ? std::pow(gamma_, x) : 1.0;
}

std::vector<double> CyclicLR::get_lr() {
  check_group_count(base_lrs_.size());
  const double done = static_cast<double>(last_epoch_) / total_size_;
  const double cycle = std::floor(1 + done);
  const double x = 1.0 + done - cycle;
  const double height = x <= step_ratio_ ? x / step_ratio_ : (x - 1) / (step_ratio_ - 1);
  std::vector<double> lrs;
  for (size_t group = 0; group < base_lrs_.size(); ++group) {
    lrs.push_back(base_lrs_[group] + (max_lrs_[group] - base_lrs_[group]) * height * scale(cycle));
  }
  if (cycle_momentum_) {
    std::vector<double> momentums;
    for (size_t group = 0; group < max_momentums_.size(); ++group) {
      const double range = max_momentums_[group] - base_momentums_[group];
      momentums.push_back(max_momentums_[group] - range * height * scale(cycle));
    }
    set_momentums(optimizer(), momentums);
  }
  return lrs;
}

StateDict CyclicLR::state_dict() const {
  StateDict state = LRScheduler::state_dict();
  state["_scale_fn_custom"] = c10::IValue();
  return state;
}

void CyclicLR::load_state_dict(const StateDict& state) {
  const auto scale_fn = state.find("_scale_fn_custom");
  TORCH_CHECK_VALUE(
      scale_fn == state.end() || scale_fn->second.isNone(),
      "CyclicLR::load_state_dict: '_scale_fn_custom' has the attributes of a Python object, which a "
      "C++ function can't take: put them into scale_fn, and None into the state");
  LRScheduler::load_state_dict(state);
}

OneCycleLR::OneCycleLR(Optimizer& optimizer, const PerGroup& max_lr, const OneCycleLROptions& options)
    : LRScheduler(optimizer, "OneCycleLR"),
      anneal_func_type_(options.anneal_strategy),
      cycle_momentum_(options.cycle_momentum) {
  if (options.total_steps) {
    TORCH_CHECK_VALUE(*options.total_steps > 0, "Expected positive integer total_steps, but got ",
                      *options.total_steps);
    total_steps_ = *options.total_steps;
  } else {
    TORCH_CHECK_VALUE(options.epochs && options.steps_per_epoch,
                      "You must define either total_steps OR (epochs AND steps_per_epoch)");
    TORCH_CHECK_VALUE(*options.epochs > 0, "Expected positive integer epochs, but got ", *options.epochs);
    TORCH_CHECK_VALUE(*options.steps_per_epoch > 0, "Expected positive integer steps_per_epoch, but got ",
                      *options.steps_per_epoch);
    total_steps_ = *options.epochs * *options.steps_per_epoch;
  }
  TORCH_CHECK_VALUE(options.pct_start >= 0 && options.pct_start <= 1,
                    "Expected float between 0 and 1 pct_start, but got ", options.pct_start);
  TORCH_CHECK_VALUE(anneal_func_type_ == "cos" || anneal_func_type_ == "linear",
                    "anneal_strategy must be one of 'cos' or 'linear', instead got ", anneal_func_type_);
  phases_ = phases_of(options, total_steps_);

  state_fields().add("total_steps", total_steps_);
  state_fields().add("_anneal_func_type", anneal_func_type_);
  state_fields().add("cycle_momentum", cycle_momentum_);
  if (cycle_momentum_) {
    use_beta1_ = uses_beta1(optimizer, name());
    state_fields().add("use_beta1", use_beta1_);
  }
  note_bounds(max_lr, options);
  begin(options.last_epoch);
  initial_step();
}

std::vector<OneCycleLR::Phase> OneCycleLR::phases_of(const OneCycleLROptions& options, int64_t total_steps) {
  const auto total = static_cast<double>(total_steps);
  const Phase up{options.pct_start * total - 1, "initial_lr", "max_lr", "max_momentum", "base_momentum"};
  if (options.three_phase) {
    return {up,
            {2 * options.pct_start * total - 2, "max_lr", "initial_lr", "base_momentum", "max_momentum"},
            {total - 1, "initial_lr", "min_lr", "max_momentum", "max_momentum"}};
  }
  return {up, {total - 1, "max_lr", "min_lr", "base_momentum", "max_momentum"}};
}

void OneCycleLR::note_bounds(const PerGroup& max_lr, const OneCycleLROptions& options) {
  auto& groups = scheduled_groups().groups();
  const auto max_lrs = max_lr.expanded("max_lr", groups.size());
  for (size_t group = 0; group < groups.size(); ++group) {
    groups[group].initial_lr = max_lrs[group] / options.div_factor;
    groups[group].max_lr = max_lrs[group];
    groups[group].min_lr = *groups[group].initial_lr / options.final_div_factor;
  }
  if (!cycle_momentum_) return;
  const auto max_momentums = options.max_momentum.expanded("max_momentum", groups.size());
  const auto base_momentums = options.base_momentum.expanded("base_momentum", groups.size());
  begin_momentum(optimizer(), groups, base_momentums, max_momentums);
}

double OneCycleLR::anneal(double start, double end, double done) const {
  if (anneal_func_type_ == "linear") return (end - start) * done + start;
  return end + (start - end) / 2.0 * (std::cos(std::numbers::pi * done) + 1);
}

double OneCycleLR::bound(size_t group, const std::string& name) const {
  const Group& noted = scheduled_groups().groups()[group];
  const std::array<std::pair<const char*, std::optional<double>>, 5> bounds = {
      {{"initial_lr", noted.initial_lr},
       {"max_lr", noted.max_lr},
       {"min_lr", noted.min_lr},
       {"max_momentum", noted.max_momentum},
       {"base_momentum", noted.base_momentum}}};
  for (const auto& [known, value] : bounds) {
    if (name == known && value) return *value;
  }
  TORCH_CHECK_VALUE(false, "OneCycleLR: param_groups[", group, "] has no '", name, "'");
}

std::vector<double> OneCycleLR::get_lr() {
  TORCH_CHECK_VALUE(last_epoch_ <= total_steps_, "Tried to step ", last_epoch_,
                    " times. The specified number of total steps is ", total_steps_);
  check_group_count(base_lrs_.size());
  const auto step = static_cast<double>(last_epoch_);
  double start_step = 0;
  auto phase = phases_.begin();
  for (; step > phase->end_step && phase + 1 != phases_.end(); ++phase) start_step = phase->end_step;
  const double done = (step - start_step) / (phase->end_step - start_step);
  std::vector<double> lrs;
  std::vector<double> momentums;
  for (size_t group = 0; group < base_lrs_.size(); ++group) {
    lrs.push_back(anneal(bound(group, phase->start_lr), bound(group, phase->end_lr), done));
    if (!cycle_momentum_) continue;
    momentums.push_back(anneal(bound(group, phase->start_momentum), bound(group, phase->end_momentum), done));
  }
  if (!std::isnan(done)) set_momentums(optimizer(), momentums);  // else set_lrs() throws
  return lrs;
}

StateDict OneCycleLR::state_dict() const {
  StateDict state = LRScheduler::state_dict();
  std::vector<c10::IValue> phases;
  for (const Phase& phase : phases_) {
    phases.push_back(to_object(StateDict{{"end_step", phase.end_step},
                                         {"start_lr", phase.start_lr},
                                         {"end_lr", phase.end_lr},
                                         {"start_momentum", phase.start_momentum},
                                         {"end_momentum", phase.end_momentum}}));
  }
  state["_schedule_phases"] = to_object(phases);
  return state;
}

void OneCycleLR::load_state_dict(const StateDict& state) {
  std::vector<Phase> phases;
  for (const auto& phase : state_value<std::vector<StateDict>>(state, "_schedule_phases", name())) {
    const auto text = [&](const char* key) { return state_value<std::string>(phase, key, name()); };
    phases.push_back({state_value<double>(phase, "end_step", name()), text("start_lr"), text("end_lr"),
                      text("start_momentum"), text("end_momentum")});
  }
  TORCH_CHECK_VALUE(!phases.empty(), "OneCycleLR::load_state_dict: the state has no phases");
  LRScheduler::load_state_dict(state);
  phases_ = std::move(phases);
}

}  // namespace lockstep::lr_scheduler
