#include <algorithm>
#include <array>
#include <cstring>
#include <sstream>
#include <utility>
#include <vector>

#include <lockstep/base/ranks.h>
#include <lockstep/collectives/internal/signature.h>

namespace lockstep {
namespace {

/// splitmix64's finaliser over one more word.
uint64_t mix(uint64_t digest, uint64_t word) {
  digest = (digest ^ word) + 0x9e3779b97f4a7c15ULL;
  digest = (digest ^ digest >> 30) * 0xbf58476d1ce4e5b9ULL;
  digest = (digest ^ digest >> 27) * 0x94d049bb133111ebULL;
  return digest ^ digest >> 31;
}

/// Tensors of one size whose elements lie in the same order have the same digest; contiguous ones have 0.
uint64_t layout_digest(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return 0;
  uint64_t digest = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) != 1) digest = mix(digest, static_cast<uint64_t>(tensor.stride(dim)));
  }
  return digest;
}

}  // namespace

const char* to_string(CollectiveKind kind) {
  static constexpr std::array<const char*, 4> kNames = {"all_reduce", "broadcast", "all_gather", "barrier"};
  return kNames[static_cast<size_t>(kind)];
}

Signature Signature::barrier() {
  return {};
}

Signature Signature::of(CollectiveKind kind, const at::Tensor& tensor, ReduceOperation operation, int root) {
  Signature signature;
  signature.kind = kind;
  signature.dtype = static_cast<uint8_t>(tensor.scalar_type());
  if (kind == CollectiveKind::kAllReduce) signature.operation = static_cast<uint8_t>(operation);
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
  signature.layout = layout_digest(tensor);
  return signature;
}

uint64_t Signature::digest() const {
  std::array<uint64_t, sizeof(Signature) / 8> words{};
  std::memcpy(words.data(), this, sizeof(Signature));
  uint64_t digest = 0;
  for (uint64_t word : words) digest = mix(digest, word);
  return digest;
}

std::string Signature::describe() const {
  std::ostringstream text;
  text << to_string(kind) << '(';
  if (kind != CollectiveKind::kBarrier) {
    if (kind == CollectiveKind::kAllReduce)
      text << to_string(static_cast<ReduceOperation>(operation)) << ", ";
    text << c10::toString(static_cast<at::ScalarType>(dtype)) << " [";
    for (int dim = 0; dim < std::min<int>(dims, kMaxDims); ++dim) text << (dim > 0 ? ", " : "") << sizes[dim];
    if (dims > kMaxDims) text << ", …";
    text << ']';
    if (layout != 0) text << " in memory order " << std::hex << layout << std::dec;
    if (root >= 0) text << ", src " << root;
  }
  text << ')';
  return text.str();
}

transport::Announcement announcement_of(const Signature& signature) {
  transport::Announcement announcement;
  announcement.digest = signature.digest();
  std::memcpy(announcement.details.data(), &signature, sizeof signature);
  return announcement;
}

std::string describe_announcements(const transport::GroupChannel& channel) {
  std::vector<std::pair<Signature, std::vector<int>>> calls;
  for (int rank = 0; rank < channel.size(); ++rank) {
    Signature signature;
    std::memcpy(&signature, channel.details(rank).data(), sizeof signature);
    auto same = std::find_if(calls.begin(), calls.end(), [&](const auto& call) {
      return std::memcmp(&call.first, &signature, sizeof signature) == 0;
    });
    if (same == calls.end()) same = calls.insert(calls.end(), {signature, {}});
    same->second.push_back(channel.transport_rank(rank));
  }
  std::ostringstream text;
  for (const auto& [signature, ranks] : calls) {
    text << (text.tellp() > 0 ? "; " : "") << name_ranks(ranks) << ": " << signature.describe();
  }
  return text.str();
}

}  // namespace lockstep
