#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

#include <lockstep/collectives/reduce_kernels.h>
#include <lockstep/transport/shared_memory/group_channel.h>

namespace lockstep {

enum class CollectiveKind : uint8_t { kAllReduce, kBroadcast, kAllGather, kBarrier };

/// "all_reduce", as users call it.
const char* to_string(CollectiveKind kind);

/// The fingerprint of an operation: everything that must be the same on all ranks. Compared by its bytes, so
/// it has no padding and unused parts are zero.
struct Signature {
  static constexpr int kMaxDims = 6;

  CollectiveKind kind = CollectiveKind::kBarrier;
  uint8_t dtype = 0;      // at::ScalarType
  uint8_t operation = 0;  // ReduceOperation
  uint8_t dims = 0;
  int32_t root = -1;
  int64_t numel = 0;
  int64_t sizes[kMaxDims] = {};
  uint64_t layout = 0;      // digest of the strides; 0 when contiguous
  uint64_t more_sizes = 0;  // digest of the sizes beyond kMaxDims

  static Signature barrier();
  /// `tensor` is dense and not overlapping. `operation` counts for kAllReduce, `root` for kBroadcast.
  static Signature of(CollectiveKind kind, const at::Tensor& tensor,
                      ReduceOperation operation = ReduceOperation::kSum, int root = -1);

  uint64_t digest() const;
  /// "all_reduce(SUM, Float [2, 3])"
  std::string describe() const;
};
static_assert(sizeof(Signature) == 80 && sizeof(Signature) <= transport::layout::kDetailBytes);

/// The signature's part of an announcement.
transport::Announcement announcement_of(const Signature& signature);

/// What each rank of the channel's current operation announced, ranks with the same call together:
/// "rank 0: all_reduce(SUM, Float [4]); ranks 1-3: barrier()".
std::string describe_announcements(const transport::GroupChannel& channel);

}  // namespace lockstep
