#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include <lockstep/parallel/fsdp/internal/offload_file.h>
#include <lockstep/parallel/fsdp/internal/shard_groups.h>
#include <lockstep/transport/host/memory/read_only_view.h>

namespace lockstep::fsdp::internal {

/// The one copy of a model's weights on this host.
///
/// It lies in the arena of the host's first rank, or in a file that this rank has made. All ranks see it read-only at view(),
/// where modules' parameters lie, and may write at writable(), which is for the owners of rows. Lives as long as any tensor that
/// lies in it; the memory is free when no rank has it any more.
class WeightMemory {
 public:
  /// Collective over the ranks of this host, with the same sizes. `parts`: what lies where, for the note that ends a
  /// process that writes to the view. Throws c10::ValueError where the group has another backend, and
  /// c10::OutOfMemoryError on the first rank, c10::DistBackendError on the others, when there is not enough memory. With
  /// `offload` it lies in a file in this directory: see OffloadFile.
  WeightMemory(std::shared_ptr<const ShardGroups> groups, size_t bytes,
               std::vector<transport::ReadOnlyView::Part> parts,
               const std::optional<std::filesystem::path>& offload = {});
  WeightMemory(const WeightMemory&) = delete;
  WeightMemory& operator=(const WeightMemory&) = delete;

  std::byte* view() const { return view_->data(); }
  std::byte* writable() const { return writable_; }

 private:
  void allocate(size_t bytes);
  void map_file(const std::filesystem::path& directory, size_t bytes);

  const std::shared_ptr<const ShardGroups> groups_;
  std::shared_ptr<OffloadFile> file_;
  std::byte* writable_ = nullptr;
  std::unique_ptr<transport::ReadOnlyView> view_;
};

}  // namespace lockstep::fsdp::internal
