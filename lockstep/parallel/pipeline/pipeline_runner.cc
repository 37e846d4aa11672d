#include <exception>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/rethrow_with_context.h>
#include <lockstep/base/training/held_tensors.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/collectives/groups/spread_failure.h>
#include <lockstep/nn/grad_norm.h>
#include <lockstep/nn/gradient_list.h>
#include <lockstep/parallel/pipeline/internal/pipeline_core.h>
#include <lockstep/parallel/pipeline/internal/pipeline_step.h>
#include <lockstep/parallel/pipeline/pipeline_runner.h>

namespace lockstep {

using pipeline::internal::PipelineCore;
using pipeline::internal::PipelineStep;

void PipelineLoss::check_is_one(const Tensors& outputs) {
  TORCH_CHECK_VALUE(outputs.size() == 1, "the loss function takes one output, and the last stage gave ",
                    outputs.size(), "; let it take a std::vector<at::Tensor>");
}

struct PipelineRunner::Core : PipelineCore {
  using PipelineCore::PipelineCore;

  const TellingHeldTensors telling_held{[this](HeldTensors& held) {
    for (const PipelineStage& stage : stages) {
      for (const at::Tensor& parameter : stage.parameters()) held.add(parameter);
    }
  }};

  Tensors run(bool has_backward, bool return_outputs, const Tensors& inputs, const at::Tensor& target,
              Tensors* losses) {
    TORCH_CHECK(failure.empty(), "this pipeline has failed before, ", failure,
                "; make another one, of a new group, for the old group has failed, too");
    // What a rank was in would be taken for an action of the next step.
    const auto forget = c10::make_scope_exit(
        [backend = lockstep_backend_of(*group)] { backend->channel().transport().forget_actions(); });
    std::optional<PipelineStep> step;
    try {
      step.emplace(*this, has_backward, return_outputs, inputs, target);
      step->run();
      if (losses != nullptr) *losses = step->losses();
      return step->merged_outputs();
    } catch (...) {
      const std::string place = step ? step->place() : std::string("at the begin of its step");
      fail(place + ": " + text_of(std::current_exception()));
      rethrow_with_context("rank " + std::to_string(get_rank()) + " of the pipeline was " + place);
    }
  }
};

PipelineRunner::PipelineRunner(std::vector<PipelineStage> stages, PipelineOptions options)
    : core_(std::make_unique<Core>(std::move(stages), std::move(options))) {}

PipelineRunner::~PipelineRunner() = default;

PipelineRunner::Tensors PipelineRunner::step(const Tensors& inputs, const at::Tensor& target, Tensors* losses,
                                             bool return_outputs) {
  TORCH_CHECK_VALUE(
      core_->options.loss_fn,
      "a step needs a loss function for its backward; give PipelineOptions::loss_fn, or call eval()");
  return core_->run(/*has_backward=*/true, return_outputs, inputs, target, losses);
}

PipelineRunner::Tensors PipelineRunner::eval(const Tensors& inputs, const at::Tensor& target, Tensors* losses,
                                             bool return_outputs) {
  return core_->run(/*has_backward=*/false, return_outputs, inputs, target, losses);
}

at::Tensor PipelineRunner::clip_grad_norm_(double max_norm, double norm_type, bool error_if_nonfinite) {
  std::unordered_set<const at::TensorImpl*> counted_elsewhere;
  for (const auto& weight : core_->tied) {
    for (size_t i = 1; i < weight.local.size(); ++i) {
      counted_elsewhere.insert(weight.local[i].unsafeGetTensorImpl());
    }
  }
  Tensors all, counted;
  for (const PipelineStage& stage : core_->stages) {
    for (const at::Tensor& parameter : stage.parameters()) {
      all.push_back(parameter);
      if (counted_elsewhere.count(parameter.unsafeGetTensorImpl()) == 0) counted.push_back(parameter);
    }
  }
  try {
    const at::Tensor norm =
        get_total_norm(gradients_of(counted), norm_type, error_if_nonfinite, {}, core_->group);
    clip_grads_with_norm_(all, max_norm, norm);
    return norm;
  } catch (...) {
    spread_failure(core_->groups());  // other pipelines' ranks wait for this one in their next step
    throw;
  }
}

int64_t PipelineRunner::steps() const {
  return core_->steps;
}

void PipelineRunner::set_steps(int64_t steps) {
  core_->steps = steps;
}

const std::vector<PipelineAction>& PipelineRunner::actions() const {
  return core_->actions;
}

const PipelineMemory& PipelineRunner::memory() const {
  return core_->memory;
}

}  // namespace lockstep
