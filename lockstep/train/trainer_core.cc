#include <algorithm>
#include <cmath>
#include <exception>
#include <numeric>
#include <type_traits>
#include <utility>
#include <variant>

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/base/ranks.h>
#include <lockstep/base/training/training_phases.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/nn/grad_norm.h>
#include <lockstep/optim/lr_scheduler.h>
#include <lockstep/optim/optimizer_state_dict.h>
#include <lockstep/train/internal/trainer_parts.h>
#include <lockstep/train/trainer_core.h>

namespace lockstep {
namespace {

/// The options with the device that they mean.
TrainerOptions with_device(TrainerOptions options, const torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups()) {
    if (!options.device && !group.params().empty()) options.device = group.params().front().device();
  }
  if (!options.device) options.device = c10::Device(c10::kCPU);
  if (!options.device->is_cpu() && !options.device->has_index()) {
    options.device = c10::impl::getDeviceGuardImpl(options.device->type())->getDevice();
  }
  return options;
}

/// The options with the scheduler that they make, which is then `own`.
TrainerOptions with_scheduler(TrainerOptions options, torch::optim::Optimizer& optimizer,
                              std::shared_ptr<lr_scheduler::LRScheduler>& own) {
  if (const auto* make = std::get_if<TrainerOptions::MakeScheduler>(&options.scheduler)) {
    if (*make) own = (*make)(optimizer);
    options.scheduler = own.get();
  }
  return options;
}

GradScalerOptions scaler_options(const TrainerOptions& options) {
  GradScalerOptions answer = options.scaler;
  answer.device = options.device->type();
  answer.enabled = options.autocast_dtype == c10::kHalf;
  // A stage sees its own gradients alone.
  if (options.strategy == Strategy::pipeline && !answer.process_group) {
    answer.process_group = options.process_group;
  }
  return answer;
}

void check(const TrainerOptions& options) {
  const auto positive = [](const char* name, int64_t value) {
    TORCH_CHECK_VALUE(value >= 1, "Trainer: ", name, " is ", value, "; it must be at least 1");
  };
  TORCH_CHECK_VALUE(options.max_epochs >= 0, "Trainer: max_epochs is ", options.max_epochs,
                    "; it must not be negative");
  positive("accumulate_grad_batches", options.accumulate_grad_batches);
  positive("validate_every_n_epochs", options.validate_every_n_epochs);
  positive("log_every_n_steps", options.log_every_n_steps);
  std::visit(
      []([[maybe_unused]] auto schedule) {
        if constexpr (std::is_pointer_v<decltype(schedule)>) {
          TORCH_CHECK_VALUE(schedule != nullptr, "Trainer: scheduler is null; leave it out for none");
        }
      },
      options.scheduler);
  const bool plateau = options.scheduler.index() == 2;
  TORCH_CHECK_VALUE(!plateau || options.scheduler_interval == TrainerOptions::Interval::epoch,
                    "Trainer: ReduceLROnPlateau needs a metric, which there is once an epoch; leave "
                    "scheduler_interval at epoch");
  const auto of_epochs = [](const char* who, const std::string& name) {
    TORCH_CHECK_VALUE(!name.starts_with("train/"), "Trainer: ", who, " looks at '", name,
                      "', which is no metric of an epoch; name one of epoch/… or validation/…");
  };
  if (options.early_stopping) of_epochs("early_stopping", options.early_stopping->monitor);
  if (plateau) of_epochs("ReduceLROnPlateau", options.scheduler_metric);
}

double metric_of(const Metrics& metrics, const std::string& name, const char* who) {
  const auto found = metrics.find(name);
  if (found != metrics.end()) return found->second;
  std::string known;
  for (const auto& [other, unused] : metrics) known += (known.empty() ? "" : ", ") + other;
  TORCH_CHECK_VALUE(false, "Trainer: ", who, " looks at '", name, "', but the epoch's metrics are ", known,
                    "; name one of them, or validate in each epoch");
}

}  // namespace

TrainerCore::TrainerCore(torch::optim::Optimizer& optimizer, TrainerOptions options,
                         std::shared_ptr<void> own_model)
    : own_model_(std::move(own_model)),
      options_(with_scheduler(with_device(std::move(options), optimizer), optimizer, own_scheduler_)),
      optimizer_(optimizer),
      scaler_(scaler_options(options_)),
      snapshot_(random_devices()),
      shared_part_(std::make_unique<SharedPart>(SharedPart{*this})),
      rank_part_(std::make_unique<RankPart>(RankPart{*this})),
      // Rank 0's, whatever the user has given the others.
      writers_(options_.writers, !is_initialized() || get_rank(options_.process_group) == 0) {
  check(options_);
  set_group(options_.process_group || !is_initialized() ? options_.process_group : default_group());
  if (options_.early_stopping) early_stopping_.emplace(*options_.early_stopping);
}

TrainerCore::~TrainerCore() = default;

std::vector<at::Device> TrainerCore::random_devices() const {
  std::vector<at::Device> devices;
  const auto add = [&](const at::Device& device) {
    if (device.is_cpu() || std::find(devices.begin(), devices.end(), device) != devices.end()) return;
    devices.push_back(device);
  };
  add(*options_.device);
  for (const auto& group : optimizer_.param_groups()) {
    for (const auto& parameter : group.params()) add(parameter.device());
  }
  return devices;
}

bool TrainerCore::finished() const {
  // A checkpoint of the last step does not say whether its epoch ends with it.
  const bool no_epoch_to_end = position_ == 0 || epoch_phase_ == EpochPhase::kCut;
  return epoch_ >= options_.max_epochs || (out_of_steps() && no_epoch_to_end) ||
         (early_stopping_ && early_stopping_->stopped());
}

bool TrainerCore::out_of_steps() const {
  return options_.max_steps && step_ >= *options_.max_steps;
}

void TrainerCore::tell(HeldTensors& held) const {
  for (const at::Tensor& parameter : parameters_) held.add(parameter);
  try {
    const auto state = optimizer_state_tensors(optimizer_);
    held.optimizer_state.insert(held.optimizer_state.end(), state.begin(), state.end());
  } catch (const c10::Error&) {
    // Of an optimizer whose state has no known form nothing is told.
  }
}

void TrainerCore::set_group(const ProcessGroup& group) {
  group_ = group;
  rank_ = group_ ? get_rank(group_) : 0;
  world_size_ = group_ ? get_world_size(group_) : 1;
  replicas_ = world_size_;
  replica_of_ranks_.resize(static_cast<size_t>(world_size_));
  std::iota(replica_of_ranks_.begin(), replica_of_ranks_.end(), 0);
  if (!options_.checkpoint) return;
  // If that fails, the old one is still there to save alone.
  auto checkpoints = std::make_unique<CheckpointManager>(*options_.checkpoint, group_);
  checkpoints_ = std::move(checkpoints);  // waits for what the old one writes
}

// ---- What happens around epochs and steps

void TrainerCore::call(TrainerCallbacks::Function TrainerCallbacks::*which) {
  for (const auto& callbacks : options_.callbacks) {
    if (callbacks.*which) (callbacks.*which)(*this);
  }
}

void TrainerCore::begin_training() {
  stopped_ = false;
  if (options_.profiler) profiler_ = std::make_unique<Profiler>(*options_.profiler);
  window_begin_ = std::chrono::steady_clock::now();
  if (!options_.hyperparameters.empty()) writers_.log_hyperparameters(options_.hyperparameters);
}

void TrainerCore::end_training(std::string_view status) {
  profiler_.reset();
  bar_.reset();
  if (status == "failed") {
    begin_window();  // ranks may have done unequally many steps
  } else if (window_samples_ > 0) {
    log_window();  // the steps since its last line
  }
  if (checkpoints_ && status == "finished") {
    const auto& plan = *options_.checkpoint;
    const bool planned =
        plan.every_steps > 0 || plan.every_epochs > 0 || plan.every.count() > 0 || plan.automatic;
    if (planned && saved_ != std::pair(step_, epoch_)) {  // what the plan has not reached
      CheckpointInfo about = info({});
      // Those of the last epoch's end say nothing of weights that have been trained since: it may be the best no more.
      if (position_ == 0) about.metrics = epoch_metrics_;
      save_by_plan(std::move(about));
    }
  }
  if (checkpoints_ && status != "failed") checkpoints_->wait();
  end_status_ = status;
  if (recover) return;
  if (status == "killed") {
    writers_.flush();  // train() may go on
  } else {
    finalize_writers();
  }
}

void TrainerCore::finalize_writers() {
  if (!end_status_.empty()) writers_.finalize(std::exchange(end_status_, {}));
}

bool TrainerCore::on_all(bool mine) const {
  if (!group_) return mine;
  at::Tensor all = at::empty({1}, at::kLong).fill_(mine ? 1 : 0);
  all_reduce(all, ReduceOp::MIN, group_);
  return all.item<int64_t>() != 0;
}

void TrainerCore::begin_epoch(int64_t batches) {
  const int64_t per_step = options_.accumulate_grad_batches;
  bar_.emplace(
      (batches + per_step - 1) / per_step,
      "epoch " + std::to_string(epoch_ + 1) + "/" + std::to_string(options_.max_epochs),
      ProgressBarOptions{.unit = "steps", .quiet = rank() != 0 || !options_.progress_bar, .waited = waited_});
  bar_begin_ = std::chrono::steady_clock::now();
  bar_samples_ = 0;
  call(&TrainerCallbacks::before_epoch);
}

TrainerCore::StepPlan TrainerCore::agree(const StepNote& mine) {
  const bool stop = stop_requested_ || (interrupted && interrupted());
  if (!group_) {
    if (stop) stop_requested_ = false;
    return {mine.micro_batches, mine.samples, stop, mine.begun};
  }
  constexpr int64_t kNumbers = 6;
  at::Tensor note = at::empty({kNumbers}, at::kLong);
  auto* numbers = note.mutable_data_ptr<int64_t>();
  numbers[0] = mine.micro_batches, numbers[1] = mine.samples;
  numbers[2] = mine.can_stand_in ? 1 : 0, numbers[3] = stop ? 1 : 0, numbers[4] = mine.begun ? 1 : 0;
  numbers[5] = mine.fingerprint;
  at::Tensor notes = at::empty({world_size(), kNumbers}, at::kLong);
  all_gather_into_tensor(notes, note, group_);
  StepPlan plan{.begun = true};
  std::vector<int> helpless;
  std::vector<int> first_of_replica(static_cast<size_t>(replicas_), -1);
  std::vector<int> unlike;
  const auto replica_of = [&](int rank) {
    return static_cast<size_t>(replica_of_ranks_[static_cast<size_t>(rank)]);
  };
  const auto note_of = [&](int rank) { return notes.const_data_ptr<int64_t>() + rank * kNumbers; };
  for (int rank = 0; rank < world_size(); ++rank) {
    const auto* of_rank = note_of(rank);
    plan.micro_batches = std::max(plan.micro_batches, of_rank[0]);
    int& first = first_of_replica.at(replica_of(rank));
    if (first < 0) {
      first = rank;
      plan.samples += of_rank[1];
    } else if (const auto* of_first = note_of(first);
               of_rank[1] != of_first[1] || of_rank[5] != of_first[5]) {
      if (unlike.empty()) unlike = {first, rank};
    }
    if (of_rank[0] == 0 && of_rank[2] == 0) helpless.push_back(rank);
    plan.stop = plan.stop || of_rank[3] != 0;
    plan.begun = plan.begun && of_rank[4] != 0;
  }
  if (plan.stop) stop_requested_ = false;
  TORCH_CHECK_VALUE(plan.stop || unlike.empty(), "Trainer: ", name_ranks(unlike),
                    " are of one pipeline and have different batches in epoch ", epoch_ + 1,
                    "; give all ranks of a pipeline the same ones: a sampler with the number of pipelines as "
                    "num_replicas, and the number of this one as rank (here ",
                    replicas_, " and ", replica_of(rank_),
                    "), and the same seed before the loader's epochs where samples are changed at random");
  TORCH_CHECK_VALUE(plan.stop || plan.samples == 0 || helpless.empty(), "Trainer: ", name_ranks(helpless),
                    " got no sample in epoch ", epoch_ + 1,
                    ", and had none before, while others have some; give all ranks equally many samples "
                    "(data::DistributedSampler), or take a smaller batch_size");
  return plan;
}

void TrainerCore::begin_attempt() {
  if (recover) snapshot_.take(buffers());
  step_averages_.clear();
  optimizer_.zero_grad();
  if (zero_grad_sharded_) zero_grad_sharded_();
}

void TrainerCore::undo_attempt() {
  snapshot_.restore();
  if (zero_grad_sharded_) zero_grad_sharded_();
}

void TrainerCore::note(const StepOutput& output, int64_t samples) {
  step_loss_ = output.loss.item<double>();
  step_averages_.add("loss", step_loss_, static_cast<double>(samples));
  for (const auto& [name, value] : output.metrics) {
    step_averages_.add(name, value, static_cast<double>(samples));
  }
}

void TrainerCore::share_data_as(int64_t replica, int64_t replicas) {
  at::Tensor all = at::empty({world_size()}, at::kLong);
  all_gather_into_tensor(all, at::empty({1}, at::kLong).fill_(replica), group_);
  replicas_ = replicas;
  const auto* numbers = all.const_data_ptr<int64_t>();
  replica_of_ranks_.assign(numbers, numbers + all.numel());
}

void TrainerCore::share_step_loss(int group_rank, const ProcessGroup& group) {
  const Metrics means = step_averages_.local();
  if (const auto mean = means.find("loss"); mean != means.end()) step_loss_ = mean->second;
  const at::Tensor loss = at::empty({1}, at::kDouble).fill_(step_loss_);
  broadcast(loss, get_global_rank(group, group_rank), group);
  step_loss_ = loss.item<double>();
}

void TrainerCore::apply_gradients(const StepPlan& plan) {
  if (options_.clip_grad_norm || options_.clip_grad_value) scaler_.unscale_(optimizer_);
  if (options_.clip_grad_norm) {
    const double max_norm = *options_.clip_grad_norm;
    const at::Tensor norm = clip_norm_ ? clip_norm_(max_norm) : clip_grad_norm_(parameters_, max_norm);
    grad_norm_ = norm.item<double>();
  }
  if (options_.clip_grad_value) clip_grad_value_(parameters_, *options_.clip_grad_value);
  if (checkpoints_) checkpoints_->finish_copy();  // with copy_later parameters are copied until now
  applying_ = true;
  {
    // Readers of traces know an optimizer by the first part, which is Python's.
    RECORD_USER_SCOPE("Optimizer.step#lockstep::Trainer");
    scaler_.step(optimizer_);
  }
  scaler_.update();
  if (options_.scheduler_interval == TrainerOptions::Interval::step) step_scheduler();
  ++step_;
  position_ += plan.samples;
  loader_progress_.unseen_batches = 0;
  epoch_averages_.add(step_averages_);
  applying_ = false;

  snapshot_.drop();
  window_.add(step_averages_);
  window_samples_ += static_cast<double>(plan.samples);
  tell_progress(step_, step_loss_);
  show_step(plan);
  if (step_ % options_.log_every_n_steps == 0) log_window();
  call(&TrainerCallbacks::after_step);
  if (checkpoints_ && checkpoints_->should_save(step_)) save_by_plan(info({}));
  profile_step();
}

TrainerCore::StepPlan TrainerCore::cut_epoch(bool has_batch) {
  // As micro-batches, of which ranks of one pipeline may have unlike numbers: one of them may fail to make its batch.
  StepPlan plan = agree({.micro_batches = has_batch ? 1 : 0, .can_stand_in = true});
  plan.samples = plan.micro_batches;
  stopped_ = plan.stop && plan.samples == 0;  // else nothing is left to do
  if (plan.samples > 0) epoch_phase_ = EpochPhase::kCut;
  return plan;
}

void TrainerCore::warn_of_batch_after_last_step() const {
  LOCKSTEP_LOG(kWarning)
      << "Trainer: max_steps are done, and the loader has failed to make the batch after them, so epoch "
      << epoch_ + 1 << " counts as not ended: " << text_of(std::current_exception());
}

/// What goes wrong with a profile does not end the training, of one rank alone least of all.
void TrainerCore::profile_step() {
  if (!profiler_) return;
  try {
    profiler_->step();
  } catch (const std::exception& error) {
    LOCKSTEP_LOG(kError) << "the profile of a cycle is lost: " << text_of(error);
  }
}

bool TrainerCore::validation_due() const {
  return (epoch_ + 1) % options_.validate_every_n_epochs == 0 || epoch_ + 1 == options_.max_epochs ||
         out_of_steps();
}

void TrainerCore::step_scheduler() {
  using namespace lr_scheduler;
  if (auto* schedule = std::get_if<LRScheduler*>(&options_.scheduler)) {
    (*schedule)->step();
  } else if (auto* plateau = std::get_if<ReduceLROnPlateau*>(&options_.scheduler)) {
    (*plateau)->step(metric_of(metrics_, options_.scheduler_metric, "ReduceLROnPlateau"));
  }
}

void TrainerCore::note_epoch() {
  bar_.reset();
  for (const auto& [name, value] : epoch_averages_.reduce(group_)) metrics_["epoch/" + name] = value;
  // If that throws, it is done again when training goes on.
  epoch_phase_ = EpochPhase::kTrained;
  loader_progress_.ended = false;
}

void TrainerCore::finish_epoch() {
  // An epoch without validation says nothing about the validation's metrics.
  const auto is_new = [validated = validation_due()](const std::string& name) {
    return !name.starts_with("train/") && (validated || !name.starts_with("validation/"));
  };
  std::optional<double> monitored;
  if (early_stopping_ && is_new(early_stopping_->options().monitor)) {
    monitored = metric_of(metrics_, early_stopping_->options().monitor, "early_stopping");
  }
  const bool plateau = options_.scheduler.index() == 2;
  if (plateau && is_new(options_.scheduler_metric)) {
    metric_of(metrics_, options_.scheduler_metric, "ReduceLROnPlateau");  // throws before anything is changed
  }
  applying_ = true;
  metrics_["epoch/lr"] = learning_rate();
  if (options_.scheduler_interval == TrainerOptions::Interval::epoch &&
      (!plateau || is_new(options_.scheduler_metric))) {
    step_scheduler();
  }
  if (monitored) early_stopping_->update(*monitored);
  ++epoch_;
  metrics_["epoch/number"] = static_cast<double>(epoch_);
  position_ = 0;
  epoch_phase_ = EpochPhase::kSteps;
  epoch_averages_.clear();
  applying_ = false;
  epoch_metrics_ = metrics_;
  std::erase_if(epoch_metrics_, [&](const auto& metric) { return !is_new(metric.first); });
  log(epoch_metrics_);
  trial_.report(epoch_metrics_, epoch_);  // by epochs, which count the same with any batch size
  if (checkpoints_ && checkpoints_->should_save_at_epoch_end(epoch_)) {
    auto about = info({});
    about.metrics = epoch_metrics_;
    save_by_plan(std::move(about));
  }
  call(&TrainerCallbacks::after_epoch);
}

// ---- The log

void TrainerCore::show_step(const StepPlan& plan) {
  if (!bar_ || rank() != 0 || !options_.progress_bar) return;
  bar_samples_ += static_cast<double>(plan.samples);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - bar_begin_;
  bar_->set_postfix("samples/s", std::to_string(std::llround(bar_samples_ / seconds.count())));
  bar_->set_postfix("lr", learning_rate());
  bar_->set_postfix("loss", step_loss_);
  bar_->update();
}

double TrainerCore::learning_rate() const {
  return optimizer_.param_groups().front().options().get_lr();
}

/// The log's next line counts from here.
void TrainerCore::begin_window() {
  window_.clear();
  window_samples_ = 0;
  grad_norm_.reset();
  window_begin_ = std::chrono::steady_clock::now();
}

void TrainerCore::log_window() {
  Metrics metrics;
  for (const auto& [name, value] : window_.reduce(group_)) metrics["train/" + name] = value;
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - window_begin_;
  metrics["train/samples_per_second"] = window_samples_ / seconds.count();
  metrics["train/lr"] = learning_rate();
  if (grad_norm_) metrics["train/grad_norm"] = *grad_norm_;
  begin_window();
  for (const auto& [name, value] : metrics) metrics_[name] = value;
  log(metrics);
  trial_.report(metrics, step_);
}

void TrainerCore::log(const Metrics& metrics) {
  writers_.log_metrics(metrics, step_);
}

}  // namespace lockstep
