#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <lockstep/checkpoint/checkpoint_manager.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/observe/metrics_writer.h>
#include <lockstep/optim/grad_scaler.h>
#include <lockstep/parallel/ddp/options.h>
#include <lockstep/parallel/fsdp/options.h>
#include <lockstep/parallel/pipeline/schedule.h>
#include <lockstep/profiler/profiler.h>
#include <lockstep/train/early_stopping.h>

namespace lockstep {

namespace lr_scheduler {
class LRScheduler;
class ReduceLROnPlateau;
}  // namespace lr_scheduler

class TrainerCore;

/// How the ranks train a module together: in a DistributedDataParallel, in a FullyShardedDataParallel, or as a pipeline.
enum class Strategy { ddp, fsdp, pipeline };

/// How a Trainer runs a pipeline, see PipelineOptions.
struct TrainerPipelineOptions {
  PipelineSchedule schedule = PipelineSchedule::k1F1B;
  int64_t n_microbatches = 1;  ///< of each batch
  std::vector<int64_t> balance =
      {};                   ///< of a Sequential: how many layers each stage has; stages go round the ranks
  ProcessGroup group = {};  ///< of a Sequential: the pipeline's ranks; empty: the Trainer's
  /// The ranks that have the same stages of other pipelines. The Trainer's ranks are those of all pipelines.
  std::optional<ProcessGroup> data_parallel_group = {};
  /// For dropout that no restart and no schedule changes, and of a Sequential no split; the number of the pipeline is added to it.
  std::optional<uint64_t> seed = {};
};

/// What the loss function of a Trainer may return in place of a tensor.
struct StepOutput {
  at::Tensor loss;       ///< a mean over the batch's samples
  Metrics metrics = {};  ///< means over the batch's samples, by name: {"accuracy", 0.9}
};

/// Functions that a Trainer calls, on all ranks alike, so they may communicate. Any of them may be empty.
struct TrainerCallbacks {
  using Function = std::function<void(TrainerCore&)>;
  Function before_epoch = {};
  Function after_epoch = {};  ///< metrics() are the epoch's; scheduler and checkpoint come before
  Function before_step = {};  ///< an optimizer step, also when it is tried again; its batches are there
  Function after_step = {};
  Function before_validation = {};
  Function after_validation = {};  ///< metrics() have the validation's
};

/// How a Trainer trains. All ranks give the same.
struct TrainerOptions {
  /// How a Trainer that is given a plain module wraps it; with these options, in process_group if they name none.
  Strategy strategy = Strategy::ddp;
  DistributedDataParallelOptions ddp = {};
  FullyShardedDataParallelOptions fsdp = {};
  TrainerPipelineOptions pipeline = {};  ///< also of a Trainer that is given stages

  int64_t max_epochs = 1;
  /// Optimizer steps, whichever comes first. An epoch that they end before its last step has no validation. To
  /// know whether the last of them is the epoch's last one, train() asks loaders with a state_dict() for one more batch,
  /// which it gives back, with the random numbers that the default generators gave for it. Of others the epoch ends only
  /// where the last step has met the loader's end; nor does it end where making that batch fails.
  std::optional<int64_t> max_steps = {};
  /// Batches of each rank that make one optimizer step; the epoch's last step may have fewer.
  int64_t accumulate_grad_batches = 1;

  /// Where batches are brought before loss_of gets them, and whose autocast and scaler are used. None: where
  /// the optimizer's first parameter is. The model must be there already.
  std::optional<c10::Device> device = {};
  std::optional<c10::ScalarType> autocast_dtype = {};  ///< of forward and loss: kBFloat16, kHalf
  /// With kHalf losses are scaled; its device and enabled are set by the Trainer.
  GradScalerOptions scaler = {};

  /// See clip_grad_norm_(). Where a DistributedDataParallel ignores parameters, whose gradients are each rank's own: the norm of
  /// the others, which is the same on all ranks, and only these are clipped.
  std::optional<double> clip_grad_norm = {};
  std::optional<double> clip_grad_value = {};  ///< see clip_grad_value_(); after the norm, if both

  /// Pointers are not owned; the function makes one for the optimizer of a Trainer that makes that itself. Stepped after each
  /// epoch's validation, or after each optimizer step.
  using MakeScheduler = std::function<std::shared_ptr<lr_scheduler::LRScheduler>(torch::optim::Optimizer&)>;
  std::variant<std::monostate, lr_scheduler::LRScheduler*, lr_scheduler::ReduceLROnPlateau*, MakeScheduler>
      scheduler = {};
  enum class Interval { epoch, step } scheduler_interval = Interval::epoch;
  std::string scheduler_metric = "validation/loss";  ///< what ReduceLROnPlateau gets

  int64_t validate_every_n_epochs = 1;  ///< the last epoch is always validated
  std::optional<EarlyStoppingOptions> early_stopping = {};
  std::optional<CheckpointManagerOptions> checkpoint = {};  ///< none: nothing is saved

  std::vector<std::shared_ptr<MetricsWriter>> writers = {};  ///< called on rank 0 only
  Hyperparameters hyperparameters = {};                      ///< for the writers
  int64_t log_every_n_steps = 50;  ///< and once more when train() ends, unless it throws
  bool progress_bar = true;        ///< on rank 0's standard error
  std::vector<TrainerCallbacks> callbacks = {};
  /// Records train() on each rank; its steps are optimizer steps, counted from train()'s first.
  std::optional<ProfilerOptions> profiler = {};

  ProcessGroup process_group = {};  ///< the model's; empty: the default group, or one process without
};

}  // namespace lockstep
