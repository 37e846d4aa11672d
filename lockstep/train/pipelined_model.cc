#include <algorithm>
#include <iterator>

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>

#include <lockstep/collectives/objects.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/nn/gradient_list.h>
#include <lockstep/parallel/ddp/state_sync.h>
#include <lockstep/train/pipelined_model.h>

namespace lockstep {

void PipelineOutput::check_inputs(const Tensors& given) const {
  const bool same = std::equal(
      given.begin(), given.end(), inputs_.begin(), inputs_.end(), [](const auto& one, const auto& other) {
        return one.is_same(other) ||
               (one.scalar_type() == other.scalar_type() && one.sizes() == other.sizes() &&
                one.strides() == other.strides() && one.data_ptr() == other.data_ptr());
      });
  TORCH_CHECK_VALUE(
      same,
      "Trainer: loss_of calls the model with other tensors than the batch's inputs, but the "
      "pipeline's first stage got those as they are; change them in the data set or in the first "
      "stage. The inputs are the batch's first tensor, or what BatchAccess::inputs() says");
}

const at::Tensor& PipelineOutput::only_output() const {
  TORCH_CHECK_VALUE(outputs_.size() == 1, "Trainer: the pipeline's last stage gives ", outputs_.size(),
                    " outputs; let loss_of take them from model.outputs()");
  return outputs_.front();
}

PipelinedModel::PipelinedModel(std::vector<PipelineStage> stages, const TrainerOptions& options)
    : stages_(std::move(stages)), options_(options.pipeline), autocast_dtype_(options.autocast_dtype) {
  TORCH_CHECK_VALUE(
      options.strategy == Strategy::pipeline,
      "Trainer: stages are trained as a pipeline; set strategy to Strategy::pipeline, or give a module");
  const auto counts = all_gather_values(std::ssize(stages_), options.process_group);
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    TORCH_CHECK_VALUE(counts[rank] > 0, "Trainer: rank ",
                      get_global_rank(options.process_group, static_cast<int>(rank)),
                      " has no stage; each rank of a pipeline has one at least");
  }
  group_ = pipeline::internal::group_of(stages_);
  if (options_.data_parallel_group) {
    if (!*options_.data_parallel_group) options_.data_parallel_group = default_group();
    replicas_ = get_world_size(*options_.data_parallel_group);
    replica_ = get_rank(*options_.data_parallel_group);
  }
  const int64_t ranks = get_world_size(group_), all = get_world_size(options.process_group);
  TORCH_CHECK_VALUE(
      ranks * replicas_ == all, "Trainer: ", replicas_, " pipelines of ", ranks, " ranks are ",
      ranks * replicas_, " ranks, but the Trainer's group has ", all,
      "; with several pipelines give the stages the group of their pipeline's ranks, and "
      "pipeline.data_parallel_group the ranks that have the same stages (DeviceMesh makes both)");
  Tensors tensors;
  for (const PipelineStage& stage : stages_) {
    tensors.insert(tensors.end(), stage.parameters().begin(), stage.parameters().end());
  }
  parameters_ = each_once(tensors);
}

void PipelinedModel::start(GradScaler& scaler) {
  PipelineOptions options{.schedule = options_.schedule,
                          .n_microbatches = options_.n_microbatches,
                          .loss_fn = [this](const Tensors& outputs,
                                            const at::Tensor& rows) { return loss_of_rows(outputs, rows); },
                          .scale_grads = false,  // losses have their weights
                          .data_parallel_group = options_.data_parallel_group};
  if (scaler.is_enabled())
    options.scale_loss = [&scaler](const at::Tensor& seed) { return scaler.scale(seed); };
  if (autocast_dtype_) options.autocast = AutocastOptions{.dtype = autocast_dtype_};
  if (options_.seed) options.seed = *options_.seed + static_cast<uint64_t>(replica_);
  runner_ = std::make_unique<PipelineRunner>(stages_, std::move(options));
}

std::vector<NamedTensor> PipelinedModel::named_buffers() const {
  std::vector<NamedTensor> buffers;
  for (const PipelineStage& stage : stages_) {
    buffers.insert(buffers.end(), stage.named_buffers().begin(), stage.named_buffers().end());
  }
  return buffers;
}

void PipelinedModel::train(bool on) {
  for (const PipelineStage& stage : stages_) stage.train(on);
  is_training_ = on;
}

void PipelinedModel::step(int64_t number, const Tensors& inputs, int64_t samples, const LossOfRows& loss) {
  runner_->set_steps(number);
  run(/*has_backward=*/true, inputs, samples, loss);
}

void PipelinedModel::evaluate(const Tensors& inputs, int64_t samples, const LossOfRows& loss) {
  run(/*has_backward=*/false, inputs, samples, loss);
}

void PipelinedModel::run(bool has_backward, Tensors inputs, int64_t samples, const LossOfRows& loss) {
  const int64_t rows = std::max(samples, options_.n_microbatches);
  for (at::Tensor& input : inputs) {
    TORCH_CHECK_VALUE(input.dim() > 0 && input.size(0) == samples,
                      "Trainer: an input of the pipeline has sizes ", input.sizes(), ", but the batch has ",
                      samples, " samples; each input has a row for each");
    if (rows > samples) {
      input = input.index_select(
          0, at::arange(rows, at::TensorOptions(at::kLong).device(input.device())).clamp_max_(samples - 1));
    }
  }
  loss_ = &loss;
  samples_ = samples;
  const at::Tensor numbers = at::arange(rows);
  if (has_backward) {
    runner_->step(inputs, numbers, /*losses=*/nullptr, /*return_outputs=*/false);
  } else {
    runner_->eval(inputs, numbers, /*losses=*/nullptr, /*return_outputs=*/false);
  }
}

/// `rows`: their numbers in the batch.
at::Tensor PipelinedModel::loss_of_rows(const Tensors& outputs, const at::Tensor& rows) const {
  const auto begin = rows[0].item<int64_t>();
  if (begin >= samples_)
    return at::zeros(
        {}, at::TensorOptions(at::kFloat));  // stands in; of a batch with one row for each micro-batch
  return (*loss_)(outputs, begin, rows.size(0));
}

void PipelinedModel::share_buffers() const {
  if (!options_.data_parallel_group) return;
  const auto buffers = named_buffers();
  if (!buffers.empty()) broadcast_coalesced(buffers, *options_.data_parallel_group);
}

}  // namespace lockstep
