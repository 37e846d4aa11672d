#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <lockstep/base/tensor_tree.h>
#include <lockstep/nn/named_tensor.h>
#include <lockstep/optim/grad_scaler.h>
#include <lockstep/parallel/pipeline/pipeline_runner.h>
#include <lockstep/train/trainer_options.h>

namespace lockstep {

/// What loss_of gets for its model where a pipeline is trained, on the rank of the last stage, for each micro-batch: the whole
/// model has computed already.
class PipelineOutput {
 public:
  using Tensors = std::vector<at::Tensor>;

  /// `inputs`: the micro-batch's, of which the first stage got the same rows.
  PipelineOutput(Tensors inputs, Tensors outputs)
      : inputs_(std::move(inputs)), outputs_(std::move(outputs)) {}

  /// The last stage's output. Throws c10::ValueError for other arguments than the micro-batch's inputs as they are, which the
  /// first stage did not get, and where the last stage has several outputs.
  template <class ReturnType = at::Tensor, class... Arguments>
  ReturnType forward(const Arguments&... arguments) const {
    Tensors given;
    (for_each_tensor(arguments, [&](const at::Tensor& tensor) { given.push_back(tensor); }), ...);
    static_assert(std::same_as<ReturnType, at::Tensor>, "a pipeline's last stage gives tensors");
    check_inputs(given);
    return only_output();
  }
  template <class... Arguments>
  at::Tensor operator()(const Arguments&... arguments) const {
    return forward(arguments...);
  }
  const Tensors& outputs() const { return outputs_; }

 private:
  void check_inputs(const Tensors& given) const;
  const at::Tensor& only_output() const;

  Tensors inputs_;
  Tensors outputs_;
};

/// What a Trainer trains with Strategy::pipeline: this rank's stages. Used by one thread.
class PipelinedModel {
 public:
  using Tensors = std::vector<at::Tensor>;
  /// The loss of rows [begin, begin + length) of the batch, whose outputs these are.
  using LossOfRows = std::function<at::Tensor(const Tensors& outputs, int64_t begin, int64_t length)>;

  /// Collective over the Trainer's ranks. Throws c10::ValueError for stages that are trained with another strategy, where a rank
  /// has none, and where pipelines and their data_parallel_group are not the ranks of the Trainer.
  PipelinedModel(std::vector<PipelineStage> stages, const TrainerOptions& options);
  PipelinedModel(const PipelinedModel&) = delete;  // the runner refers to it
  PipelinedModel& operator=(const PipelinedModel&) = delete;

  /// Makes the runner. Collective over the Trainer's ranks. `scaler` must outlive this.
  void start(GradScaler& scaler);

  const std::vector<PipelineStage>& stages() const { return stages_; }
  /// The parameters of all stages here, each once.
  const Tensors& parameters() const { return parameters_; }
  std::vector<NamedTensor> named_buffers() const;
  void train(bool on = true);
  void eval() { train(false); }
  bool is_training() const { return is_training_; }

  /// How many pipelines there are, and which one this is.
  int64_t replicas() const { return replicas_; }
  int64_t replica() const { return replica_; }
  const ProcessGroup& group() const { return group_; }

  /// Forward and backward of a batch of `samples` rows, cut into micro-batches; its gradients are added. `number` counts the
  /// batches of all steps, for PipelineOptions::seed. A batch with fewer rows than micro-batches has its last row several times,
  /// of which the first one counts.
  void step(int64_t number, const Tensors& inputs, int64_t samples, const LossOfRows& loss);
  /// Forward alone.
  void evaluate(const Tensors& inputs, int64_t samples, const LossOfRows& loss);
  at::Tensor clip_grad_norm_(double max_norm) { return runner_->clip_grad_norm_(max_norm); }
  /// The first pipeline's buffers go to the others.
  void share_buffers() const;

 private:
  void run(bool has_backward, Tensors inputs, int64_t samples, const LossOfRows& loss);
  at::Tensor loss_of_rows(const Tensors& outputs, const at::Tensor& rows) const;

  std::vector<PipelineStage> stages_;
  TrainerPipelineOptions options_;
  std::optional<c10::ScalarType> autocast_dtype_;
  ProcessGroup group_;
  int64_t replicas_ = 1;
  int64_t replica_ = 0;
  Tensors parameters_;
  std::unique_ptr<PipelineRunner> runner_;
  bool is_training_ = true;
  const LossOfRows* loss_ = nullptr;  // of the batch that runs
  int64_t samples_ = 0;               // of it
};

}  // namespace lockstep
