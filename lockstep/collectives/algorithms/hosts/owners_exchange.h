#pragma once

#include <cstddef>

#include <lockstep/collectives/algorithms/hosts/slice_exchange.h>
#include <lockstep/collectives/algorithms/ranges.h>

namespace lockstep::collectives::internal::algorithms::hosts {

/// What the algorithms have in common.
class OwnersExchange : public SliceExchange {
 public:
  OwnersExchange(transport::GroupChannel& channel, const Arithmetic& arithmetic, int slice, int root_host)
      : arithmetic_(arithmetic),
        hosts_(static_cast<int>(channel.layout().hosts.size())),
        host_(channel.layout().host()),
        root_host_(root_host),
        channel_(channel),
        slice_(slice) {}

 protected:
  size_t bytes(const Crossing& crossing) const { return crossing.count * arithmetic_.element_size(); }
  bool wants_result(int host) const { return root_host_ < 0 || host == root_host_; }
  void send(int host, Crossing& crossing, const void* data, size_t bytes) {
    if (bytes > 0) crossing.requests.push_back(channel_.send(owner_on(host), data, bytes));
  }
  void receive(int host, Crossing& crossing, void* data, size_t bytes) {
    if (bytes > 0) crossing.requests.push_back(channel_.receive(owner_on(host), data, bytes));
  }
  /// From the next one on, so that not all hosts send to the same one first.
  template <class Each>
  void for_others(Each&& each) const {
    for (int distance = 1; distance < hosts_; ++distance) each((host_ + distance) % hosts_);
  }

  // A slice of `count` elements in one part for each host, in elements.
  Range parts(size_t count, int first, int last) const {
    return slices_of(count, arithmetic_.element_size(), hosts_, first, last);
  }
  Range part(size_t count, int host) const { return parts(count, host, host + 1); }
  /// Room that each of them fits into.
  size_t largest_part(size_t count) const {
    const size_t per_line = kCacheLine / arithmetic_.element_size();
    const size_t lines = (count + per_line - 1) / per_line;
    return (lines + hosts_ - 1) / hosts_ * per_line;
  }

  const Arithmetic& arithmetic_;
  const int hosts_;
  const int host_;
  const int root_host_;  // −1: all want the result

 private:
  int owner_on(int host) const { return channel_.layout().hosts[host][slice_]; }

  transport::GroupChannel& channel_;
  const int slice_;
};

}  // namespace lockstep::collectives::internal::algorithms::hosts
