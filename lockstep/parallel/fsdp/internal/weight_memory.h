#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/collectives/process_group.h>
#include <lockstep/transport/host/memory/read_only_view.h>

namespace lockstep::fsdp::internal {

/// The one copy of a model's weights on this host, with a group of its own.
///
/// It lies in the arena of the group's first rank. All ranks see it read-only at view(), where modules' parameters lie, and
/// may write at writable(), which is for the owners of rows. Lives as long as any tensor that lies in it; the memory is
/// free when no rank has it any more.
class WeightMemory {
 public:
  /// Collective over the members of `parent`, with the same sizes. `parts`: what lies where, for the note that ends a
  /// process that writes to the view. Throws what split_group() throws, c10::ValueError where the group spans hosts, and
  /// c10::OutOfMemoryError on the first rank, c10::DistBackendError on the others, when there is not enough memory.
  WeightMemory(const ProcessGroup& parent, size_t bytes, std::vector<transport::ReadOnlyView::Part> parts);
  WeightMemory(const WeightMemory&) = delete;
  WeightMemory& operator=(const WeightMemory&) = delete;
  ~WeightMemory();

  const ProcessGroup& group() const { return group_; }
  std::byte* view() const { return view_->data(); }
  std::byte* writable() const { return writable_; }

 private:
  void open(size_t bytes, std::vector<transport::ReadOnlyView::Part> parts);
  void leave() noexcept;

  ProcessGroup group_;
  std::byte* writable_ = nullptr;
  std::unique_ptr<transport::ReadOnlyView> view_;
};

}  // namespace lockstep::fsdp::internal
