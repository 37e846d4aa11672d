#include <utility>

#include <lockstep/parallel/fsdp/internal/gather/row_memory.h>

namespace lockstep::fsdp::internal {

RowMemory::RowMemory(size_t bytes, std::vector<transport::ReadOnlyView::Part> parts,
                     const ProcessGroup& group) {
  constexpr size_t kPageBytes = 4096;  // a tensor that is as large lies in whole ones
  const auto numel = static_cast<int64_t>((bytes / kPageBytes + 1) * kPageBytes);
  memory_ = empty_shared({numel}, at::kByte, group).zero_();
  writable_ = static_cast<std::byte*>(memory_.mutable_data_ptr());
  view_ = std::make_unique<transport::ReadOnlyView>(writable_, static_cast<size_t>(numel), std::move(parts));
}

}  // namespace lockstep::fsdp::internal
