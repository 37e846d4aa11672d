#include <ATen/ops/from_blob.h>

#include <lockstep/base/process/fork_guard.h>
#include <lockstep/collectives/backend/internal/shared_tensor.h>

namespace lockstep::collectives::internal {

at::Tensor allocate_shared(const std::shared_ptr<transport::Arena>& arena, int64_t numel,
                           at::TensorOptions options) {
  void* memory = arena->allocate(static_cast<size_t>(numel) * options.dtype().itemsize());
  // The memory keeps its arena alive, not the transport, which itself keeps the tensors of failed operations.
  return at::from_blob(
      memory, {numel},
      [arena, guard = ForkGuard()](void* data) {
        if (!guard.in_forked_child()) arena->deallocate(data);
      },
      options);
}

MemorySpan span_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto* begin = static_cast<const std::byte*>(tensor.const_data_ptr());
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.itemsize())};
}

}  // namespace lockstep::collectives::internal
