#include <unordered_set>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <lockstep/parallel/ddp/mixed_precision.h>
#include <lockstep/parallel/ddp/reducer/reducer.h>

namespace lockstep {

at::Tensor cast_floating_point(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() && tensor.is_floating_point() ? tensor.to(dtype) : tensor;
}

MixedPrecisionParameters::MixedPrecisionParameters(const MixedPrecision& precision,
                                                   const std::vector<NamedTensor>& parameters,
                                                   const std::vector<NamedTensor>& buffers,
                                                   std::shared_ptr<Reducer> reducer)
    : precision_(precision), reducer_(std::move(reducer)) {
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& [name, parameter] : parameters) {
    if (!parameter.is_floating_point()) continue;
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) parameters_.push_back(parameter);
  }
  if (precision_.buffer_dtype) {
    at::NoGradGuard no_grad;
    for (const auto& [name, buffer] : buffers) {
      if (buffer.is_floating_point()) buffer.set_data(buffer.to(*precision_.buffer_dtype));
    }
  }
  reducer_->set_on_backward_end([this] { restore(); });
  if (const auto reduce = precision_.reduce_dtype ? precision_.reduce_dtype : precision_.param_dtype) {
    reducer_->set_reduce_dtype(*reduce);
  }
}

MixedPrecisionParameters::~MixedPrecisionParameters() {
  reducer_->set_on_backward_end({});
  restore();  // of a forward without a backward: the module may live on
}

void MixedPrecisionParameters::before_forward() {
  // Several forwards before one backward compute with the same data and share the AccumulateGrad nodes, so
  // that each parameter gets one gradient.
  if (!precision_.param_dtype || !full_.empty()) return;
  for (const at::Tensor& parameter : parameters_) {
    full_.push_back(parameter.variable_data());
    parameter.set_data(full_.back().to(*precision_.param_dtype));
  }
  accumulators_ = reducer_->watch_current_accumulators();
}

void MixedPrecisionParameters::after_forward(bool backward_follows) {
  pending_ = pending_ || backward_follows;
  if (!pending_) restore();
}

void MixedPrecisionParameters::restore() {
  for (size_t i = 0; i < full_.size(); ++i) parameters_[i].set_data(full_[i]);
  full_.clear();
  accumulators_.clear();
  pending_ = false;
}

}  // namespace lockstep
