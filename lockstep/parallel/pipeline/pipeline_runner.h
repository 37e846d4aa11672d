#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/optim/autocast.h>
#include <lockstep/parallel/pipeline/call_with_tensors.h>
#include <lockstep/parallel/pipeline/pipeline_stage.h>
#include <lockstep/parallel/pipeline/schedule.h>

namespace lockstep {

/// What a pipeline's gradients begin with: loss(output, target), or loss(outputs, target) with a std::vector<at::Tensor> where
/// the last stage has several. Gives a tensor of one element, usually the mean over a micro-batch.
class PipelineLoss {
 public:
  using Tensors = std::vector<at::Tensor>;

  PipelineLoss() = default;  ///< none: the pipeline has no backward
  template <class Call>
  requires(pipeline::internal::takes_outputs_and_target<Call>() ||
           std::invocable<Call&, const at::Tensor&, const at::Tensor&>)
      PipelineLoss(Call call)  // NOLINT(google-explicit-constructor)
      : call_(
            [call = std::move(call)](const Tensors& outputs, const at::Tensor& target) mutable -> at::Tensor {
              if constexpr (pipeline::internal::takes_outputs_and_target<Call>()) {
                return call(outputs, target);
              } else {
                check_is_one(outputs);
                return call(outputs.front(), target);
              }
            }) {}

  explicit operator bool() const { return static_cast<bool>(call_); }
  at::Tensor operator()(const Tensors& outputs, const at::Tensor& target) const {
    return call_(outputs, target);
  }

 private:
  static void check_is_one(const Tensors& outputs);

  std::function<at::Tensor(const Tensors&, const at::Tensor&)> call_;
};

struct PipelineOptions {
  PipelineSchedule schedule = PipelineSchedule::k1F1B;
  int64_t n_microbatches = 1;
  PipelineLoss loss_fn = {};  ///< on all ranks or on none, though the last stage's alone is called
  /// Whether gradients are divided by n_microbatches, as is right for losses that are means. Sums want false.
  bool scale_grads = true;
  /// Multiplies what backward begins with: `[&](const at::Tensor& t) { return scaler.scale(t); }` of a GradScaler, whose
  /// process_group is then the pipeline's, or has all ranks, so that all stages skip the same steps; that can't be checked here.
  /// (Ranks of a data_parallel_group have the same gradients.) On all ranks or on none. Losses are told without it.
  std::function<at::Tensor(const at::Tensor&)> scale_loss = {};
  /// Mixed precision of each stage's forward, on its device, and of the loss function; none: as the stages have it inside.
  std::optional<AutocastOptions> autocast = {};
  /// Ranks that have the same stages of other pipelines, and other data: gradients are averaged over them, each stage's as soon
  /// as its last backward is done. They begin with the parameters and buffers of its first rank.
  std::optional<ProcessGroup> data_parallel_group = {};
  /// Seeds the default generators before each forward, by step, micro-batch and stage, so that random numbers don't depend on the
  /// schedule; and before each layer of stages of pipeline_stages() by the layer's number, so that they don't depend on the stages
  /// either. Layers of other stages call seed_pipeline_layer() for that. With a data_parallel_group, give its ranks different
  /// seeds.
  std::optional<uint64_t> seed = {};
};

/// How much a rank has kept at most, in the last step.
struct PipelineMemory {
  int64_t activations = 0;  ///< micro-batches, counted for each stage: peak_activations() of the schedule
  /// Stages keep so many bytes of inputs at one time: until a micro-batch's backward, or its second half where that needs them.
  int64_t bytes_of_inputs = 0;
  /// So many bytes at one time of sent tensors that have not been received, and of received ones that are not taken yet.
  int64_t bytes_in_flight = 0;
};

/// Runs a pipeline over the ranks of a group: each has one stage, or with interleaved schedules several.
///
///     lockstep::PipelineStage stage(layers, get_rank(), get_world_size());
///     lockstep::PipelineRunner pipeline(stage, {.schedule = lockstep::PipelineSchedule::k1F1B,
///                                               .n_microbatches = 8,
///                                               .loss_fn = torch::nn::CrossEntropyLoss()});
///     for (const auto& batch : loader) {
///       optimizer.zero_grad();
///       std::vector<at::Tensor> losses;
///       pipeline.step({batch.data}, batch.target, &losses);
///       optimizer.step();
///     }
///
/// step() cuts the batch along dimension 0 into micro-batches, as even as possible (at::tensor_split), runs the
/// schedule's actions of this rank in order, and adds to the gradients of its parameters: bit by bit what one process
/// adds that runs the whole model forward and backward on one micro-batch after the other, each loss divided by their
/// number. Shapes and dtypes may change from step to step. (An output that several stages use adds up their gradients
/// stage by stage; tied weights, theirs at the end of the step: these are the same sums in another order.) Activations of
/// a micro-batch are freed with its backward, so their number is bounded by the schedule. An input, and a target, may
/// require a gradient and come with a graph: that runs once, with the gradients of all micro-batches, when the stage's
/// last backward is done.
///
/// All ranks of the group call the constructor, step() and eval() alike; the constructor exchanges and compares what they
/// were given. A step's sends never wait for receivers, so no order of actions can deadlock. In eval(), where no backward
/// bounds what is on its way, a stage is at most two micro-batches ahead of the next one, if that takes what it sends,
/// and one more for each stage between them ahead of a later one; with several stages on a rank, a round of the schedule.
/// Between hosts it is two more, which the other rank has received before it computes them.
/// In traces actions are scopes as torch names them ("PP:2F3"), and what they wait for ("PP:2RECV_F3").
///
/// A stage that calls activation_checkpoint() does all of its backward in the first half of a split one, for the second
/// one would compute the checkpoint again for each layer that has weights.
///
/// When a stage throws, or its process ends or is stopped beyond the group's timeout, the group fails, and step() throws
/// on all ranks: c10::DistBackendError or DistTimeoutError that names the rank and its action ("in 2B3": stage 2,
/// backward of micro-batch 3) and has its text; on the rank that threw, its own exception with the action added. A rank
/// that had done its part of the step already throws in the next one. A data_parallel_group fails with it, and so the
/// other pipelines, with the same text. The runner can't be used after that, nor the groups.
///
/// One thread at a time. Lifetime: uses the stages' modules until it is destroyed. Messages have tags from 2^30 on.
/// torch/distributed/pipelining/schedules.py, where each schedule is a class; differences: scale_grads scales the losses, not
/// the sums at the end, so that steps can accumulate; eval() records no graph; skip connections, tied weights.
class PipelineRunner {
 public:
  using Tensors = std::vector<at::Tensor>;

  /// Collective over the group. Throws c10::ValueError, on all ranks alike where they were given different things: stages
  /// that are not this rank's (rank_of_stage()), none, of different groups or numbers; a number of stages that is no multiple of
  /// the ranks; what pipeline_table() refuses; stages that no other one sends anything; tied weights of different shapes; a
  /// data_parallel_group of ranks that have other stages; a SyncBatchNorm over ranks that don't have its stage.
  PipelineRunner(std::vector<PipelineStage> stages, PipelineOptions options);
  PipelineRunner(const PipelineStage& stage, PipelineOptions options)
      : PipelineRunner(std::vector<PipelineStage>{stage}, std::move(options)) {}
  PipelineRunner(const PipelineRunner&) = delete;
  PipelineRunner& operator=(const PipelineRunner&) = delete;
  ~PipelineRunner();

  /// Forward and backward of one batch. `inputs`: used on the rank of stage 0; each with as many rows, at least one for each
  /// micro-batch. `target`: used on the rank of the last stage; the same. `losses`: receives each micro-batch's there.
  /// Returns the last stage's outputs there, concatenated (those without dimensions stacked), and nothing elsewhere or without
  /// return_outputs, which saves their memory. Throws c10::ValueError for what is missing, see above.
  Tensors step(const Tensors& inputs = {}, const at::Tensor& target = {}, Tensors* losses = nullptr,
               bool return_outputs = true);
  /// Forward alone, without graphs; losses only where there is a target. The modules' mode (train, eval) is the caller's.
  Tensors eval(const Tensors& inputs = {}, const at::Tensor& target = {}, Tensors* losses = nullptr,
               bool return_outputs = true);

  /// Scales the gradients of all stages so that their norm together is at most max_norm, a tied weight's counted once. After
  /// step(). Collective; returns the norm before. lockstep::clip_grad_norm_().
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false);

  /// Steps that are done, and with which PipelineOptions::seed goes on: to be set when training is resumed.
  int64_t steps() const;
  void set_steps(int64_t steps);

  /// This rank's actions, as it runs them.
  const std::vector<PipelineAction>& actions() const;
  /// What this rank kept in its last step() or eval().
  const PipelineMemory& memory() const;

 private:
  struct Core;
  std::unique_ptr<Core> core_;
};

}  // namespace lockstep
