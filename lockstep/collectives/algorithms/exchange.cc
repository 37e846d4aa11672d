#include <array>
#include <optional>
#include <sstream>

#include <lockstep/base/failpoint.h>
#include <lockstep/collectives/algorithms/exchange.h>
#include <lockstep/collectives/algorithms/staging.h>

namespace lockstep::algorithms {
namespace {

using transport::GroupChannel;
using Flag = GroupChannel::Flag;

enum class Place : uint32_t { kInline, kArena, kStaged };

/// The head of a rank's announcement payload; entries, and if sizes are compared the bytes taken from each
/// rank, follow; then the data, if they are there.
struct Header {
  Place place;
  uint32_t entries;  // 0, 1 (for all ranks) or one for each rank
};
struct Entry {
  uint64_t bytes;
  uint64_t location;  // kInline: offset in the payload; kArena: segment and offset in the arena
};
constexpr uint64_t kOffsetBits = 48;

/// A rank's announcement, read or written in the payload.
class Offer {
 public:
  Offer(const std::byte* payload, int ranks) : payload_(payload), ranks_(ranks) {}

  const Header& header() const { return *reinterpret_cast<const Header*>(payload_); }
  const Entry& entry(int to) const {
    const auto* entries = reinterpret_cast<const Entry*>(payload_ + sizeof(Header));
    return entries[header().entries == 1 ? 0 : to];
  }
  size_t bytes_for(int to) const { return header().entries == 0 ? 0 : entry(to).bytes; }
  uint64_t taken_from(int rank) const {
    const std::byte* takes = payload_ + sizeof(Header) + header().entries * sizeof(Entry);
    return reinterpret_cast<const uint64_t*>(takes)[rank];
  }
  /// The largest part of a piece that passes at once.
  size_t window_bytes(size_t capacity) const {
    const size_t parts = header().entries > 1 ? static_cast<size_t>(ranks_) : 1;
    return capacity / parts / kCacheLine * kCacheLine;
  }
  const std::byte* payload() const { return payload_; }

 private:
  const std::byte* payload_;
  int ranks_;
};

size_t table_bytes(const Exchange& exchange) {
  return sizeof(Header) + exchange.gives.size() * sizeof(Entry) +
         (exchange.compare_sizes ? exchange.takes.size() * sizeof(uint64_t) : 0);
}

/// Writes this rank's announcement payload.
void write_offer(GroupChannel& channel, const Exchange& exchange) {
  std::byte* payload = channel.own_payload();
  size_t total = 0;
  std::vector<std::optional<transport::MemoryReference>> references;
  bool in_arena = true;
  for (size_t to = 0; to < exchange.gives.size(); ++to) {
    const Piece& piece = exchange.gives[to];
    total += piece.bytes;
    const bool to_myself = exchange.gives.size() > 1 && to == static_cast<size_t>(channel.rank());
    references.push_back(piece.bytes == 0 || to_myself
                             ? transport::MemoryReference{}
                             : channel.transport().arena().find(piece.data, piece.bytes));
    in_arena &= references.back().has_value();
  }
  const size_t table = table_bytes(exchange);
  auto* header = reinterpret_cast<Header*>(payload);
  header->entries = static_cast<uint32_t>(exchange.gives.size());
  header->place = table + total <= GroupChannel::kPayloadBytes ? Place::kInline
                  : in_arena                                   ? Place::kArena
                                                               : Place::kStaged;
  auto* entries = reinterpret_cast<Entry*>(payload + sizeof(Header));
  size_t at = table;
  for (size_t to = 0; to < exchange.gives.size(); ++to) {
    const Piece& piece = exchange.gives[to];
    entries[to] = {piece.bytes, 0};
    if (header->place == Place::kInline) {
      entries[to].location = at;
      copy_bytes(payload + at, piece.data, piece.bytes);
      at += piece.bytes;
    } else if (header->place == Place::kArena) {
      entries[to].location = uint64_t{references[to]->segment} << kOffsetBits | references[to]->offset;
    }
  }
  if (exchange.compare_sizes) {
    copy_bytes(entries + exchange.gives.size(), exchange.takes.data(),
               exchange.takes.size() * sizeof(uint64_t));
  }
}

/// All ranks look at all pairs, so all throw.
void compare_sizes(GroupChannel& channel, const std::vector<Offer>& offers) {
  for (int from = 0; from < channel.size(); ++from) {
    for (int to = 0; to < channel.size(); ++to) {
      const uint64_t given = offers[from].bytes_for(to);
      const uint64_t taken = offers[to].taken_from(from);
      if (given == taken) continue;
      std::ostringstream text;
      text << "rank " << channel.job_rank(from) << " sends " << given << " bytes to rank "
           << channel.job_rank(to) << ", which expects " << taken << "; each pair's split sizes must agree";
      channel.refuse(text.str());
    }
  }
}

/// The rounds of one exchange, as all ranks see them.
class Rounds {
 public:
  Rounds(GroupChannel& channel, const Exchange& exchange, const std::vector<Offer>& offers)
      : channel_(channel), exchange_(exchange), offers_(offers), buffers_(channel) {
    for (const Offer& offer : offers) any_staged_ |= offer.header().place == Place::kStaged;
    if (!any_staged_) return;
    for (const Offer& offer : offers) {
      const size_t window = offer.window_bytes(buffers_.capacity());
      for (int to = 0; to < channel.size(); ++to) {
        rounds_ = std::max(rounds_, (offer.bytes_for(to) + window - 1) / window);
      }
    }
  }

  /// That pass through the scratch, on any rank.
  size_t chunks() const { return any_staged_ ? rounds_ : 0; }

  void run(const Consume& consume) {
    const bool staging = offers_[channel_.rank()].header().place == Place::kStaged;
    if (staging) stage(0);
    for (size_t k = 0; k < rounds_; ++k) {
      if (staging && k + 1 < rounds_) {
        // The buffer of chunk k+1 is free once all ranks have read chunk k−1 from it.
        if (k > 0) channel_.await_all(Flag::kReduced, buffers_.number(k - 1));
        stage(k + 1);
      }
      consume(windows(k));
      if (any_staged_) channel_.publish(Flag::kReduced, buffers_.number(k));
    }
  }

 private:
  size_t window_bytes(int from) const {
    return any_staged_ ? offers_[from].window_bytes(buffers_.capacity()) : ~size_t{0} / 2;
  }
  /// Part k of what `from` gives to `to`.
  Window window(int from, int to, size_t k) const {
    const size_t size = window_bytes(from);
    const size_t bytes = offers_[from].bytes_for(to);
    const size_t offset = std::min(bytes, k == 0 ? 0 : k * size);
    return {nullptr, offset, std::min(size, bytes - offset)};
  }

  void stage(size_t k) {
    std::byte* buffer = buffers_.own(k);
    const int own = channel_.rank();
    const bool for_all = exchange_.gives.size() == 1;
    for (int to = 0; to < (for_all ? 1 : channel_.size()); ++to) {
      if (to == own && !for_all) continue;
      const Window part = window(own, to, k);
      copy_bytes(buffer + to * window_bytes(own),
                 static_cast<const std::byte*>(exchange_.gives[to].data) + part.offset, part.bytes);
    }
    channel_.publish(Flag::kStaged, buffers_.number(k));
  }

  std::vector<Window> windows(size_t k) {
    const int own = channel_.rank();
    std::vector<Window> windows(channel_.size());
    for (int from = 0; from < channel_.size(); ++from) {
      if (exchange_.takes[from] == 0) continue;
      Window& part = windows[from] = window(from, own, k);
      if (part.bytes == 0) continue;
      const Offer& offer = offers_[from];
      if (from == own) {
        const Piece& piece = exchange_.gives[exchange_.gives.size() == 1 ? 0 : own];
        part.data = static_cast<const std::byte*>(piece.data) + part.offset;
      } else if (offer.header().place == Place::kInline) {
        part.data = offer.payload() + offer.entry(own).location + part.offset;
      } else if (offer.header().place == Place::kArena) {
        const uint64_t location = offer.entry(own).location;
        part.data = channel_.memory(from, {static_cast<uint32_t>(location >> kOffsetBits),
                                           location & ((uint64_t{1} << kOffsetBits) - 1)}) +
                    part.offset;
      } else {
        channel_.await_rank(Flag::kStaged, from, buffers_.number(k));
        part.data = buffers_.of(from, k) + (offer.header().entries == 1 ? 0 : own * window_bytes(from));
      }
    }
    return windows;
  }

  GroupChannel& channel_;
  const Exchange& exchange_;
  const std::vector<Offer>& offers_;
  DoubleBuffer buffers_;
  bool any_staged_ = false;
  size_t rounds_ = 1;
};

}  // namespace

void exchange(GroupChannel& channel, const Terms& terms, const Signature& signature, const Exchange& exchange,
              const Consume& consume) {
  channel.begin(terms.deadline, terms.background);
  write_offer(channel, exchange);
  channel.announce(announcement_of(signature));
  channel.await_announcements();
  std::vector<Offer> offers;
  bool all_inline = true;
  for (int rank = 0; rank < channel.size(); ++rank) {
    offers.emplace_back(static_cast<const std::byte*>(channel.payload(rank)), channel.size());
    all_inline &= offers.back().header().place == Place::kInline;
  }
  if (exchange.compare_sizes) compare_sizes(channel, offers);
  Rounds rounds(channel, exchange, offers);
  if (all_inline || channel.size() == 1) {
    // The announcements stay until the operation after the next is announced: success can be made final
    // first.
    channel.commit();
    return rounds.run(consume);
  }
  failpoint::here("exchange");
  rounds.run(consume);
  channel.add_chunks(rounds.chunks());
  finish(channel);
}

}  // namespace lockstep::algorithms
