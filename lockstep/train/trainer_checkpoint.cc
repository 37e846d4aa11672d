// Of TrainerCore: what its checkpoints hold, when they are saved, and how training goes on from one.
#include <cmath>
#include <cstdint>
#include <numeric>
#include <utility>
#include <variant>
#include <vector>

#include <lockstep/base/log.h>
#include <lockstep/checkpoint/checkpoint_manager.h>
#include <lockstep/optim/lr_scheduler.h>
#include <lockstep/train/internal/trainer_parts.h>
#include <lockstep/train/trainer_core.h>

namespace lockstep {
namespace {

constexpr const char* kTrainer = "Trainer";

}  // namespace

StateDict TrainerCore::SharedPart::state_dict() const {
  StateDict state{{"epoch", core.epoch_},
                  {"step", core.step_},
                  {"position", core.position_},
                  {"epoch_trained", core.epoch_phase_ == EpochPhase::kTrained},
                  {"max_micro_batch", core.max_micro_batch_},
                  {"metrics", to_object(core.metrics_)},
                  {"averages", to_object(core.shared_averages_.state_dict())},
                  {"averages_step", core.shared_step_}};
  if (core.early_stopping_) state["early_stopping"] = to_object(core.early_stopping_->state_dict());
  return state;
}

void TrainerCore::SharedPart::load_state_dict(const StateDict& state) {
  core.epoch_ = state_value<int64_t>(state, "epoch", kTrainer);
  core.step_ = state_value<int64_t>(state, "step", kTrainer);
  core.position_ = state_value<int64_t>(state, "position", kTrainer);
  core.epoch_phase_ =
      state_value<bool>(state, "epoch_trained", kTrainer) ? EpochPhase::kTrained : EpochPhase::kSteps;
  core.max_micro_batch_ = state_value<int64_t>(state, "max_micro_batch", kTrainer);
  core.metrics_ = state_value<Metrics>(state, "metrics", kTrainer);
  core.shared_averages_.clear();
  core.shared_step_ = -1;
  if (state.count("averages_step") != 0) {  // older checkpoints have none
    core.shared_step_ = state_value<int64_t>(state, "averages_step", kTrainer);
    core.shared_averages_.load_state_dict(state_value<StateDict>(state, "averages", kTrainer));
  }
  if (core.early_stopping_ && state.count("early_stopping") != 0) {
    core.early_stopping_->load_state_dict(state_value<StateDict>(state, "early_stopping", kTrainer));
  }
}

StateDict TrainerCore::RankPart::state_dict() const {
  // Saved while a step still wants them, the last batches are to come again, and so is the end.
  const bool ended = core.loader_progress_.ended && core.loader_progress_.unseen_batches == 0;
  return {{"loader", to_object(core.loader_state(core.loader_progress_.unseen_batches))},
          {"ended", ended},
          {"replica_of_ranks", to_object(core.replica_of_ranks_)},
          {"averages", to_object(core.epoch_averages_.state_dict())}};
}

void TrainerCore::RankPart::load_state_dict(const StateDict& state) {
  // As many ranks may have shared the data otherwise, as pipelines do; then the places are of no use to any of them. In older
  // checkpoints each rank has a part of its own.
  std::vector<int64_t> replicas(static_cast<size_t>(core.world_size_));
  std::iota(replicas.begin(), replicas.end(), 0);
  if (state.count("replica_of_ranks") != 0) {
    replicas = state_value<std::vector<int64_t>>(state, "replica_of_ranks", kTrainer);
  }
  if (replicas != core.replica_of_ranks_) return;
  core.epoch_averages_.load_state_dict(state_value<StateDict>(state, "averages", kTrainer));
  core.load_loader(state_value<StateDict>(state, "loader", kTrainer));
  core.loader_progress_.ended = state_value<bool>(state, "ended", kTrainer);
  core.loader_progress_.unseen_batches = 0;
  core.loader_restored_ = true;
}

/// The Trainer itself has added model and optimizer.
void TrainerCore::add_parts() {
  using namespace lr_scheduler;
  if (auto* schedule = std::get_if<LRScheduler*>(&options_.scheduler)) {
    training_state_.add("scheduler", **schedule);
  } else if (auto* plateau = std::get_if<ReduceLROnPlateau*>(&options_.scheduler)) {
    training_state_.add("scheduler", **plateau);
  }
  if (scaler_.is_enabled()) training_state_.add("scaler", scaler_);
  training_state_.add("trainer", *shared_part_);
  training_state_.add_per_rank("place", *rank_part_);
  training_state_.add_rng();
}

CheckpointInfo TrainerCore::info(const std::string& emergency) const {
  CheckpointInfo info;
  info.step = step_;
  info.epoch = epoch_;
  info.emergency = emergency;
  return info;
}

void TrainerCore::save(const std::string& emergency) {
  if (!checkpoints_) return;
  share_averages(epoch_averages_.of_all_ranks(group_));
  checkpoints_->save(training_state_, info(emergency));
  checkpoints_->wait();
}

bool TrainerCore::save_alone(const std::string& emergency) {
  if (!checkpoints_) return false;
  share_averages(epoch_averages_);
  return checkpoints_->save_alone(training_state_, info(emergency));
}

/// What the next checkpoint holds of the epoch's metrics.
void TrainerCore::share_averages(MetricAverages averages) {
  shared_averages_ = std::move(averages);
  shared_step_ = step_;
}

std::optional<CheckpointInfo> TrainerCore::restore() {
  if (!checkpoints_) return {};
  loader_restored_ = false;
  loader_progress_ = {};
  const StateDict fresh = loader_state(0);
  auto loaded = checkpoints_->restore(training_state_);
  if (!loaded) return {};
  applying_ = false;
  begin_window();
  saved_ = {step_, epoch_};
  if (!loader_restored_) epoch_averages_.clear();  // what was trained here before
  const bool in_epoch = position_ > 0 && epoch_phase_ != EpochPhase::kTrained;
  // All ranks go on in the same way: of one that survived alone, only it has its own place.
  const bool has_place = loader_restored_ && !loader_state(0).empty();
  bool goes_on = !in_epoch || on_all(has_place);
  if (!goes_on) {
    loader_progress_.ended = false;
    if (!fresh.empty()) load_loader(fresh);
    goes_on = on_all(start_loader_at(position_));
    if (goes_on) resume_averages();
  }
  if (!goes_on) {
    if (!fresh.empty()) load_loader(fresh);
    position_ = 0;
    epoch_averages_.clear();
    if (rank() == 0) {
      LOCKSTEP_LOG(kWarning) << "Trainer: epoch " << epoch_ + 1 << " was begun by " << loaded->world_size
                             << " ranks, and the loader's sampler can't go on with it on " << world_size()
                             << "; it begins again (data::DistributedSampler can)";
    }
  }
  writers_.resume(step_ + 1);
  if (rank() == 0) {
    LOCKSTEP_LOG(kInfo) << "Trainer: goes on from " << loaded->directory << ", after step " << step_
                        << (loaded->emergency.empty() ? "" : ", saved because " + loaded->emergency);
  }
  return loaded;
}

/// The epoch goes on with other ranks than it was begun by: rank 0 takes over the sums of them all. A
/// checkpoint that the user has saved from state() may have those of an earlier step.
void TrainerCore::resume_averages() {
  epoch_averages_.clear();
  if (rank() != 0) return;
  if (shared_step_ == step_) epoch_averages_ = shared_averages_;
  const auto missing = position_ - std::llround(epoch_averages_.samples("loss"));
  if (missing <= 0) return;
  LOCKSTEP_LOG(kWarning) << "Trainer: epoch/… metrics of epoch " << epoch_ + 1 << " leave out " << missing
                         << " of the " << position_
                         << " samples that were seen before; the checkpoint does not have their sums, which "
                            "Trainer::save() and saves by plan put there";
}

void TrainerCore::save_by_plan(CheckpointInfo about) {
  share_averages(epoch_averages_.of_all_ranks(group_));
  checkpoints_->save(training_state_, std::move(about));
  saved_ = {step_, epoch_};
}

}  // namespace lockstep
