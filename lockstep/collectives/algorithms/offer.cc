#include <optional>
#include <vector>

#include <c10/util/StringUtil.h>

#include <lockstep/collectives/algorithms/offer.h>
#include <lockstep/collectives/algorithms/staging.h>

namespace lockstep::collectives::internal::algorithms {
namespace {

using transport::GroupChannel;
using transport::HostChannel;

constexpr uint64_t kOffsetBits = 48;

size_t table_bytes(const Exchange& exchange) {
  return sizeof(Offer::Header) + exchange.gives.size() * sizeof(Offer::Entry) +
         (exchange.compare_sizes ? exchange.takes.size() * sizeof(uint64_t) : 0);
}
// The table for the largest group of one host fits.
static_assert(sizeof(Offer::Header) +
                  transport::layout::kMaxRanks * (sizeof(Offer::Entry) + sizeof(uint64_t)) <=
              HostChannel::kPayloadBytes);

/// `own`: this rank among those of the exchange. `all`: they are the ranks of all hosts.
void write_own_offer(HostChannel& channel, const Exchange& exchange, int own, uint64_t between_hosts,
                     bool all) {
  std::byte* payload = channel.own_payload();
  auto* header = reinterpret_cast<Offer::Header*>(payload);
  *header = {DataPlace::kStaged, 0, between_hosts, 0};
  const size_t table = table_bytes(exchange);
  if (table > HostChannel::kPayloadBytes) return;
  const size_t bytes = offer_bytes(exchange);
  const bool is_inline = bytes <= HostChannel::kPayloadBytes;
  std::vector<std::optional<transport::MemoryReference>> references;
  bool in_arena = true;
  for (size_t to = 0; to < exchange.gives.size() && !is_inline && in_arena; ++to) {
    const Piece& piece = exchange.gives[to];
    const bool to_myself = exchange.gives.size() > 1 && to == static_cast<size_t>(own);
    references.push_back(piece.bytes == 0 || to_myself
                             ? transport::MemoryReference{}
                             : channel.transport().arena().find(piece.data, piece.bytes));
    in_arena = references.back().has_value();
  }
  header->entries = static_cast<uint32_t>(exchange.gives.size());
  header->place = is_inline ? DataPlace::kInline : in_arena ? DataPlace::kArena : DataPlace::kStaged;
  header->whole_bytes = is_inline && all ? bytes : 0;
  auto* entries = reinterpret_cast<Offer::Entry*>(payload + sizeof(Offer::Header));
  size_t at = table;
  for (size_t to = 0; to < exchange.gives.size(); ++to) {
    const Piece& piece = exchange.gives[to];
    entries[to] = {piece.bytes, 0};
    if (is_inline) {
      entries[to].location = at;
      copy_bytes(payload + at, piece.data, piece.bytes);
      at += piece.bytes;
    } else if (in_arena) {
      entries[to].location = uint64_t{references[to]->segment} << kOffsetBits | references[to]->offset;
    }
  }
  if (exchange.compare_sizes) {
    copy_bytes(entries + exchange.gives.size(), exchange.takes.data(),
               exchange.takes.size() * sizeof(uint64_t));
  }
}

}  // namespace

size_t offer_bytes(const Exchange& exchange) {
  size_t bytes = table_bytes(exchange);
  for (const Piece& piece : exchange.gives) bytes += piece.bytes;
  return bytes;
}

uint64_t Offer::taken_from(int rank) const {
  const std::byte* takes = payload_ + sizeof(Header) + header().entries * sizeof(Entry);
  return reinterpret_cast<const uint64_t*>(takes)[rank];
}

transport::MemoryReference Offer::memory_for(int to) const {
  const uint64_t location = entry(to).location;
  return {static_cast<uint32_t>(location >> kOffsetBits), location & ((uint64_t{1} << kOffsetBits) - 1)};
}

void write_offer(HostChannel& channel, const Exchange& exchange, uint64_t between_hosts) {
  write_own_offer(channel, exchange, channel.rank(), between_hosts, /*all=*/false);
}
void write_offer(GroupChannel& channel, const Exchange& exchange, uint64_t between_hosts) {
  write_own_offer(channel.host(), exchange, channel.rank(), between_hosts, /*all=*/true);
}

std::string describe_sizes(int from, uint64_t given, int to, uint64_t taken) {
  return c10::str("rank ", from, " sends ", given, " bytes to rank ", to, ", which expects ", taken,
                  "; each pair's split sizes must agree");
}

}  // namespace lockstep::collectives::internal::algorithms
