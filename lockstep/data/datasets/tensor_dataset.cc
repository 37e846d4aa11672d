#include <cstring>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index_select.h>
#include <c10/util/Exception.h>

#include <lockstep/data/datasets/tensor_dataset.h>

namespace lockstep::data::internal {
namespace {

void check_index(int64_t index, int64_t size) {
  TORCH_CHECK_INDEX(index >= 0 && index < size, "index ", index, " is out of range for a TensorDataset with ",
                    size, " samples");
}

}  // namespace

void check_tensors(std::span<const at::Tensor> tensors) {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.defined() && tensor.dim() > 0,
                      "TensorDataset: a tensor without dimensions has no samples");
    TORCH_CHECK_VALUE(tensor.size(0) == tensors[0].size(0),
                      "Size mismatch between tensors: ", tensors[0].size(0), " and ", tensor.size(0),
                      " samples");
  }
}

at::Tensor row_of(const at::Tensor& tensor, int64_t index) {
  check_index(index, tensor.size(0));
  return tensor.select(0, index);
}

at::Tensor gather_rows(const at::Tensor& tensor, std::span<const int64_t> indices) {
  const int64_t size = tensor.size(0);
  for (const int64_t index : indices) check_index(index, size);
  const auto count = static_cast<int64_t>(indices.size());
  const bool plain = tensor.device().is_cpu() && tensor.layout() == at::kStrided && !tensor.is_quantized() &&
                     tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg() &&
                     !tensor.requires_grad();
  if (!plain) {
    // from_blob asks for a pointer to what may be written; index_select only reads.
    const auto places =
        at::from_blob(const_cast<int64_t*>(indices.data()), {count}, at::TensorOptions().dtype(at::kLong));
    return at::index_select(tensor, 0, places.to(tensor.device()));
  }
  // A copy of one's own: at::index_select() costs as much as ten small rows before it copies the first.
  auto sizes = tensor.sizes().vec();
  sizes[0] = count;
  at::Tensor rows = at::empty(sizes, tensor.options().pinned_memory(false));
  if (rows.numel() == 0) return rows;  // there is no memory to copy
  const size_t row = size > 0 ? tensor.nbytes() / static_cast<size_t>(size) : 0;
  const auto* from = static_cast<const char*>(tensor.const_data_ptr());
  auto* to = static_cast<char*>(rows.mutable_data_ptr());
  for (size_t i = 0; i < indices.size();) {
    size_t run = 1;
    while (i + run < indices.size() && indices[i + run] == indices[i] + static_cast<int64_t>(run)) ++run;
    std::memcpy(to, from + static_cast<size_t>(indices[i]) * row, run * row);
    to += run * row;
    i += run;
  }
  return rows;
}

}  // namespace lockstep::data::internal
