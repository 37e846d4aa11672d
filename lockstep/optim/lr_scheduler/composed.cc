#include <algorithm>

#include <c10/util/Exception.h>

#include <lockstep/optim/internal/scheduled_groups.h>
#include <lockstep/optim/lr_scheduler/composed.h>

namespace lockstep::lr_scheduler {
namespace {

using torch::optim::Optimizer;

/// The optimizer of the first one, unless told.
Optimizer& checked(const Schedulers& schedulers, const char* owner, Optimizer* optimizer) {
  TORCH_CHECK_VALUE(!schedulers.empty(), owner, " expects at least one scheduler, but got no scheduler.");
  for (size_t index = 0; index < schedulers.size(); ++index) {
    TORCH_CHECK_VALUE(schedulers[index], owner, ": the scheduler at index ", index, " is null");
    if (!optimizer) optimizer = &schedulers[index]->optimizer();
    TORCH_CHECK_VALUE(optimizer == &schedulers[index]->optimizer(), owner,
                      " expects all schedulers to belong to the same optimizer, but got scheduler ",
                      schedulers[index]->name(), " at index ", index, " of another one");
  }
  return *optimizer;
}

}  // namespace

ComposedScheduler::ComposedScheduler(Schedulers schedulers, Optimizer* optimizer, const char* name)
    : LRScheduler(checked(schedulers, name, optimizer), name), schedulers_(std::move(schedulers)) {}

void ComposedScheduler::undo_initial_step() {
  for (const auto& scheduler : schedulers_) scheduler->undo_initial_step();
}

void ComposedScheduler::step(double /*epoch*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, name(),
                              "::step takes no epoch, as in Python: its schedulers count their own");
}

std::vector<double> ComposedScheduler::get_lr() {
  return last_lr_;
}

StateDict ComposedScheduler::state_dict() const {
  StateDict state;
  state_fields().save(state);
  std::vector<StateDict> parts;
  for (const auto& scheduler : schedulers_) parts.push_back(scheduler->state_dict());
  state["_schedulers"] = to_object(parts);
  return state;
}

void ComposedScheduler::load_state_dict(const StateDict& state) {
  const auto parts = state_value<std::vector<StateDict>>(state, "_schedulers", name());
  TORCH_CHECK_VALUE(parts.size() == schedulers_.size(), name(), "::load_state_dict: the state has ",
                    parts.size(), " schedulers, this has ", schedulers_.size(),
                    "; construct it as the one that wrote the state");
  for (size_t index = 0; index < parts.size(); ++index) schedulers_[index]->load_state_dict(parts[index]);
  state_fields().load(state, name());
}

SequentialLR::SequentialLR(Optimizer& optimizer, Schedulers schedulers, std::vector<int64_t> milestones,
                           int64_t last_epoch)
    : ComposedScheduler(std::move(schedulers), &optimizer, "SequentialLR"),
      milestones_(std::move(milestones)) {
  TORCH_CHECK_VALUE(milestones_.size() == schedulers_.size() - 1,
                    "Sequential Schedulers expects number of schedulers provided to be one more than the "
                    "number of milestone points, but got number of schedulers ",
                    schedulers_.size(), " and the number of milestones to be equal to ", milestones_.size());
  for (size_t index = 1; index < schedulers_.size(); ++index) {
    const auto* scheduler = schedulers_[index].get();
    TORCH_CHECK_VALUE(!dynamic_cast<const ComposedScheduler*>(scheduler), "SequentialLR: the ",
                      scheduler->name(), " at index ", index,
                      " can't begin in the middle; only the first scheduler may be made of others");
  }
  last_epoch_ = last_epoch + 1;
  std::vector<double> initial_lrs;
  for (const auto& group : scheduled_groups().groups()) {
    if (group.initial_lr) initial_lrs.push_back(*group.initial_lr);
  }
  set_lrs(initial_lrs);
  undo_initial_step();
  const auto first = std::ranges::upper_bound(milestones_, 0) - milestones_.begin();
  schedulers_[static_cast<size_t>(first)]->initial_step();
  last_lr_ = schedulers_[static_cast<size_t>(first)]->get_last_lr();
  state_fields().add("_milestones", milestones_);
  state_fields().add("last_epoch", last_epoch_);
  state_fields().add("_last_lr", last_lr_);
}

void SequentialLR::step() {
  ++last_epoch_;
  const auto index =
      static_cast<size_t>(std::ranges::upper_bound(milestones_, last_epoch_) - milestones_.begin());
  LRScheduler& scheduler = *schedulers_[index];
  if (index > 0 && milestones_[index - 1] == last_epoch_) {
    scheduler.update_lr(0);
  } else {
    scheduler.step();
  }
  last_lr_ = scheduler.get_last_lr();
}

ChainedScheduler::ChainedScheduler(Schedulers schedulers, Optimizer* optimizer)
    : ComposedScheduler(std::move(schedulers), optimizer, "ChainedScheduler") {
  state_fields().add("_last_lr", last_lr_);
}

void ChainedScheduler::step() {
  for (const auto& scheduler : schedulers_) scheduler->step();
  last_lr_ = current_lrs();
}

}  // namespace lockstep::lr_scheduler
