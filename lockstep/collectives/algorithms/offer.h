#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <lockstep/collectives/algorithms/exchange.h>
#include <lockstep/transport/host/groups/host_channel.h>

/// What a rank announces of its part in an exchange to the ranks of its host.
namespace lockstep::collectives::internal::algorithms {

/// Where the peers find the data.
enum class DataPlace : uint32_t { kInline, kArena, kStaged };

/// A rank's announcement, read in its payload.
class Offer {
 public:
  /// The head of the payload; entries, and if sizes are compared the bytes taken from each rank, follow; then the
  /// data, if they are there.
  struct Header {
    DataPlace place;
    uint32_t entries;  // 0, 1 (for all ranks) or one for each rank
    /// Bytes of the largest piece that this rank gives to, or takes from, another host.
    uint64_t between_hosts;
    /// The bytes of an announcement that has all that this rank gives, with entries for the ranks of all hosts. Else 0.
    uint64_t whole_bytes;
  };
  struct Entry {
    uint64_t bytes;
    uint64_t location;  // kInline: offset in the payload; kArena: segment and offset in the arena
  };

  explicit Offer(const void* payload) : payload_(static_cast<const std::byte*>(payload)) {}
  /// What `rank` has announced in the channel's operation.
  Offer(const transport::HostChannel& channel, int rank) : Offer(channel.payload(rank)) {}

  const std::byte* data() const { return payload_; }
  const Header& header() const { return *reinterpret_cast<const Header*>(payload_); }
  size_t bytes_for(int to) const { return header().entries == 0 ? 0 : entry(to).bytes; }
  uint64_t taken_from(int rank) const;
  const std::byte* inline_for(int to) const { return payload_ + entry(to).location; }
  transport::MemoryReference memory_for(int to) const;

 private:
  const Entry& entry(int to) const {
    const auto* entries = reinterpret_cast<const Entry*>(payload_ + sizeof(Header));
    return entries[header().entries == 1 ? 0 : to];
  }

  const std::byte* payload_;
};

/// Writes this rank's announcement payload. `exchange`: with the ranks of `channel`. Over hosts a table may be too
/// large; then the offer has no entries, and the data are kStaged.
void write_offer(transport::HostChannel& channel, const Exchange& exchange, uint64_t between_hosts = 0);
void write_offer(transport::GroupChannel& channel, const Exchange& exchange, uint64_t between_hosts = 0);
/// The bytes of an announcement with the data.
size_t offer_bytes(const Exchange& exchange);

/// Two sizes of one pair that differ, in words; ranks of the job.
std::string describe_sizes(int from, uint64_t given, int to, uint64_t taken);

/// Throws kMismatch if what a rank gives to another is not what that one takes. `offers`: of all ranks of the channel.
/// All ranks look at all pairs, so all throw.
template <class Channel>
void compare_sizes(Channel& channel, const std::vector<Offer>& offers) {
  for (int from = 0; from < channel.size(); ++from) {
    for (int to = 0; to < channel.size(); ++to) {
      const uint64_t given = offers[from].bytes_for(to);
      const uint64_t taken = offers[to].taken_from(from);
      if (given == taken) continue;
      channel.refuse(describe_sizes(channel.job_rank(from), given, channel.job_rank(to), taken));
    }
  }
}

}  // namespace lockstep::collectives::internal::algorithms
