#include <algorithm>
#include <array>
#include <cstring>
#include <sstream>
#include <vector>

#include <torch/csrc/distributed/c10d/debug.h>

#include <lockstep/base/mix_bits.h>
#include <lockstep/base/ranks.h>
#include <lockstep/collectives/algorithms/signature.h>
#include <lockstep/collectives/kernels/wire_codec.h>

namespace lockstep {
namespace {

thread_local uint8_t purpose_of_thread = 0;

/// Of one word more.
uint64_t mix(uint64_t digest, uint64_t word) {
  return mix_bits(digest ^ word);
}

}  // namespace

void set_purpose(std::string_view purpose) {
  const auto* const told = std::find(kToldPurposes.begin(), kToldPurposes.end(), purpose);
  purpose_of_thread = told == kToldPurposes.end() ? 0 : static_cast<uint8_t>(told - kToldPurposes.begin());
}

const char* to_string(CollectiveKind kind) {
  static constexpr std::array<const char*, 17> kNames = {"barrier",
                                                         "all_reduce",
                                                         "all_reduce_coalesced",
                                                         "reduce",
                                                         "broadcast",
                                                         "all_gather",
                                                         "all_gather_into_tensor",
                                                         "all_gather_coalesced",
                                                         "all_gather_into_tensor_coalesced",
                                                         "gather",
                                                         "scatter",
                                                         "reduce_scatter",
                                                         "reduce_scatter_tensor",
                                                         "reduce_scatter_tensor_coalesced",
                                                         "all_to_all",
                                                         "all_to_all_single",
                                                         "new_group"};
  static_assert(kNames.size() == static_cast<size_t>(CollectiveKind::kNewGroup) + 1);
  return kNames[static_cast<size_t>(kind)];
}

Signature Signature::of(CollectiveKind kind, const at::Tensor& tensor, int root) {
  Signature signature = of_dtype(kind, tensor.scalar_type());
  signature.dims = static_cast<uint8_t>(std::min<int64_t>(tensor.dim(), 255));
  signature.root = root;
  signature.numel = tensor.numel();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (dim < kMaxDims) {
      signature.sizes[dim] = tensor.size(dim);
    } else {
      signature.more_sizes = mix(signature.more_sizes, static_cast<uint64_t>(tensor.size(dim)));
    }
  }
  if (tensor.is_sparse()) signature.sparse_dims = static_cast<uint32_t>(tensor.sparse_dim());
  return signature;
}

Signature Signature::of(CollectiveKind kind, const std::vector<at::Tensor>& tensors) {
  Signature signature = of_dtype(kind, tensors.front().scalar_type());
  for (const at::Tensor& tensor : tensors) {
    signature.numel += tensor.numel();
    signature.counts = mix(signature.counts, static_cast<uint64_t>(tensor.numel()));
    signature.more_sizes = mix(signature.more_sizes, static_cast<uint64_t>(tensor.dim()));
    for (int64_t size : tensor.sizes())
      signature.more_sizes = mix(signature.more_sizes, static_cast<uint64_t>(size));
  }
  signature.dims = 1;
  signature.sizes[0] = signature.numel;
  return signature;
}

Signature Signature::of_dtype(CollectiveKind kind, at::ScalarType dtype) {
  Signature signature;
  signature.kind = kind;
  signature.dtype = static_cast<uint8_t>(dtype);
  signature.purpose = purpose_of_thread;
  return signature;
}

Signature Signature::with(ReduceOperation reduce_operation, bool is_premultiplied,
                          HostCompression compression) const {
  Signature signature = *this;
  signature.operation = static_cast<uint8_t>(reduce_operation);
  signature.premultiplied = is_premultiplied ? 1 : 0;
  if (is_encoded(compression, real_dtype(), reduce_operation, real_numel())) {
    signature.between_hosts = static_cast<uint16_t>(compression);
  }
  return signature;
}

at::ScalarType Signature::real_dtype() const {
  const auto type = static_cast<at::ScalarType>(dtype);
  return at::isComplexType(type) ? c10::toRealValueType(type) : type;
}

size_t Signature::real_numel() const {
  return static_cast<size_t>(numel) * (at::isComplexType(static_cast<at::ScalarType>(dtype)) ? 2 : 1);
}

uint64_t Signature::digest() const {
  Signature compared = *this;
  compared.purpose = 0;
  // As in PyTorch, shapes may differ as long as the counts agree, unless every detail is to be compared. Not those of sparse
  // tensors, to which the indices refer.
  static const bool shapes_too = c10d::debug_level() == c10d::DebugLevel::Detail;
  if (!shapes_too && sparse_dims == 0) {
    compared.dims = 0;
    std::fill(std::begin(compared.sizes), std::end(compared.sizes), 0);
    compared.more_sizes = 0;
  }
  std::array<uint64_t, sizeof(Signature) / 8> words{};
  std::memcpy(words.data(), &compared, sizeof compared);
  uint64_t digest = 0;
  for (uint64_t word : words) digest = mix(digest, word);
  return digest;
}

std::string Signature::describe() const {
  std::ostringstream text;
  text << to_string(kind) << '(';
  if (kind != CollectiveKind::kBarrier && kind != CollectiveKind::kNewGroup) {
    if (operation != kNoOperation)
      text << (premultiplied != 0 ? "PREMUL_SUM" : to_string(static_cast<ReduceOperation>(operation)))
           << ", ";
    if (sparse_dims > 0) text << "sparse ";
    text << c10::toString(static_cast<at::ScalarType>(dtype));
    if (kind != CollectiveKind::kAllToAll && kind != CollectiveKind::kAllToAllSingle) {
      text << " [";
      for (int dim = 0; dim < std::min<int>(dims, kMaxDims); ++dim)
        text << (dim > 0 ? ", " : "") << sizes[dim];
      if (dims > kMaxDims) text << ", …";
      text << ']';
    }
    if (compression() != HostCompression::kNone)
      text << ", " << lockstep::to_string(compression()) << " between hosts";
    if (root >= 0) {
      const bool to_root = kind == CollectiveKind::kReduce || kind == CollectiveKind::kGather;
      text << (to_root ? ", dst " : ", src ") << root;
    }
  }
  text << ')';
  if (purpose > 0 && purpose < kToldPurposes.size()) text << " for " << kToldPurposes[purpose];
  return text.str();
}

transport::Announcement announcement_of(const Signature& signature) {
  transport::Announcement announcement;
  announcement.digest = signature.digest();
  std::memcpy(announcement.details.data(), &signature, sizeof signature);
  return announcement;
}

void Calls::add(const std::array<std::byte, transport::layout::kDetailBytes>& details,
                const std::vector<int>& ranks) {
  Signature signature;
  std::memcpy(&signature, details.data(), sizeof signature);
  auto same = std::find_if(calls_.begin(), calls_.end(), [&](const auto& call) {
    return std::memcmp(&call.first, &signature, sizeof signature) == 0;
  });
  if (same == calls_.end()) same = calls_.insert(calls_.end(), {signature, {}});
  same->second.insert(same->second.end(), ranks.begin(), ranks.end());
}

std::string Calls::describe() const {
  if (calls_.size() == 1) return "";
  std::ostringstream text;
  for (const auto& [signature, ranks] : calls_) {
    text << (text.tellp() > 0 ? "; " : "") << name_ranks(ranks) << ": " << signature.describe();
  }
  return text.str();
}

Calls announced_calls(const transport::HostChannel& channel) {
  Calls calls;
  for (int rank = 0; rank < channel.size(); ++rank)
    calls.add(channel.details(rank), {channel.job_rank(rank)});
  return calls;
}

std::string describe_announcements(const transport::GroupChannel& channel) {
  return channel.spans_hosts() ? "" : announced_calls(channel.host()).describe();
}

}  // namespace lockstep
