#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <lockstep/base/training/held_tensors.h>
#include <lockstep/checkpoint/training_state.h>
#include <lockstep/nn/step_snapshot.h>
#include <lockstep/observe/combined_writer.h>
#include <lockstep/observe/progress_bar.h>
#include <lockstep/observe/trial.h>
#include <lockstep/optim/autocast.h>
#include <lockstep/parallel/ddp/options.h>
#include <lockstep/serialization/state_dict.h>
#include <lockstep/train/early_stopping.h>
#include <lockstep/train/metric_averages.h>
#include <lockstep/train/trainer_options.h>

namespace lockstep {

namespace train {

/// What a Trainer has fetched of an epoch's batches on this rank.
struct LoaderProgress {
  bool ended = false;          ///< all are fetched
  int64_t unseen_batches = 0;  ///< fetched for a step that is not done
};

}  // namespace train

/// What of a Trainer depends on no type of the user's: where training stands, what happens around steps and
/// epochs, and saving. Callbacks get it. Used by one thread; stop() by any.
class TrainerCore {
 public:
  TrainerCore(const TrainerCore&) = delete;
  TrainerCore& operator=(const TrainerCore&) = delete;
  virtual ~TrainerCore();

  /// Trains until max_epochs or max_steps are done, early stopping says so, or stop() was called.
  virtual void train() = 0;

  int64_t epoch() const { return epoch_; }  ///< epochs done
  int64_t step() const { return step_; }    ///< optimizer steps done
  /// The latest known of each metric, over all ranks.
  const Metrics& metrics() const { return metrics_; }
  double step_loss() const { return step_loss_; }  ///< this rank's, of the last step
  int rank() const { return rank_; }               ///< in process_group()
  int world_size() const { return world_size_; }
  const ProcessGroup& process_group() const { return group_; }
  const TrainerOptions& options() const { return options_; }  ///< with `device` told, and a scheduler made
  torch::optim::Optimizer& optimizer() const { return optimizer_; }

  /// What a checkpoint holds: model, optimizer, scheduler, scaler, random numbers, the loader's and the
  /// Trainer's place. Add what is yours before restore().
  TrainingState& state() { return training_state_; }
  /// Goes on from the latest good checkpoint, if there is one; before train(). Collective. Written by as many
  /// ranks as there are now: exactly where it was, in the middle of an epoch too. By another number: exactly
  /// at the begin of an epoch; in the middle of one with the samples that no rank has seen yet, if the
  /// loader's sampler can do that (DistributedSampler), else the epoch begins again, and the log says so. The
  /// epoch's metrics are those of all its samples; where the checkpoint has left some out, as those of
  /// save_alone() do, and the user's own of state(), the log says so.
  std::optional<CheckpointInfo> restore();
  /// Saves now, whatever the plan says, and returns when it is on the disk. Collective. Does nothing without
  /// options().checkpoint.
  void save(const std::string& emergency = {});
  /// The same by this rank alone, without any communication. False when nothing was written, for the
  /// checkpoint by plan of this step is there, which is complete.
  bool save_alone(const std::string& emergency);

  /// train() is to return, on all ranks, before the next step; any rank may say so.
  void stop() { stop_requested_ = true; }
  /// Whether training is over: nothing is left to do for train().
  bool finished() const;

  // ---- For RobustLoop

  /// Asked on each rank before each step and each batch of a validation: whether to stop() on all.
  std::function<bool()> interrupted = {};
  /// Called on a rank on which a step failed before anything was changed; parameters, buffers and random
  /// numbers are as they were before the step. Returns if it is to be done again, throws otherwise.
  std::function<void(std::exception_ptr)> recover = {};
  /// Whether interrupted() on some rank, or stop(), has ended train().
  bool stopped() const { return stopped_; }
  /// False while an optimizer step is half done: then parameters are no state to save.
  bool consistent() const { return !applying_; }
  /// Samples of the largest piece of a batch that this rank computes on at once, in the latest step.
  int64_t largest_micro_batch() const { return largest_micro_batch_; }
  /// At most so many at once from now on, accumulated, so that steps stay what they are. 0: whole batches.
  void set_max_micro_batch(int64_t samples) { max_micro_batch_ = samples; }
  /// Tells the writers how training has ended, if it has and they don't know: it may take them seconds, so
  /// with `recover` set train() leaves it to the code that has set it, when the checkpoint is there.
  void finalize_writers();
  /// The group is another now. Collective in it.
  void set_group(const ProcessGroup& group);
  /// The same, and the model goes on in it.
  virtual void update_process_group(const ProcessGroup& group) = 0;

 protected:
  /// `own_model`: what is to live as long, the optimizer with it.
  TrainerCore(torch::optim::Optimizer& optimizer, TrainerOptions options,
              std::shared_ptr<void> own_model = nullptr);

  /// The user's loader, for code that does not know its type.
  virtual StateDict loader_state(int64_t unseen_batches) const = 0;
  virtual void load_loader(const StateDict& state) = 0;
  virtual bool start_loader_at(int64_t position) = 0;
  virtual std::vector<NamedTensor> buffers() const = 0;

  /// What the ranks tell each other before a step, and what follows from it.
  struct StepNote {
    int64_t micro_batches = 0;
    int64_t samples = 0;
    bool can_stand_in = false;  // there is a batch to repeat, at weight 0, while others have more
    bool begun = false;         // it is tried again
    int64_t fingerprint = 0;    // of the batches, which are to be the same on all ranks of a pipeline
  };
  struct StepPlan {
    int64_t micro_batches = 0;  // the most that a rank has
    int64_t samples = 0;        // of all ranks; 0: the epoch is over
    bool stop = false;
    bool begun = false;  // on all ranks
  };
  StepPlan agree(const StepNote& mine);

  /// Those whose random numbers a step may draw, besides the CPU: the parameters' and options().device.
  std::vector<at::Device> random_devices() const;

  void begin_training();
  void end_training(std::string_view status);
  void begin_epoch(int64_t batches);
  void begin_attempt();
  void undo_attempt();
  void note(const StepOutput& output, int64_t samples);
  /// This rank has the data of number `replica` of `replicas`. Collective.
  void share_data_as(int64_t replica, int64_t replicas);
  /// The mean of what the rank has noted of the step is step_loss() on all ranks of the group. Collective.
  void share_step_loss(int group_rank, const ProcessGroup& group);
  void apply_gradients(const StepPlan& plan);
  /// The plan after the last of max_steps. Without samples the epoch ends there, for no rank has another batch.
  /// Collective.
  StepPlan cut_epoch(bool has_batch);
  /// Tells of the exception that is handled now.
  void warn_of_batch_after_last_step() const;
  bool out_of_steps() const;
  void note_epoch();
  bool validation_due() const;
  void finish_epoch();
  void call(TrainerCallbacks::Function TrainerCallbacks::*which);
  void add_parts();

  const std::shared_ptr<void> own_model_;
  std::shared_ptr<lr_scheduler::LRScheduler> own_scheduler_;
  const TrainerOptions options_;
  torch::optim::Optimizer& optimizer_;
  ProcessGroup group_;  // empty: this process alone
  int rank_ = 0;        // in it, also when it has failed and is gone
  int world_size_ = 1;
  // How many parts of the data there are, and which one each rank has: its own, but that the ranks of a pipeline have the same.
  int64_t replicas_ = 1;
  std::vector<int64_t> replica_of_ranks_;
  std::vector<at::Tensor> parameters_;
  std::function<at::Tensor(double max_norm)>
      clip_norm_;  // of a model whose parameters() do not have the same gradients on all ranks
  std::function<void()>
      zero_grad_sharded_;  // of a sharded model, with what no_sync() has added up, which optimizer_ leaves
  GradScaler scaler_;
  TrainingState training_state_;
  StepSnapshot snapshot_;

  int64_t max_micro_batch_ = 0;
  int64_t largest_micro_batch_ = 0;
  enum class EpochPhase : uint8_t {
    kSteps,    // none has begun, or its steps are under way
    kCut,      // max_steps have ended it before its last step
    kTrained,  // its steps are done, its end is not
  };
  EpochPhase epoch_phase_ = EpochPhase::kSteps;
  train::LoaderProgress loader_progress_;
  int64_t position_ = 0;  // samples of this epoch that all ranks together have seen
  bool stopped_ = false;
  Metrics metrics_;
  Metrics epoch_metrics_;                // new at the last epoch's end
  std::function<double()> waited_ = {};  // of the loader

 private:
  struct SharedPart;
  struct RankPart;

  void step_scheduler();
  void show_step(const StepPlan& plan);
  void profile_step();
  void begin_window();
  void log_window();
  void log(const Metrics& metrics);
  bool on_all(bool mine) const;
  void save_by_plan(CheckpointInfo about);
  void share_averages(MetricAverages averages);
  void resume_averages();
  double learning_rate() const;
  CheckpointInfo info(const std::string& emergency) const;
  void tell(HeldTensors& held) const;

  std::unique_ptr<SharedPart> shared_part_;
  std::unique_ptr<RankPart> rank_part_;
  std::optional<EarlyStopping> early_stopping_;
  std::unique_ptr<CheckpointManager> checkpoints_;
  CombinedWriter writers_;
  const Trial trial_ = trial();
  std::unique_ptr<Profiler> profiler_;  // while train() runs, if it was asked for
  std::optional<ProgressBar> bar_;
  std::chrono::steady_clock::time_point bar_begin_;
  double bar_samples_ = 0;  // of all ranks, since then

  int64_t epoch_ = 0;
  int64_t step_ = 0;
  double step_loss_ = 0;
  MetricAverages step_averages_, epoch_averages_;
  MetricAverages shared_averages_;   // epoch_averages_ of all ranks, as saved or loaded with the shared part
  int64_t shared_step_ = -1;         // after which they were taken; -1: never
  MetricAverages window_;            // since the last line of the log
  double window_samples_ = 0;        // of all ranks, since then
  std::optional<double> grad_norm_;  // of the last step, when it was clipped
  std::chrono::steady_clock::time_point window_begin_ = std::chrono::steady_clock::now();
  std::optional<std::pair<int64_t, int64_t>> saved_;  // the step and epoch of the last checkpoint
  std::string end_status_;                            // for the writers, which have not been told
  bool loader_restored_ = false;
  bool applying_ = false;
  std::atomic<bool> stop_requested_ = false;
  const TellingHeldTensors telling_held_{[this](HeldTensors& held) { tell(held); }};
};

}  // namespace lockstep
