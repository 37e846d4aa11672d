#include <algorithm>
#include <cstdlib>
#include <utility>

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <lockstep/collectives/backend/internal/tensor_check.h>

namespace lockstep::collectives::internal {
namespace {

/// Whether two elements may have one place in memory. Sound, and exact for all but exotic interleaved
/// strides.
bool may_overlap_itself(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return false;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1) dims.emplace_back(std::abs(tensor.stride(dim)), tensor.size(dim));
  }
  std::sort(dims.begin(), dims.end());
  int64_t span = 1;  // of the dimensions so far
  for (const auto& [stride, size] : dims) {
    if (stride < span) return true;
    span += (size - 1) * stride;
  }
  return false;
}

void check_same_device(const at::Tensor& first, const at::Tensor& other, const char* operation) {
  TORCH_CHECK_VALUE(other.device() == first.device(), operation,
                    ": all tensors of one call must be on one device, these are on ", first.device(), " and ",
                    other.device(), "; move them with .to()");
}

}  // namespace

void check_device(const at::Tensor& tensor, const char* operation) {
  if (tensor.is_cpu()) return;
  const auto type = tensor.device().type();
  TORCH_CHECK_VALUE(
      type != c10::kMeta && c10::impl::hasDeviceGuardImpl(type), operation,
      ": the lockstep backend takes tensors on the CPU, and on accelerators by way of the host; "
      "this one is on ",
      tensor.device());
}

void check_input(const at::Tensor& tensor, const char* operation) {
  TORCH_CHECK_VALUE(tensor.defined(), operation, ": the tensor is undefined");
  check_device(tensor, operation);
  TORCH_CHECK_VALUE(tensor.layout() == c10::kStrided, operation, ": takes dense tensors, not ",
                    tensor.layout(),
                    " ones; only all_reduce with SUM takes sparse COO tensors. Call .to_dense()");
}

void check_output(const at::Tensor& tensor, const char* operation) {
  check_input(tensor, operation);
  TORCH_CHECK_VALUE(!may_overlap_itself(tensor), operation, ": elements of the tensor of sizes ",
                    tensor.sizes(), " and strides ", tensor.strides(),
                    " share memory (is it expanded?), so that it can't take a result; call .contiguous()");
}

void check_contiguous(const at::Tensor& tensor, const char* operation, const char* name) {
  check_input(tensor, operation);
  TORCH_CHECK_VALUE(tensor.is_contiguous(), operation, ": ", name, " of sizes ", tensor.sizes(),
                    " and strides ", tensor.strides(), " must be contiguous; call .contiguous()");
}

void check_same_kind(const at::Tensor& first, const std::vector<at::Tensor>& others, const char* operation) {
  const auto real = [](const at::Tensor& tensor) { return c10::toRealValueType(tensor.scalar_type()); };
  for (const at::Tensor& other : others) {
    check_same_device(first, other, operation);
    TORCH_CHECK_VALUE(real(other) == real(first), operation,
                      ": invalid usage of tensors with different dtypes: found ", first.scalar_type(),
                      " and ", other.scalar_type());
  }
}

void check_list_size(const std::vector<at::Tensor>& list, int ranks, const char* operation,
                     const char* name) {
  TORCH_CHECK_VALUE(list.size() == static_cast<size_t>(ranks), operation, ": ", name, " has ", list.size(),
                    " tensors; it needs one for each of the ", ranks, " ranks");
}

void check_one_kind(const std::vector<at::Tensor>& list, const char* operation) {
  for (const at::Tensor& tensor : list) {
    check_same_device(list.front(), tensor, operation);
    TORCH_CHECK_VALUE(tensor.scalar_type() == list.front().scalar_type(), operation,
                      ": all tensors must have one dtype, these have ", list.front().scalar_type(), " and ",
                      tensor.scalar_type());
  }
}

void check_like(const at::Tensor& other, const at::Tensor& tensor, const char* operation,
                const std::string& name) {
  check_same_kind(tensor, {other}, operation);
  const bool same = other.scalar_type() == tensor.scalar_type() ? other.sizes() == tensor.sizes()
                                                                : other.nbytes() == tensor.nbytes();
  TORCH_CHECK_VALUE(same, operation, ": ", name, " is ", other.scalar_type(), ' ', other.sizes(),
                    ", but it must be like the other tensor, ", tensor.scalar_type(), ' ', tensor.sizes());
}
void check_list_like(const std::vector<at::Tensor>& list, const at::Tensor& tensor, const char* operation,
                     const char* name) {
  for (size_t i = 0; i < list.size(); ++i)
    check_like(list[i], tensor, operation, name + ('[' + std::to_string(i) + ']'));
}

void check_parts(const at::Tensor& whole, const char* whole_name, const at::Tensor& part,
                 const char* part_name, int parts, const char* operation) {
  check_input(whole, operation);
  check_input(part, operation);
  check_same_kind(whole, {part}, operation);
  TORCH_CHECK_VALUE(whole.nbytes() == part.nbytes() * parts, operation, ": ", whole_name, " of sizes ",
                    whole.sizes(), " must have ", parts, " times the elements of ", part_name, " of sizes ",
                    part.sizes(), ", one part for each rank");
}

void check_own_part(size_t given, size_t taken, const char* operation) {
  TORCH_CHECK_VALUE(given == taken, operation, ": this rank's part of the input has ", given,
                    " bytes, its part of the output has ", taken);
}

std::vector<size_t> split_bytes(const at::Tensor& tensor, const std::vector<int64_t>& splits, int ranks,
                                const char* name) {
  const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1;
  if (splits.empty()) {
    TORCH_CHECK_VALUE(tensor.dim() > 0 && rows % ranks == 0, "all_to_all_single: the ", name, " of sizes ",
                      tensor.sizes(), " can't be split equally along dimension 0 over ", ranks,
                      " ranks; give split sizes");
    return std::vector<size_t>(ranks, tensor.nbytes() / ranks);
  }
  TORCH_CHECK_VALUE(splits.size() == static_cast<size_t>(ranks), "all_to_all_single: ", splits.size(), ' ',
                    name, " split sizes; one is needed for each of the ", ranks, " ranks");
  const size_t row_bytes = rows > 0 ? tensor.nbytes() / rows : 0;
  int64_t sum = 0;
  std::vector<size_t> bytes;
  for (int64_t split : splits) {
    TORCH_CHECK_VALUE(split >= 0, "all_to_all_single: negative ", name, " split size ", split);
    sum += split;
    bytes.push_back(static_cast<size_t>(split) * row_bytes);
  }
  TORCH_CHECK_VALUE(sum == rows, "all_to_all_single: the ", name, " split sizes make ", sum,
                    " rows, dimension 0 has ", rows);
  return bytes;
}

}  // namespace lockstep::collectives::internal
