#include <lockstep/nn/model_tensors.h>

namespace lockstep::internal {

ModelTensors tensors_of_module(const torch::nn::Module& module) {
  return {module.name(), named_tensors(module.named_parameters()), named_tensors(module.named_buffers())};
}

}  // namespace lockstep::internal
