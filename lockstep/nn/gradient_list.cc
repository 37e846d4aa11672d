#include <unordered_set>

#include <lockstep/nn/gradient_list.h>

namespace lockstep {

std::vector<at::Tensor> each_once(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> once;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second) once.push_back(tensor);
  }
  return once;
}

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : each_once(parameters)) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  return gradients;
}

ForeachGroups group_by_device_and_dtype(const std::vector<at::Tensor>& tensors) {
  ForeachGroups groups;
  for (const at::Tensor& tensor : tensors) {
    const at::Device device = tensor.device();
    groups[{device.type(), {device.index(), tensor.scalar_type()}}].push_back(tensor);
  }
  return groups;
}

}  // namespace lockstep
