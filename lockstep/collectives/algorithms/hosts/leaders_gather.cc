#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/collectives/algorithms/hosts/leaders_gather.h>
#include <lockstep/collectives/algorithms/staging.h>

namespace lockstep::collectives::internal::algorithms::hosts {
namespace {

/// In front of each block, so that blocks begin on cache lines.
struct alignas(kCacheLine) BlockHeader {
  uint64_t bytes;
};

size_t block_stride(size_t bytes) {
  return whole_lines(sizeof(BlockHeader) + bytes);
}

}  // namespace

LeadersGather::LeadersGather(transport::GroupChannel& channel, size_t most)
    : channel_(channel),
      hosts_(channel.layout().hosts.size()),
      host_(channel.layout().host()),
      stride_(block_stride(most)),
      blocks_(hosts_) {}

// Own block first: in the rounds each leader keeps the blocks of the hosts from its own on.
std::byte* LeadersGather::own(std::byte* scratch) const {
  return scratch + sizeof(BlockHeader);
}

size_t LeadersGather::packed_bytes(const std::byte* block) const {
  const size_t bytes = block_stride(reinterpret_cast<const BlockHeader*>(block)->bytes);
  TORCH_INTERNAL_ASSERT(bytes <= stride_);
  return bytes;
}

std::vector<const std::byte*> LeadersGather::run(std::byte* scratch, size_t own_bytes) {
  reinterpret_cast<BlockHeader*>(scratch)->bytes = own_bytes;
  blocks_[host_] = scratch;
  hosts_ <= kDirectLeaders ? run_direct(scratch) : run_bruck(scratch);
  for (auto& block : blocks_) block += sizeof(BlockHeader);
  return std::move(blocks_);
}

void LeadersGather::run_direct(std::byte* scratch) {
  std::vector<transport::wire::Handle> requests;
  std::byte* to = scratch + stride_;
  for (size_t host = 0; host < hosts_; ++host) {
    if (host == host_) continue;
    blocks_[host] = to;
    requests.push_back(channel_.receive(leader_of(host), to, stride_));
    to += stride_;
  }
  for (size_t host = 0; host < hosts_; ++host) {
    if (host != host_) requests.push_back(channel_.send(leader_of(host), scratch, packed_bytes(scratch)));
  }
  channel_.await(requests);
}

// The blocks known so far lie one after the other, without gaps. A message is a run of them from the first.
void LeadersGather::run_bruck(std::byte* scratch) {
  std::byte* end = scratch + packed_bytes(scratch);
  for (size_t known = 1; known < hosts_;) {
    const size_t wanted = std::min(known, hosts_ - known);
    const std::byte* sent_end = scratch;
    for (size_t i = 0; i < wanted; ++i) sent_end += packed_bytes(sent_end);
    channel_.await({channel_.receive(leader_of((host_ + known) % hosts_), end, wanted * stride_),
                    channel_.send(leader_of((host_ + hosts_ - known) % hosts_), scratch,
                                  static_cast<size_t>(sent_end - scratch))});
    for (size_t i = 0; i < wanted; ++i, ++known) {
      blocks_[(host_ + known) % hosts_] = end;
      end += packed_bytes(end);
    }
  }
}

}  // namespace lockstep::collectives::internal::algorithms::hosts
