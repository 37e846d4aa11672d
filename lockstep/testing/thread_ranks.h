#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <lockstep/transport/group_channel.h>

namespace lockstep::testing {

/// Runs body(channel) on `ranks` threads of this process, each with one rank's channel of a group of them
/// all, so that ThreadSanitizer sees both sides of each exchange. Returns when all have; the channels'
/// transports outlive the threads.
void run_rank_threads(int ranks,
                      const std::function<void(std::shared_ptr<transport::GroupChannel> channel)>& body,
                      const transport::HostTransport::Options& options = {});

/// The same over pretended hosts, "host-0", "host-1" and so on: `host_of` has a number for each rank.
void run_rank_threads(const std::vector<int>& host_of,
                      const std::function<void(std::shared_ptr<transport::GroupChannel> channel)>& body,
                      transport::HostTransport::Options options = {});

}  // namespace lockstep::testing
