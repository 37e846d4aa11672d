#include <algorithm>
#include <thread>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <lockstep/base/log.h>
#include <lockstep/base/process/interrupt.h>
#include <lockstep/rendezvous/internal/call_by.h>
#include <lockstep/rendezvous/internal/tcp_store.h>
#include <lockstep/rendezvous/network/no_reverse_lookups.h>

namespace lockstep::rendezvous_internal {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// Where something else than a store has accepted the connection, TCPStore's constructor waits for its answer
/// for ever. Returns null when the deadline passed.
StorePtr construct(const std::string& address, const c10d::TCPStoreOptions& options, Deadline deadline) {
  // The constructor's own connection deserves a moment even when the probe came at the last one.
  deadline = Deadline::after(std::max<std::chrono::nanoseconds>(deadline.remaining(), milliseconds(200)));
  return call_by(deadline,
                 [=]() -> StorePtr {
                   const NoReverseLookups guard;
                   return c10::make_intrusive<c10d::TCPStore>(address, options);
                 })
      .value_or(nullptr);
}

c10d::TCPStoreOptions store_options(uint16_t port, milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.waitWorkers = false;  // store_all_gather() does that, and names the ranks that are missing
  options.timeout =
      std::max<milliseconds>(timeout, seconds(1));  // TCPStore counts its connection's in whole seconds
  return options;
}

}  // namespace

StorePtr host_store(ListeningSocket listener, milliseconds timeout, Deadline deadline,
                    const ServerOptions& server) {
  auto options = store_options(listener.port, timeout);
  options.isServer = true;
  options.multiTenant = server.is_shared;
  options.masterListenFd = listener.socket.release();  // the server closes it
  options.useLibUV = server.use_libuv;
  auto store = construct(listener.address, options, deadline);
  if (!store) {
    C10_THROW_ERROR(
        DistNetworkError,
        c10::str("rank 0 could not connect to its own store at ", listener.address, " port ", listener.port,
                 " in time; is a firewall between this host and its own address?"));
  }
  store->setTimeout(timeout);
  LOCKSTEP_LOG(kInfo) << "store listens on " << listener.address << " port " << listener.port;
  return store;
}

StorePtr share_own_store(const std::string& host, uint16_t port, milliseconds timeout, Deadline deadline) {
  std::string why;
  const std::string address = port == 0 ? "" : probe(host, port, deadline, why);
  if (address.empty()) return nullptr;
  auto options = store_options(port, timeout);
  options.isServer = true;
  options.multiTenant = true;
  try {
    auto store = construct(address, options, deadline);
    if (store) store->setTimeout(timeout);
    return store;
  } catch (const c10::Error&) {  // the port is another process's
    return nullptr;
  }
}

StorePtr join_store(const std::function<std::optional<HostPort>()>& where, const std::string& unknown,
                    const std::string& who, int rank, milliseconds timeout, Deadline deadline) {
  const auto begin = Deadline::Clock::now();
  auto waited = [&] {
    return to_seconds(std::chrono::duration_cast<milliseconds>(Deadline::Clock::now() - begin));
  };
  auto pause = milliseconds(5);
  auto next_warning = Deadline::after(seconds(3));  // processes start that far apart
  while (true) {
    std::string why = unknown;
    std::string place = "its address";
    if (auto at = where()) {
      place = c10::str(at->host, " port ", at->port);
      auto address = probe(at->host, at->port, deadline, why);
      if (!address.empty()) {
        StorePtr store;
        try {
          store = construct(address, store_options(at->port, timeout), deadline);
        } catch (const c10::Error& error) {
          LOCKSTEP_LOG(kDebug) << "no store at " << place << ": " << error.what_without_backtrace();
        }
        if (store) {
          store->setTimeout(timeout);
          return store;
        }
        why = kNoStore;
      }
    }
    if (deadline.expired()) {
      C10_THROW_ERROR(DistNetworkError,
                      c10::str("rank ", rank, " could not reach ", who, " at ", place, " within ", waited(),
                               " s: ", why, ". See whether ", who,
                               " runs, whether all processes were given its host and port, and whether ",
                               "firewalls between the hosts let the port through"));
    }
    if (next_warning.expired()) {
      LOCKSTEP_LOG(kWarning) << "still trying to reach " << who << " at " << place << " after " << waited()
                             << " s: " << why;
      next_warning = Deadline::after(seconds(60));
    }
    check_interrupts();
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(pause, deadline.remaining()));
    pause = std::min<milliseconds>(pause * 2, kInterruptInterval);
  }
}

}  // namespace lockstep::rendezvous_internal
