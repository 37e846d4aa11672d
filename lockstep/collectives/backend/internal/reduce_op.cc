#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>

#include <lockstep/collectives/backend/internal/reduce_op.h>

namespace lockstep::collectives::internal {
namespace {

using c10d::ReduceOp;

ReduceOperation plain_operation(ReduceOp::RedOpType operation, const char* name) {
  switch (operation) {
    case ReduceOp::SUM:
    case ReduceOp::PREMUL_SUM:
      return ReduceOperation::kSum;
    case ReduceOp::AVG:
      return ReduceOperation::kAverage;
    case ReduceOp::PRODUCT:
      return ReduceOperation::kProduct;
    case ReduceOp::MIN:
      return ReduceOperation::kMin;
    case ReduceOp::MAX:
      return ReduceOperation::kMax;
    case ReduceOp::BAND:
      return ReduceOperation::kBitAnd;
    case ReduceOp::BOR:
      return ReduceOperation::kBitOr;
    case ReduceOp::BXOR:
      return ReduceOperation::kBitXor;
    default:
      TORCH_CHECK_VALUE(false, name,
                        ": unknown reduce operation; there are SUM, AVG, PRODUCT, MIN, MAX, BAND, "
                        "BOR, BXOR and what premul_sum() makes");
  }
}

at::Tensor factor_of(const ReduceOp& operation, const at::Tensor& tensor, const char* name) {
  const at::ScalarType dtype = tensor.scalar_type();
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(operation.supplement_.get());
  TORCH_CHECK_VALUE(supplement != nullptr, name, ": PREMUL_SUM has no factor; make it with premul_sum()");
  TORCH_CHECK_VALUE(at::isFloatingType(dtype) || at::isComplexType(dtype), name,
                    ": PREMUL_SUM needs floating-point or complex tensors, not ", dtype);
  if (!supplement->tensor_factor.defined()) return at::scalar_tensor(supplement->double_factor, at::kDouble);
  const at::Tensor& factor = supplement->tensor_factor;
  TORCH_CHECK_VALUE(factor.numel() == 1 && (factor.is_cpu() || factor.device() == tensor.device()), name,
                    ": the factor of PREMUL_SUM must be a tensor of one element, on the CPU or the tensor's "
                    "device; it has ",
                    factor.numel(), " on ", factor.device());
  return factor.detach();
}

}  // namespace

Reducing reducing_of(const ReduceOp& operation, const at::Tensor& tensor, const char* name) {
  at::ScalarType dtype = tensor.scalar_type();
  const auto type = static_cast<ReduceOp::RedOpType>(operation);
  const ReduceOperation plain = plain_operation(type, name);
  if (at::isComplexType(dtype)) {
    TORCH_CHECK_VALUE(plain == ReduceOperation::kSum || plain == ReduceOperation::kAverage, name,
                      " does not support ", to_string(plain), " on complex tensors");
    dtype = c10::toRealValueType(dtype);
  }
  const ReduceKernels& kernels = reduce_kernels(dtype, plain);
  return {plain, type == ReduceOp::PREMUL_SUM ? factor_of(operation, tensor, name) : at::Tensor(), kernels};
}

}  // namespace lockstep::collectives::internal
