#include <utility>

#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <lockstep/base/process/memory.h>
#include <lockstep/parallel/fsdp/internal/row_memory.h>

namespace lockstep::fsdp::internal {

RowMemory::RowMemory(size_t bytes, std::vector<transport::ReadOnlyView::Part> parts,
                     const ProcessGroup& group, c10::Device device,
                     const std::optional<std::filesystem::path>& offload) {
  const size_t page = page_bytes();  // a tensor that is as large lies in whole ones
  const size_t size = (bytes / page + 1) * page;
  const auto numel = static_cast<int64_t>(size);
  if (!device.is_cpu()) {
    memory_ = at::zeros({numel}, at::TensorOptions(at::kByte).device(device));
    writable_ = static_cast<std::byte*>(memory_.mutable_data_ptr());
    return;
  }
  if (offload) {
    file_ = OffloadFile::create(*offload, size);
    file_->unlink();
    writable_ = file_->data();
  } else {
    memory_ = empty_shared({numel}, at::kByte, group).zero_();
    writable_ = static_cast<std::byte*>(memory_.mutable_data_ptr());
  }
  view_ = std::make_unique<transport::ReadOnlyView>(writable_, size, std::move(parts));
}

at::Tensor tensor_at(void* memory, at::IntArrayRef sizes, const at::TensorOptions& options,
                     std::shared_ptr<void> owner) {
  return at::for_blob(memory, sizes)
      .deleter([owner = std::move(owner)](void*) {})
      .target_device(options.device())
      .options(options)
      .make_tensor();
}

}  // namespace lockstep::fsdp::internal
