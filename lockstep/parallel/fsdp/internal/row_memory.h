#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/parallel/fsdp/internal/offload_file.h>
#include <lockstep/transport/host/memory/read_only_view.h>

namespace lockstep::fsdp::internal {

/// Memory for rows that this rank owns, and that no other one maps: written at writable(), while at view() a write ends the
/// process with a note that names the parameter. On a device both are the same, and nothing guards it. Zeros to begin with.
/// Thread-safe.
class RowMemory {
 public:
  /// In the shared memory of `group`, so that its collectives need not copy; or, with `offload`, in a file in this directory;
  /// or on a device. Throws c10::OutOfMemoryError, and what OffloadFile::create() throws.
  RowMemory(size_t bytes, std::vector<transport::ReadOnlyView::Part> parts, const ProcessGroup& group,
            c10::Device device, const std::optional<std::filesystem::path>& offload = {});
  RowMemory(const RowMemory&) = delete;
  RowMemory& operator=(const RowMemory&) = delete;

  std::byte* view() const { return view_ ? view_->data() : writable_; }
  std::byte* writable() const { return writable_; }

 private:
  at::Tensor memory_;  // shared, or on a device; none where there is a file
  std::shared_ptr<OffloadFile> file_;
  std::byte* writable_;
  std::unique_ptr<transport::ReadOnlyView> view_;
};

/// A tensor of this memory, on a device or the CPU, which keeps `owner`.
at::Tensor tensor_at(void* memory, at::IntArrayRef sizes, const at::TensorOptions& options,
                     std::shared_ptr<void> owner = {});

}  // namespace lockstep::fsdp::internal
