#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <lockstep/base/mix_bits.h>
#include <lockstep/nn/wrapped_module.h>
#include <lockstep/parallel/ddp/gradient_accumulation.h>
#include <lockstep/train/batch_access.h>
#include <lockstep/train/batch_pieces.h>
#include <lockstep/train/batches_of.h>
#include <lockstep/train/loss_computation.h>
#include <lockstep/train/model_access.h>
#include <lockstep/train/step_batches.h>
#include <lockstep/train/strategy.h>
#include <lockstep/train/trainer_core.h>

namespace lockstep {

/// A training loop: epochs of steps, validation, learning-rate schedule, log, checkpoints. Everything in it
/// could be written by hand from the library's public parts, and gives the same weights to the bit.
///
///     const auto loss_of = [](auto& model, auto& batch) {
///       return torch::nn::functional::cross_entropy(model.forward(batch.data), batch.target);
///     };
///     lockstep::Trainer trainer(model, optimizer, loader, loss_of, {.max_epochs = 5});
///     trainer.validate_on(validation_loader);
///     trainer.restore();  // if there is a checkpoint
///     trainer.train();
///
/// `model`: a DistributedDataParallel, a FullyShardedDataParallel (with the optimizer that it has made), or any
/// module in a job of one process; as it is, in a shared_ptr, or in a holder (torch::nn::Sequential, any
/// TORCH_MODULE). Or a plain module in a shared_ptr or a holder, and the options of an optimizer, which the Trainer
/// wraps and makes:
///
///     lockstep::Trainer trainer(net, torch::optim::AdamWOptions(1e-3), loader, loss_of,
///                               {.strategy = lockstep::Strategy::fsdp});
///
/// Or a pipeline: a torch::nn::Sequential, which the Trainer cuts by a balance, or the rank's stages of a model
/// that is nowhere as a whole:
///
///     lockstep::Trainer trainer(std::vector{stage}, torch::optim::AdamWOptions(1e-3), loader, loss_of,
///                               {.strategy = lockstep::Strategy::pipeline, .pipeline = {.n_microbatches = 8}});
///
/// Then all ranks of a pipeline have the same batches (DistributedSampler with the numbers of pipelines, not of
/// ranks), which is checked; the first stage gets their first tensor (BatchAccess); loss_of is called on the rank
/// of the last stage, with each micro-batch and a PipelineOutput for its model. step_loss() is the whole batch's,
/// on all ranks. docs/pipelines.md has what else is different.
///
/// `loss_of(model, batch)` returns the mean loss of the batch, or a StepOutput with metrics beside it. In training
/// it gets the model itself, in validation what a DistributedDataParallel wraps, so it is best a generic lambda
/// that calls forward(). `loader`: a data::DataLoader, or anything else that one can iterate (with its own
/// state_dict(unseen_batches), the state before the last so many, and load_state_dict(), if training is to be
/// resumed within an epoch). All must outlive the Trainer. Batches are brought to the model's device
/// (TrainerOptions::device) when they are computed on, but for those of types that can't be copied, which the
/// loader must bring there; a data::DeviceLoader around a loader with pin_memory lets the copies run beside the
/// computation. The loss is read in each step, which waits for the device.
///
/// A step's batches are held until it is done. Its gradients are those of the mean over all samples of all
/// ranks, also where the last batches are smaller on some ranks, or some ranks have fewer batches: before
/// each step the ranks tell each other what they have (one small all-gather), and one that has run out stands
/// in with its last batch at weight 0. (That batch counts again in a BatchNorm's running statistics.) With
/// equal batches each has the weight 1, so nothing is multiplied. Batches without a sample are passed over,
/// in training and in validation.
///
/// Metrics are means over samples of all ranks: "train/NAME" every log_every_n_steps and at the end of
/// train(), with "train/lr", "train/samples_per_second" and, when clipping, "train/grad_norm"; "epoch/NAME"
/// and "validation/NAME" at an epoch's end. NAME is "loss", or what loss_of has named. Rank 0 alone draws the
/// progress bar and calls the writers.
///
/// Not for optimizers that need a closure (LBFGS). Callbacks and metrics: see TrainerCore, TrainerOptions.
/// Failures are thrown as they come; RobustLoop survives some of them. Used by one thread.
template <class Model, class Loader, class LossFunction>
class Trainer final : public TrainerCore {
  static_assert(
      train::kIsStrategyModel<Model> || std::derived_from<Model, torch::nn::Module>,
      "Trainer: with an optimizer, the model is a torch::nn::Module: a DistributedDataParallel, a "
      "FullyShardedDataParallel, or in a job of one process any, also in a std::shared_ptr or a holder");

 public:
  using Batch = typename Loader::Batch;

  /// Collective. Throws c10::ValueError for options that make no sense, and for a model that does not average
  /// its gradients in a job of several ranks.
  Trainer(Model& model, torch::optim::Optimizer& optimizer, Loader& loader, LossFunction loss_of,
          TrainerOptions options = {})
      : TrainerCore(optimizer, std::move(options)),
        model_(model),
        loader_(loader),
        loss_of_(std::move(loss_of)) {
    TORCH_CHECK_VALUE(world_size() == 1 || train::kSynchronises<Model>,
                      "Trainer: in a job of several ranks the model must average its gradients; wrap it in a "
                      "lockstep::DistributedDataParallel");
    set_up();
  }
  /// The same of a module in a shared_ptr or a holder, which must outlive the Trainer.
  template <class Given>
  requires std::same_as<Model, ContainedModule<Given>> Trainer(Given& model,
                                                               torch::optim::Optimizer& optimizer,
                                                               Loader& loader, LossFunction loss_of,
                                                               TrainerOptions options = {})
      : Trainer(*handle_in(model), optimizer, loader, std::move(loss_of), std::move(options)) {}
  /// Wraps the module in a shared_ptr or a holder by options.strategy, and makes the optimizer for it.
  template <class Given, OptimizerDefaults Defaults>
  requires std::same_as<Model, StrategyModel<ContainedModule<Given>>> Trainer(const Given& net,
                                                                              const Defaults& optimizer,
                                                                              Loader& loader,
                                                                              LossFunction loss_of,
                                                                              TrainerOptions options = {})
      : Trainer(std::make_shared<Model>(handle_in(net), optimizer, options), loader, std::move(loss_of),
                options) {}
  /// Makes a pipeline of this rank's stages, and the optimizer for them. Throws c10::ValueError for what PipelinedModel and
  /// PipelineRunner refuse.
  template <OptimizerDefaults Defaults>
  requires std::same_as<Model, StrategyStages> Trainer(std::vector<PipelineStage> stages,
                                                       const Defaults& optimizer, Loader& loader,
                                                       LossFunction loss_of, TrainerOptions options = {})
      : Trainer(std::make_shared<Model>(std::move(stages), optimizer, options), loader, std::move(loss_of),
                options) {}

  /// Calls `action` with the model that is trained: the one that was given, or the wrapper of the module.
  template <class Action>
  decltype(auto) with_model(Action&& action) const {
    if constexpr (train::kIsStrategyModel<Model>) {
      return model_.visit(action);
    } else {
      return action(model_);
    }
  }

  /// What validates, after each epoch: `loader`, on which no rank should see what another sees
  /// (data::DistributedEvalSampler; ranks may have unequally many batches, and none), and `loss_of`, or a
  /// function of the same kind. `loader` must outlive the Trainer.
  template <class ValidationLoader>
  void validate_on(ValidationLoader& loader) {
    validate_on(loader, loss_of_);
  }
  template <class ValidationLoader, class Function>
  void validate_on(ValidationLoader& loader, Function function) {
    validation_ = [this, &loader, function](MetricAverages& averages) {
      return evaluate(loader, function, averages);
    };
  }

  void train() override {
    begin_training();
    try {
      while (!finished() && !stopped()) train_epoch();
    } catch (...) {
      end_training("failed");
      throw;
    }
    end_training(stopped() ? "killed" : "finished");
  }

  /// One epoch, or the rest of it: its steps, validation, and what belongs to its end. Returns metrics().
  const Metrics& train_epoch() {
    stopped_ = false;
    begin_epoch(batches_of_epoch());
    with_model([](auto& model) { model.train(); });
    if (epoch_phase_ != EpochPhase::kTrained) {
      if constexpr (requires { loader_.set_epoch(epoch()); }) loader_.set_epoch(epoch());
      if (!train_steps()) return metrics_;
      note_epoch();
    }
    if (!stopped_ && validation_ && validation_due()) validate();
    if (!stopped_) finish_epoch();
    return metrics_;
  }

  /// The mean of each metric over all samples of the validation, as "validation/NAME" in metrics(). Nothing
  /// is changed when training was to be stopped meanwhile.
  const Metrics& validate() {
    TORCH_CHECK(validation_, "Trainer: there is nothing to validate on; call validate_on() first");
    call(&TrainerCallbacks::before_validation);
    const bool training = with_model([](auto& model) { return model.is_training(); });
    const auto train_as_before = [&] { with_model([&](auto& model) { model.train(training); }); };
    with_model([this](auto& model) { train::share_buffers(model, group_); });
    // One that was interrupted is done again, and draws the same numbers.
    StepSnapshot random(random_devices());
    random.take({});
    with_model([](auto& model) { model.eval(); });
    MetricAverages averages;
    try {
      stopped_ = !validation_(averages);
    } catch (...) {
      train_as_before();
      random.restore();
      throw;
    }
    train_as_before();
    if (stopped_) {
      random.restore();
      return metrics_;
    }
    for (const auto& [name, value] : averages.reduce(group_)) metrics_["validation/" + name] = value;
    call(&TrainerCallbacks::after_validation);
    return metrics_;
  }

  void update_process_group(const ProcessGroup& group) override {
    // The model puts back those of its forward, the step begins before that.
    StepSnapshot random(random_devices());
    random.take({});
    with_model([&](auto& model) { train::use_group(model, group); });
    random.restore();
    if (options().scaler.process_group) scaler_.update_process_group(group);
    set_group(group);
  }

 private:
  Trainer(const std::shared_ptr<Model>& own, Loader& loader, LossFunction loss_of, TrainerOptions options)
      : TrainerCore(own->optimizer(), std::move(options), own),
        model_(*own),
        loader_(loader),
        loss_of_(std::move(loss_of)) {
    set_up();
  }

  template <class Given>
  static auto handle_in(const Given& given) {
    constexpr const char* kIsEmpty = "Trainer: the module is empty";
    if constexpr (requires { given.is_empty(); }) TORCH_CHECK_VALUE(!given.is_empty(), kIsEmpty);
    auto handle = internal::handle_of(given);
    TORCH_CHECK_VALUE(handle != nullptr, kIsEmpty);
    return handle;
  }

  void set_up() {
    with_model([this]<class Used>(Used& model) {
      parameters_ = model.parameters();
      clip_norm_ = train::clipping_of(model);
      if constexpr (std::same_as<Used, PipelinedModel>) {
        share_data_as(model.replica(), model.replicas());
        model.start(scaler_);
        state().add_model("model", model.stages());
        state().add_optimizer("optimizer", optimizer_, model.stages());
      } else {
        if constexpr (ShardedModel<Used>) zero_grad_sharded_ = [&model] { model.zero_grad(); };
        state().add_model("model", model);
        state().add_optimizer("optimizer", optimizer_, model);
      }
    });
    if constexpr (requires { loader_.waited(); }) waited_ = [this] { return loader_.waited(); };
    add_parts();
  }

  using Piece = train::BatchPiece<Batch>;

  /// All steps of the epoch; false if it was left in its middle.
  bool train_steps() {
    StepPlan plan;
    int64_t steps_before = step();
    const auto give_back = [&] { batches_.give_back(position_ == 0, step() != steps_before); };
    batches_.begin(random_devices(), position_ == 0);
    try {
      do {
        batches_.begin_step();
        steps_before = step();
        plan = out_of_steps() ? look_past_last_step() : train_step();
      } while (plan.samples > 0 && !plan.stop && epoch_phase_ == EpochPhase::kSteps);
    } catch (...) {
      batches_.end();
      try {
        if (consistent()) give_back();
      } catch (...) {  // a device is broken, say; what has failed first tells more
      }
      throw;
    }
    batches_.end();
    batches_.drop_held();
    if (plan.samples == 0) return true;
    give_back();  // it goes on here when train() is called again
    return false;
  }

  /// The last of max_steps is the epoch's last one where no rank has another batch. A loader that can't be given
  /// a batch back is not asked for one.
  StepPlan look_past_last_step() {
    bool has_batch = !loader_progress_.ended;
    if constexpr (train::StepBatches<Loader>::kResumes) {
      // The steps are done: what comes after them must not fail the training, nor leave the other ranks waiting.
      try {
        has_batch = batches_.next() != nullptr;
      } catch (...) {
        warn_of_batch_after_last_step();
      }
      if (!has_batch) loader_progress_.unseen_batches = 0;
    }
    return cut_epoch(has_batch);
  }

  /// An optimizer step, unless the plan that it returns is to do nothing or to stop.
  StepPlan train_step() {
    const bool has_batches = batches_.fetch(options_.accumulate_grad_batches);
    std::optional<StepPlan> plan;
    begun_ = false;
    while (!plan) {
      try {
        plan = attempt(has_batches);
      } catch (...) {
        with_model([](auto& model) { train::abandon_step(model); });
        undo_attempt();
        if (!recover) throw;
        recover(std::current_exception());  // throws, unless the step is to be done again
      }
    }
    stopped_ = plan->stop;
    if (plan->samples > 0 && !plan->stop) apply_gradients(*plan);
    return *plan;
  }

  /// Agrees on the step, and computes its gradients.
  StepPlan attempt(bool has_batches) {
    const auto pieces = train::pieces_of(batches_.held(), max_micro_batch_);
    const StepPlan plan = agree(note_of(pieces, has_batches));
    if (plan.stop || plan.samples == 0) return plan;
    if (!plan.begun) call(&TrainerCallbacks::before_step);
    begun_ = true;
    begin_attempt();
    compute_gradients(pieces, has_batches, plan);
    return plan;
  }

  StepNote note_of(const std::vector<Piece>& pieces, bool has_batches) {
    StepNote note;
    note.can_stand_in = !pieces.empty();
    note.begun = begun_;
    largest_micro_batch_ = 0;
    for (const Piece& piece : pieces) {
      largest_micro_batch_ = std::max(largest_micro_batch_, piece.length);
      if (has_batches) note.samples += piece.length;
    }
    if (has_batches) note.micro_batches = static_cast<int64_t>(pieces.size());
    if (has_batches) {
      uint64_t all = 0;  // not a sum, which these batches would have in any order
      for (const Batch& batch : batches_.held()) {
        all = mix_bits(all ^ static_cast<uint64_t>(fingerprint(batch)));
      }
      note.fingerprint = static_cast<int64_t>(all);
    }
    return note;
  }

  /// Accumulated over the pieces, and averaged over all ranks' samples. All ranks compute equally often, for
  /// a model may communicate in its forward.
  void compute_gradients(const std::vector<Piece>& pieces, bool has_batches, const StepPlan& plan) {
    const auto own = has_batches ? static_cast<int64_t>(pieces.size()) : 0;
    const double samples_per_rank = static_cast<double>(plan.samples) / static_cast<double>(replicas_);
    with_model([&]<class Used>(Used& model) {
      if constexpr (std::same_as<Used, PipelinedModel>) {
        compute_in_pipeline(model, pieces, own, samples_per_rank, plan.micro_batches);
        return;
      } else {
        GradientAccumulation accumulation(model, {.steps = plan.micro_batches});
        for (int64_t i = 0; i < plan.micro_batches; ++i) {
          const bool counts = i < own;
          const Piece& piece = pieces[std::min(static_cast<size_t>(i), pieces.size() - 1)];
          auto micro = accumulation.next(counts ? static_cast<double>(piece.length) : 0.0, samples_per_rank);
          const StepOutput output =
              piece.with_batch([&](const Batch& batch) { return loss().run(loss_of_, model, batch); });
          scaler_.scale(micro.scale(output.loss)).backward();
          if (counts) note(output, piece.length);
        }
      }
    });
  }

  /// The same by a pipeline, which cuts each piece into its own micro-batches.
  void compute_in_pipeline(PipelinedModel& model, const std::vector<Piece>& pieces, int64_t own,
                           double samples_per_rank, int64_t count) {
    model.share_buffers();
    for (int64_t i = 0; i < count; ++i) {
      const bool counts = i < own;
      const Piece& piece = pieces[std::min(static_cast<size_t>(i), pieces.size() - 1)];
      const auto use = [&](const StepOutput& output, int64_t samples) {
        if (counts) note(output, samples);
        return output.loss * (counts ? static_cast<double>(samples) / samples_per_rank : 0.0);
      };
      piece.with_batch([&](const Batch& batch) {
        model.step(step() * std::max(count, options_.accumulate_grad_batches) + i, train::inputs_of(batch),
                   piece.length, loss().of_rows(loss_of_, batch, use));
      });
    }
    share_step_loss(get_world_size(model.group()) - 1, model.group());
  }

  /// A template of the model, so that it is compiled for pipelines alone: other batches need not fit them.
  template <std::same_as<PipelinedModel> Used, class AnyBatch, class Function, class Add>
  void evaluate_in_pipeline(Used& model, const AnyBatch& batch, int64_t samples, Function& function,
                            const Add& add) const {
    model.evaluate(train::inputs_of(batch), samples, loss().of_rows(function, batch, add));
  }

  /// Is for pipelines alone, whose ranks compare them.
  template <class AnyBatch>
  int64_t fingerprint(const AnyBatch& batch) const {
    return with_model([&]<class Used>(const Used&) -> int64_t {
      if constexpr (std::same_as<Used, PipelinedModel>) return train::fingerprint_of(batch);
      return 0;
    });
  }

  /// Made when it is used, for the device is known when the Trainer is set up.
  train::LossComputation loss() const { return {*options_.device, options_.autocast_dtype}; }

  /// False when training is to stop.
  template <class ValidationLoader, class Function>
  bool evaluate(ValidationLoader& loader, Function& function, MetricAverages& averages) {
    using ValidationBatch = typename ValidationLoader::Batch;
    torch::NoGradGuard no_grad;
    train::BatchesOf<ValidationLoader> batches(loader);
    // Where forward is collective, a rank that has no more batches goes on with its last one, which does not count.
    const bool all_take_part = with_model([](auto& model) { return train::has_collective_forward(model); });
    std::optional<ValidationBatch> last;
    while (true) {
      const ValidationBatch* batch = batches.next();
      // One after the other on all ranks, so that a signal that came to one of them stops them all.
      const int64_t samples = batch == nullptr ? 0 : BatchAccess<ValidationBatch>::samples(*batch);
      if constexpr (std::is_copy_constructible_v<ValidationBatch>) {
        if (all_take_part && samples > 0) last.emplace(*batch);
      }
      const StepPlan plan = agree({.samples = samples,
                                   .can_stand_in = !all_take_part || samples > 0 || last.has_value(),
                                   .fingerprint = samples > 0 ? fingerprint(*batch) : 0});
      if (plan.stop || plan.samples == 0) return !plan.stop;
      if (samples == 0) {
        with_model([&]<class Used>(Used& model) {
          if constexpr (!std::same_as<Used, PipelinedModel>) {
            if (all_take_part) (void)loss().run(function, train::evaluated(model), *last);
          }
        });
        continue;
      }
      const auto add = [&](const StepOutput& output, int64_t of_samples) {
        const auto weight = static_cast<double>(of_samples);
        averages.add("loss", output.loss.template item<double>(), weight);
        for (const auto& [name, value] : output.metrics) averages.add(name, value, weight);
        return output.loss;
      };
      with_model([&]<class Used>(Used& model) {
        if constexpr (std::same_as<Used, PipelinedModel>) {
          evaluate_in_pipeline(model, *batch, samples, function, add);
        } else {
          add(loss().run(function, train::evaluated(model), *batch), samples);
        }
      });
    }
  }

  int64_t batches_of_epoch() const {
    if constexpr (requires { loader_.size(); }) {
      return static_cast<int64_t>(loader_.size());
    } else {
      return 0;
    }
  }

  StateDict loader_state(int64_t unseen_batches) const override { return batches_.state(unseen_batches); }
  void load_loader(const StateDict& state) override { batches_.load(state); }
  bool start_loader_at(int64_t position) override {
    if constexpr (requires { loader_.start_at(position); }) {
      return loader_.start_at(position);
    } else {
      return false;
    }
  }
  std::vector<NamedTensor> buffers() const override {
    return with_model([](const auto& model) { return train::buffers_of(model); });
  }

  Model& model_;
  Loader& loader_;
  LossFunction loss_of_;
  std::function<bool(MetricAverages&)> validation_;
  train::StepBatches<Loader> batches_{loader_, loader_progress_};
  bool begun_ = false;  // before_step was called for the step under way
};

template <OptimizerDefaults Defaults, class Loader, class LossFunction>
Trainer(std::vector<PipelineStage>, const Defaults&, Loader&, LossFunction, TrainerOptions = {})
    -> Trainer<StrategyStages, Loader, LossFunction>;

template <class Given, OptimizerDefaults Defaults, class Loader, class LossFunction>
Trainer(const Given&, const Defaults&, Loader&, LossFunction, TrainerOptions = {})
    -> Trainer<typename train::StrategyFor<Given>::type, Loader, LossFunction>;

template <class Given, class Loader, class LossFunction>
requires std::derived_from<ContainedModule<Given>, torch::nn::Module> Trainer(Given&,
                                                                              torch::optim::Optimizer&,
                                                                              Loader&, LossFunction,
                                                                              TrainerOptions = {})
->Trainer<ContainedModule<Given>, Loader, LossFunction>;

/// One line of error in place of many, where what was given with an optimizer's options is no model.
template <class Loader, class LossFunction>
class Trainer<train::NoModel, Loader, LossFunction> {
 public:
  template <class Given, class Defaults>
  Trainer(const Given&, const Defaults&, Loader&, LossFunction, TrainerOptions = {}) {
    static_assert(
        std::same_as<Given, train::NoModel>,
        "Trainer: with an optimizer's options, the model is a torch::nn::Module in a std::shared_ptr or "
        "a holder (torch::nn::Sequential, any TORCH_MODULE), or a std::vector<PipelineStage>");
  }
};

}  // namespace lockstep
