#include <c10/util/Exception.h>

#include <lockstep/collectives/internal/tensor_check.h>

namespace lockstep {

void check_tensor(const at::Tensor& tensor, const char* operation) {
  TORCH_CHECK_VALUE(tensor.defined(), operation, ": the tensor is undefined");
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), operation,
                    ": the lockstep backend takes CPU tensors, this one is on ", tensor.device(),
                    "; GPU groups are not supported yet");
  TORCH_CHECK_VALUE(tensor.layout() == c10::kStrided, operation, ": sparse tensors are not supported yet");
  TORCH_CHECK_VALUE(tensor.is_non_overlapping_and_dense(), operation, ": the tensor of sizes ",
                    tensor.sizes(), " and strides ", tensor.strides(),
                    " has gaps or overlaps in memory; call .contiguous() and copy the result back");
  TORCH_CHECK_VALUE(
      !tensor.is_conj() && !tensor.is_neg(), operation,
      ": the tensor is a lazy conjugate or negative view; call .resolve_conj() or .resolve_neg()");
}

}  // namespace lockstep
