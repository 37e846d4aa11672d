#pragma once

#include <functional>
#include <memory>
#include <utility>

#include <lockstep/testing/thread_ranks.h>
#include <lockstep/transport/host/groups/host_channel.h>

namespace lockstep::transport {

/// testing::run_rank_threads() for ranks of one host, with their host's channels, which the bodies alone hold.
inline void run_host_ranks(int ranks, const std::function<void(std::shared_ptr<HostChannel>)>& body,
                           const HostTransport::Options& options = {}) {
  testing::run_rank_threads(
      ranks,
      [&](std::shared_ptr<GroupChannel> group) {
        auto channel = group->shared_host();
        group.reset();
        body(std::move(channel));
      },
      options);
}

}  // namespace lockstep::transport
