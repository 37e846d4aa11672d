#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/transport/host/memory/read_only_view.h>

namespace lockstep::fsdp::internal {

/// Memory for rows that this rank owns, and that no other one maps: written at writable(), while at view() a write ends the
/// process with a note that names the parameter. Zeros to begin with. Thread-safe.
class RowMemory {
 public:
  /// `group`: in whose shared memory it lies, so that its collectives need not copy. Throws c10::OutOfMemoryError.
  RowMemory(size_t bytes, std::vector<transport::ReadOnlyView::Part> parts, const ProcessGroup& group);
  RowMemory(const RowMemory&) = delete;
  RowMemory& operator=(const RowMemory&) = delete;

  std::byte* view() const { return view_->data(); }
  std::byte* writable() const { return writable_; }

 private:
  at::Tensor memory_;
  std::byte* writable_;
  std::unique_ptr<transport::ReadOnlyView> view_;
};

}  // namespace lockstep::fsdp::internal
