#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/collectives/host_compression.h>
#include <lockstep/collectives/kernels/reduce_kernels.h>
#include <lockstep/transport/group_channel.h>

namespace lockstep {

enum class CollectiveKind : uint8_t {
  kBarrier,
  kAllReduce,
  kAllReduceCoalesced,
  kReduce,
  kBroadcast,
  kAllGather,
  kAllGatherIntoTensor,
  kAllGatherCoalesced,
  kAllGatherIntoTensorCoalesced,
  kGather,
  kScatter,
  kReduceScatter,
  kReduceScatterTensor,
  kReduceScatterCoalesced,
  kAllToAll,
  kAllToAllSingle,
  kNewGroup,
};

/// "all_reduce", as users call it. Static storage.
const char* to_string(CollectiveKind kind);

/// Purposes of operations (see CallSite) that all ranks' errors say where ranks called different operations. Others are in
/// this rank's flight records alone: a text has no room in an announcement, so a number stands for it there.
inline constexpr std::array<std::string_view, 2> kToldPurposes = {"", "a checkpoint"};

/// What the operations of this thread are for from now on.
void set_purpose(std::string_view purpose);

/// The fingerprint of an operation: what must be the same on all ranks, and the shapes and the purpose for messages.
/// Compared by a digest of its bytes, so it has no padding and unused parts are zero.
struct Signature {
  static constexpr int kMaxDims = 6;
  static constexpr uint8_t kNoOperation = 255;

  CollectiveKind kind = CollectiveKind::kBarrier;
  uint8_t dtype = 0;                 // at::ScalarType
  uint8_t operation = kNoOperation;  // ReduceOperation, of reductions
  uint8_t dims = 0;
  int32_t root = -1;  // group rank
  int64_t numel = 0;
  int64_t sizes[kMaxDims] = {};
  uint64_t more_sizes = 0;    // digest of the sizes beyond kMaxDims, and of the sizes of several tensors
  uint64_t counts = 0;        // digest of the numbers of elements of several tensors
  uint32_t sparse_dims = 0;   // of sparse tensors
  uint8_t premultiplied = 0;  // PREMUL_SUM: 1
  uint8_t purpose = 0;        // of kToldPurposes, as the thread that calls of() has it
  /// HostCompression of what travels between hosts; 0 for what is not encoded there, whatever was asked for.
  uint16_t between_hosts = 0;

  static Signature barrier() { return {}; }
  /// `tensor`: what each rank contributes, or one part of it.
  static Signature of(CollectiveKind kind, const at::Tensor& tensor, int root = -1);
  /// Several tensors as one.
  static Signature of(CollectiveKind kind, const std::vector<at::Tensor>& tensors);
  /// For operations in which sizes may differ by rank.
  static Signature of_dtype(CollectiveKind kind, at::ScalarType dtype);
  /// `compression`: what is asked for; is_encoded() decides.
  Signature with(ReduceOperation reduce_operation, bool is_premultiplied = false,
                 HostCompression compression = HostCompression::kNone) const;

  /// Complex numbers as what they are made of.
  at::ScalarType real_dtype() const;
  size_t real_numel() const;
  HostCompression compression() const { return static_cast<HostCompression>(between_hosts); }

  uint64_t digest() const;
  /// "all_reduce(SUM, Float [2, 3])", "broadcast(Long [1], src 0) for a checkpoint"
  std::string describe() const;
};
static_assert(sizeof(Signature) == 88 && sizeof(Signature) <= transport::layout::kDetailBytes);

/// The signature's part of an announcement.
transport::Announcement announcement_of(const Signature& signature);

/// Who called what, for the error of a mismatch.
class Calls {
 public:
  /// `details`: of an announcement; `ranks`: of the job.
  void add(const std::array<std::byte, transport::layout::kDetailBytes>& details,
           const std::vector<int>& ranks);
  /// Ranks with the same call together: "rank 0: all_reduce(SUM, Float [4]); ranks 1-3: barrier()". Empty if all called
  /// the same.
  std::string describe() const;

 private:
  std::vector<std::pair<Signature, std::vector<int>>> calls_;
};

/// What the members on this host announced in the channel's current operation.
Calls announced_calls(const transport::HostChannel& channel);
/// The same in words. Empty in groups over hosts, whose errors have said it.
std::string describe_announcements(const transport::GroupChannel& channel);

}  // namespace lockstep
