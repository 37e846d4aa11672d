#include <optional>

#include <c10/util/Exception.h>

#include <lockstep/collectives/kernels/cpu_capability.h>
#include <lockstep/collectives/kernels/reduce_kernels.h>

namespace lockstep {
namespace {

using collectives::internal::ReduceElement;
using collectives::internal::ReduceTable;

const ReduceTable& table_of(CpuCapability capability) {
#if defined(__x86_64__)
  if (capability == CpuCapability::kAvx512) return collectives::internal::kReduceTableAvx512;
  if (capability == CpuCapability::kAvx2) return collectives::internal::kReduceTableAvx2;
#endif
  return collectives::internal::kReduceTableDefault;
}

std::optional<ReduceElement> element_of(at::ScalarType type) {
  switch (type) {
    case at::ScalarType::Bool:
      return ReduceElement::kBool;
    case at::ScalarType::Char:
      return ReduceElement::kInt8;
    case at::ScalarType::Short:
      return ReduceElement::kInt16;
    case at::ScalarType::Int:
      return ReduceElement::kInt32;
    case at::ScalarType::Long:
      return ReduceElement::kInt64;
    case at::ScalarType::Byte:
      return ReduceElement::kUInt8;
    case at::ScalarType::UInt16:
      return ReduceElement::kUInt16;
    case at::ScalarType::UInt32:
      return ReduceElement::kUInt32;
    case at::ScalarType::UInt64:
      return ReduceElement::kUInt64;
    case at::ScalarType::Half:
      return ReduceElement::kFloat16;
    case at::ScalarType::BFloat16:
      return ReduceElement::kBFloat16;
    case at::ScalarType::Float:
      return ReduceElement::kFloat32;
    case at::ScalarType::Double:
      return ReduceElement::kFloat64;
    default:
      return std::nullopt;
  }
}

[[noreturn]] void refuse(at::ScalarType type, ReduceOperation operation) {
  const char* remedy = "convert it to float32/64, bfloat16, float16, bool or an integer type first";
  if (c10::isComplexType(type)) {
    remedy = "reduce torch::view_as_real() of it (sums and averages are the same there)";
  } else if (element_of(type)) {
    remedy = operation == ReduceOperation::kAverage
                 ? "convert it to an integer or a floating-point type first"
                 : "bit operations take integers and bool: reduce a view of it as an integer type of the "
                   "same size";
  }
  C10_THROW_ERROR(ValueError, c10::str("Reduce operation ", to_string(operation), " is not supported for ",
                                       c10::toString(type), " tensors: ", remedy));
}

const ReduceKernels& lookup(CpuCapability capability, at::ScalarType type, ReduceOperation operation) {
  const std::optional<ReduceElement> element = element_of(type);
  const auto column = static_cast<size_t>(operation);
  TORCH_CHECK_VALUE(column < collectives::internal::kReduceOperations, "There is no reduce operation ",
                    column);
  if (!element) refuse(type, operation);
  const ReduceKernels& kernels = table_of(capability).entries[static_cast<size_t>(*element)][column];
  if (kernels.reduce == nullptr) refuse(type, operation);
  return kernels;
}

}  // namespace

const ReduceKernels& reduce_kernels(at::ScalarType type, ReduceOperation operation) {
  return lookup(cpu_capability(), type, operation);
}

const ReduceKernels& reduce_kernels_for(const char* capability, at::ScalarType type,
                                        ReduceOperation operation) {
  return lookup(cpu_capability_named(capability), type, operation);
}

const char* to_string(ReduceOperation operation) {
  switch (operation) {
    case ReduceOperation::kSum:
      return "SUM";
    case ReduceOperation::kAverage:
      return "AVG";
    case ReduceOperation::kProduct:
      return "PRODUCT";
    case ReduceOperation::kMin:
      return "MIN";
    case ReduceOperation::kMax:
      return "MAX";
    case ReduceOperation::kBitAnd:
      return "BAND";
    case ReduceOperation::kBitOr:
      return "BOR";
    case ReduceOperation::kBitXor:
      return "BXOR";
  }
  return "(unknown)";
}

}  // namespace lockstep
