#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/deadline.h>
#include <lockstep/base/environment.h>
#include <lockstep/rendezvous/internal/file_store.h>
#include <lockstep/rendezvous/internal/sockets.h>
#include <lockstep/rendezvous/internal/tcp_store.h>
#include <lockstep/rendezvous/torch_store.h>

namespace lockstep::torch_store {
namespace {

using rendezvous_internal::HostPort;

std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(24 * 365));  // far from overflow
}

}  // namespace

StorePtr serve_tcp(const std::string& host, uint16_t port, int world_size, bool use_libuv,
                   std::chrono::milliseconds timeout) {
  timeout = bounded(timeout);
  const Deadline deadline = Deadline::after(timeout);
  const bool peers_are_local = environment::text("LOCAL_WORLD_SIZE") == std::to_string(world_size);
  try {
    auto listener = rendezvous_internal::listen_at(host, port, peers_are_local);
    return rendezvous_internal::host_store(std::move(listener), timeout, deadline,
                                           {.use_libuv = use_libuv, .is_shared = true});
  } catch (const c10::DistNetworkError&) {
    if (auto shared = rendezvous_internal::share_own_store(host, port, timeout, deadline)) return shared;
    throw;
  }
}

StorePtr join_tcp(const std::string& host, uint16_t port, const std::string& who, int rank,
                  std::chrono::milliseconds timeout) {
  timeout = bounded(timeout);
  const auto where = [&] { return HostPort{.host = host, .port = port}; };
  return rendezvous_internal::join_store(where, "", who, rank, timeout, Deadline::after(timeout));
}

StorePtr open_file(const std::string& path, int world_size, std::chrono::milliseconds timeout) {
  timeout = bounded(timeout);
  rendezvous_internal::check_store_file(path);
  return rendezvous_internal::open_file_store(path, world_size, timeout, Deadline::after(timeout));
}

}  // namespace lockstep::torch_store
