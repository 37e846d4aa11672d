#pragma once

#include <cstddef>
#include <memory>

#include <ATen/core/Tensor.h>

#include <lockstep/transport/host/memory/arena.h>

namespace lockstep::collectives::internal {

/// A flat, uninitialised CPU tensor in the arena, which it keeps alive.
at::Tensor allocate_shared(const std::shared_ptr<transport::Arena>& arena, int64_t numel,
                           at::TensorOptions options);

/// From the first byte of a tensor to one past the last; empty for an empty one.
struct MemorySpan {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;
  bool overlaps(const MemorySpan& other) const { return begin < other.end && other.begin < end; }
};
MemorySpan span_of(const at::Tensor& tensor);

/// Whether the tensor's elements lie one after the other as they count: no gaps, nothing lazy.
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace lockstep::collectives::internal
