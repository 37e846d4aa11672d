#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <lockstep/base/deadline.h>
#include <lockstep/rendezvous/internal/sockets.h>

namespace lockstep::rendezvous_internal {

struct ServerOptions {
  bool use_libuv = true;   ///< which of torch's servers
  bool is_shared = false;  ///< share_own_store() finds it
};

/// Starts the store's server on a socket that already listens, and connects this process to it. The server
/// lives as long as the store, and those that share it. `timeout` becomes the store's own.
c10::intrusive_ptr<c10d::Store> host_store(ListeningSocket listener, std::chrono::milliseconds timeout,
                                           Deadline deadline, const ServerOptions& server = {});

/// A further store on the shared server that this process has at the port; null if it has none there.
c10::intrusive_ptr<c10d::Store> share_own_store(const std::string& host, uint16_t port,
                                                std::chrono::milliseconds timeout, Deadline deadline);

struct HostPort {
  std::string host = {};
  uint16_t port = 0;
};

/// Connects to a store, trying again with growing pauses until the deadline, with a warning now and then.
/// `where` is asked anew at each attempt; nothing means that it is not known yet, which `unknown` puts into
/// words. `who` ("rank 0", "the agent of torchrun") and `rank`, the caller's, are for messages. Throws
/// c10::DistNetworkError that says which process did not listen where.
c10::intrusive_ptr<c10d::Store> join_store(const std::function<std::optional<HostPort>()>& where,
                                           const std::string& unknown, const std::string& who, int rank,
                                           std::chrono::milliseconds timeout, Deadline deadline);

}  // namespace lockstep::rendezvous_internal
