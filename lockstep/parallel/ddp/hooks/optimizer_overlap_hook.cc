#include <unordered_map>

#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <lockstep/parallel/ddp/hooks/internal/hook_operations.h>
#include <lockstep/parallel/ddp/hooks/optimizer_overlap_hook.h>

namespace lockstep {

struct OptimizerPerParameter::Data {
  std::vector<at::Tensor> parameters;
  std::vector<std::shared_ptr<torch::optim::Optimizer>> optimizers;
  std::unordered_map<const c10::TensorImpl*, torch::optim::Optimizer*> optimizer_of;
};

OptimizerPerParameter::OptimizerPerParameter(const std::vector<at::Tensor>& parameters, const Factory& make) {
  auto data = std::make_shared<Data>();
  data->parameters = parameters;
  for (const at::Tensor& parameter : parameters) {
    auto optimizer = make({parameter});
    TORCH_CHECK_VALUE(optimizer, "OptimizerPerParameter: the factory made no optimizer");
    data->optimizer_of[parameter.unsafeGetTensorImpl()] = optimizer.get();
    data->optimizers.push_back(std::move(optimizer));
  }
  data_ = std::move(data);
}

void OptimizerPerParameter::operator()(const at::Tensor& parameter, const at::Tensor& gradient) const {
  const auto found = data_->optimizer_of.find(parameter.unsafeGetTensorImpl());
  TORCH_CHECK_VALUE(found != data_->optimizer_of.end(),
                    "OptimizerPerParameter was not made with a parameter of ", "sizes ", parameter.sizes(),
                    ": give it all of the model's, or name those it has as `params` ",
                    "of OptimizerHookState");
  // The reducer may have its own idea of the gradient, which it gets back.
  at::Tensor& grad = at::Tensor(parameter).mutable_grad();
  const at::Tensor before = std::exchange(grad, gradient);
  try {
    found->second->step();
  } catch (...) {
    grad = before;
    throw;
  }
  grad = before;
}

const std::vector<std::shared_ptr<torch::optim::Optimizer>>& OptimizerPerParameter::optimizers() const {
  return data_->optimizers;
}

OptimizerHookState::OptimizerHookState(ParameterStep functional_optimizer,
                                       const std::optional<std::vector<at::Tensor>>& params)
    : functional_optimizer_(std::move(functional_optimizer)) {
  TORCH_CHECK_VALUE(functional_optimizer_,
                    "OptimizerHookState: there is no step to take: give it a function ",
                    "of a parameter and its gradient, or OptimizerPerParameter");
  if (!params) return;
  held_ = *params;
  params_to_optimize_.emplace();
  for (const at::Tensor& parameter : *params) params_to_optimize_->insert(parameter.unsafeGetTensorImpl());
}

bool OptimizerHookState::optimizes(const at::Tensor& parameter) const {
  return !params_to_optimize_ || params_to_optimize_->count(parameter.unsafeGetTensorImpl()) > 0;
}

HookFuture hooks::then_optimizer(const HookFuture& reduced, GradBucket& bucket,
                                 const std::shared_ptr<const OptimizerHookState>& state) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients = bucket.gradients();
  for (size_t i = 0; i < gradients.size(); ++i) {
    // The bucket has the elements in the parameter's memory order.
    const at::Tensor& parameter = bucket.parameters()[i];
    if (parameter.layout() == c10::kStrided && parameter.is_non_overlapping_and_dense()) {
      gradients[i] = gradients[i].as_strided(parameter.sizes(), parameter.strides());
    }
  }
  return then(reduced, [state, buffer = bucket.buffer(), parameters = bucket.parameters(),
                        gradients = std::move(gradients)](const at::Tensor& value) {
    const internal::CallbackScope scope;
    if (!value.is_same(buffer)) buffer.copy_(value.view_as(buffer));
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (state->optimizes(parameters[i])) state->functional_optimizer()(parameters[i], gradients[i]);
    }
    return buffer;
  });
}

}  // namespace lockstep
