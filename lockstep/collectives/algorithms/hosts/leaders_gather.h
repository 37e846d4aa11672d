#pragma once

#include <cstddef>
#include <vector>

#include <lockstep/transport/group_channel.h>

namespace lockstep::collectives::internal::algorithms::hosts {

/// An all-gather between the leaders of the hosts, of blocks whose sizes need not agree. Up to kDirectLeaders each
/// sends to each; beyond that in log2(H) rounds, in round r what it knows to the host 2^r before it (Bruck).
class LeadersGather {
 public:
  /// Up to so many hosts one message to each is faster than the rounds.
  static constexpr int kDirectLeaders = 4;

  /// `most`: bytes of the largest block that any leader may send.
  LeadersGather(transport::GroupChannel& channel, size_t most);

  /// Scratch that run() needs.
  size_t scratch_bytes() const { return hosts_ * stride_; }
  /// Where to put the own block.
  std::byte* own(std::byte* scratch) const;
  /// Every host's block, in host order. They lie in the scratch. Throws ChannelError.
  std::vector<const std::byte*> run(std::byte* scratch, size_t own_bytes);

 private:
  void run_direct(std::byte* scratch);
  void run_bruck(std::byte* scratch);
  size_t packed_bytes(const std::byte* block) const;
  int leader_of(size_t host) const { return channel_.layout().hosts[host].front(); }

  transport::GroupChannel& channel_;
  const size_t hosts_;
  const size_t host_;
  const size_t stride_;  // room for one block
  std::vector<const std::byte*> blocks_;
};

}  // namespace lockstep::collectives::internal::algorithms::hosts
