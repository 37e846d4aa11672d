#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/parallel/pipeline/pipeline_stage.h>

namespace lockstep {
namespace {

/// Each once: a shared one has several names.
std::vector<at::Tensor> distinct(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> once;
  std::unordered_set<const at::TensorImpl*> seen;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second) once.push_back(tensor);
  }
  return once;
}

std::vector<at::Tensor> without_names(const std::vector<NamedTensor>& named) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : named) tensors.push_back(tensor);
  return tensors;
}

}  // namespace

PipelineStage::PipelineStage(Plain /*tag*/, Content content, int64_t stage_index, int64_t num_stages,
                             PipelineStageOptions options)
    : content_(std::move(content)),
      stage_index_(stage_index),
      num_stages_(num_stages),
      options_(std::move(options)) {
  TORCH_CHECK_VALUE(num_stages >= 1 && stage_index >= 0 && stage_index < num_stages, "Stage index ",
                    stage_index, " is out of range of ", num_stages);
  const std::string who = "stage " + std::to_string(stage_index) + ": ";
  TORCH_CHECK_VALUE(!content_.is_empty, who, "there is no module in the holder");
  TORCH_CHECK_VALUE(
      !content_.is_data_parallel, who,
      "the module is wrapped for data parallelism, and would average its gradients in the midst of the "
      "schedule; give the module itself, and the ranks that have the same stage as "
      "PipelineOptions::data_parallel_group");
  TORCH_CHECK_VALUE(!content_.is_module || options_.parameters.empty(), who,
                    "a module knows its parameters; leave out PipelineStageOptions::parameters");
  TORCH_CHECK_VALUE(options_.outputs_to.empty() || !is_last(), who,
                    "outputs of the last stage go to the caller, not to other stages");
  for (size_t output = 0; output < options_.outputs_to.size(); ++output) {
    for (const int64_t to : options_.outputs_to[output]) {
      TORCH_CHECK_VALUE(to > stage_index && to < num_stages, who, "output ", output, " shall go to stage ",
                        to, "; it can go to the stages from ", stage_index + 1, " to ", num_stages - 1);
    }
  }
  parameters_ = distinct(content_.is_module ? without_names(content_.parameters) : options_.parameters);
  buffers_ = distinct(without_names(content_.buffers));
  for (const auto& [name, tied] : options_.tied) {
    const bool is_own = std::any_of(parameters_.begin(), parameters_.end(),
                                    [&, &tied = tied](const at::Tensor& own) { return own.is_same(tied); });
    TORCH_CHECK_VALUE(is_own, who, "the tied weight '", name, "' is not among its parameters");
  }
  if (options_.device) {
    device_ = *options_.device;
  } else if (!parameters_.empty()) {
    device_ = parameters_.front().device();
  }
}

}  // namespace lockstep
