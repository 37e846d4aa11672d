#include <cstring>
#include <optional>
#include <string>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/collectives/kernels/reduce_kernels.h>

namespace lockstep {
namespace {

using collectives::internal::ReduceElement;
using collectives::internal::ReduceTable;

constexpr const char* kVariable = "LOCKSTEP_CPU_CAPABILITY";

struct Capability {
  const char* name;
  const ReduceTable* table;
};

/// What this machine can run, best first.
const Capability* capabilities(size_t& count) {
  static const struct All {
    Capability list[3];
    size_t count = 0;
    All() {
#if defined(__x86_64__)
      __builtin_cpu_init();
      const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
      if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        list[count++] = {"avx512", &collectives::internal::kReduceTableAvx512};
      }
      if (avx2) list[count++] = {"avx2", &collectives::internal::kReduceTableAvx2};
#endif
      list[count++] = {"default", &collectives::internal::kReduceTableDefault};
    }
  } all;
  count = all.count;
  return all.list;
}

/// `asked_by` says what asks for it, for the error message.
const Capability& find_capability(const std::string& name, const std::string& asked_by) {
  size_t count = 0;
  const Capability* list = capabilities(count);
  std::string offered;
  for (size_t i = 0; i < count; ++i) {
    if (name == list[i].name) return list[i];
    offered += (i == 0 ? "" : ", ") + std::string(list[i].name);
  }
  const bool known = name == "avx2" || name == "avx512";
  TORCH_CHECK_VALUE(false, asked_by, " asks for the CPU capability '", name, "', which ",
                    known ? "this machine does not have" : "does not exist",
                    "; this machine offers: ", offered);
}

const Capability& active() {
  static const Capability& chosen = []() -> const Capability& {
    const std::optional<std::string> wanted = environment::text(kVariable);
    size_t count = 0;
    return wanted ? find_capability(*wanted, kVariable) : capabilities(count)[0];
  }();
  return chosen;
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
                 ? "use SUM and divide, or convert it to a floating-point type first"
                 : "bit operations take integers and bool: reduce a view of it as an integer type of the "
                   "same size";
  }
  C10_THROW_ERROR(ValueError, c10::str("Reduce operation ", to_string(operation), " is not supported for ",
                                       c10::toString(type), " tensors: ", remedy));
}

const ReduceKernels& lookup(const Capability& capability, at::ScalarType type, ReduceOperation operation) {
  const std::optional<ReduceElement> element = element_of(type);
  const auto column = static_cast<size_t>(operation);
  TORCH_CHECK_VALUE(column < collectives::internal::kReduceOperations, "There is no reduce operation ",
                    column);
  if (!element) refuse(type, operation);
  const ReduceKernels& kernels = capability.table->entries[static_cast<size_t>(*element)][column];
  if (kernels.reduce == nullptr) refuse(type, operation);
  return kernels;
}

}  // namespace

const ReduceKernels& reduce_kernels(at::ScalarType type, ReduceOperation operation) {
  return lookup(active(), type, operation);
}

const ReduceKernels& reduce_kernels_for(const char* capability, at::ScalarType type,
                                        ReduceOperation operation) {
  return lookup(find_capability(capability, "The caller"), type, operation);
}

const char* reduce_kernels_capability() {
  return active().name;
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
