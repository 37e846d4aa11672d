#include <utility>

#include <ATen/core/ivalue_inl.h>
#include <ATen/core/jit_type.h>

#include <lockstep/parallel/ddp/grad_bucket.h>

namespace lockstep {

at::Tensor tensor_of(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor();
  const auto tensors = value.toTensorVector();
  TORCH_CHECK(tensors.size() == 1, "the future of a communication hook must hold one tensor; it holds ",
              tensors.size());
  return tensors[0];
}

std::vector<at::Tensor> GradBucket::gradients() const {
  if (buffer_.layout() != c10::kStrided) return {buffer_};
  std::vector<at::Tensor> views;
  int64_t offset = 0;
  for (const at::Tensor& parameter : parameters_) {
    views.push_back(buffer_.narrow(0, offset, parameter.numel()).view(parameter.sizes()));
    offset += parameter.numel();
  }
  return views;
}

HookFuture then(const HookFuture& future, std::function<at::Tensor(const at::Tensor&)> next) {
  return future->then(
      [next = std::move(next)](c10::ivalue::Future& done) {
        if (done.hasError()) std::rethrow_exception(done.exception_ptr());
        return c10::IValue(next(tensor_of(done.constValue())));
      },
      c10::TensorType::get());
}

HookFuture completed_future(const at::Tensor& value) {
  // With its device, the future is complete when the work is that its stream has now.
  std::vector<c10::Device> devices;
  if (value.defined() && !value.is_cpu()) devices.push_back(value.device());
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), std::move(devices));
  future->markCompleted(value);
  return future;
}

}  // namespace lockstep
