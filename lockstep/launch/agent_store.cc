#include <arpa/inet.h>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <future>
#include <memory>
#include <netinet/in.h>
#include <poll.h>
#include <string>
#include <sys/socket.h>
#include <thread>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <lockstep/base/deadline.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/agent_store.h>
#include <lockstep/rendezvous/network/no_reverse_lookups.h>
#include <lockstep/rendezvous/network/port_range.h>

namespace lockstep::launch {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr std::chrono::seconds kStartTimeout(30);
constexpr std::chrono::milliseconds kSlice(20);  // after which cancelled() is asked again

/// Where the store listens.
struct StorePlace {
  std::string host;
  sockaddr_storage address = {};
  socklen_t size = 0;

  /// `numeric`: IPv4 or IPv6.
  StorePlace(const std::string& numeric, uint16_t port) : host(numeric) {
    auto& v4 = reinterpret_cast<sockaddr_in&>(address);
    auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
    if (::inet_pton(AF_INET, numeric.c_str(), &v4.sin_addr) == 1) {
      v4.sin_family = AF_INET;
      v4.sin_port = htons(port);
      size = sizeof(v4);
    } else {
      TORCH_CHECK_VALUE(::inet_pton(AF_INET6, numeric.c_str(), &v6.sin6_addr) == 1,
                        "the store's address is '", numeric, "', which is not numeric");
      v6.sin6_family = AF_INET6;
      v6.sin6_port = htons(port);
      size = sizeof(v6);
    }
  }
  uint16_t port() const {
    return ntohs(address.ss_family == AF_INET ? reinterpret_cast<const sockaddr_in&>(address).sin_port
                                              : reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  }
};

void check_in_time(const Deadline& deadline, const StorePlace& place) {
  TORCH_CHECK_WITH(DistNetworkError, !deadline.expired(), "the store on ", place.host, ":", place.port(),
                   " did not start within ", to_seconds(kStartTimeout),
                   " s; is a firewall between this host and its own address?");
}

/// Throws where this process can't reach what listens there. The store would try again for minutes. False when
/// cancelled.
bool check_reachable(const StorePlace& place, const Deadline& deadline,
                     const std::function<bool()>& cancelled) {
  const UniqueFd probe(::socket(place.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  int error = 0;
  if (!probe || ::connect(probe.get(), reinterpret_cast<const sockaddr*>(&place.address), place.size) != 0) {
    error = errno;
  }
  while (error == EINPROGRESS) {
    if (cancelled && cancelled()) return false;
    check_in_time(deadline, place);
    pollfd connected = {.fd = probe.get(), .events = POLLOUT, .revents = 0};
    if (::poll(&connected, 1, static_cast<int>(kSlice.count())) <= 0) continue;
    socklen_t length = sizeof(error);
    if (::getsockopt(probe.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
  }
  TORCH_CHECK_WITH(
      DistNetworkError, error == 0, "can't connect to ", place.host,
      ", where the processes are to meet: ", std::strerror(error),
      error == ENETUNREACH ? "; the loopback interface is down, start it (ip link set lo up)" : "");
  return true;
}

/// Constructs the store in a thread of its own, whose wait nothing ends. Null when cancelled.
StorePtr start_store(const c10d::TCPStoreOptions& options, const StorePlace& place, const Deadline& deadline,
                     const std::function<bool()>& cancelled) {
  auto promise = std::make_shared<std::promise<StorePtr>>();
  auto result = promise->get_future();
  std::thread([promise, options, host = place.host] {
    try {
      failpoint::here("start_store");
      const NoReverseLookups guard;
      promise->set_value(c10::make_intrusive<c10d::TCPStore>(host, options));
    } catch (...) {
      promise->set_exception(std::current_exception());
    }
  }).detach();
  while (result.wait_for(kSlice) != std::future_status::ready) {
    if (cancelled && cancelled()) return {};
    check_in_time(deadline, place);
  }
  return result.get();
}

}  // namespace

AgentStore::AgentStore(uint16_t port, const std::function<bool()>& cancelled, const std::string& host) {
  StorePlace place(host, port);
  UniqueFd listener = listen_tcp(place.address, place.size);
  if (!listener) {
    const int error = errno;
    const char* remedy = error == EADDRINUSE && port == 0 ? "; no port of LOCKSTEP_PORT_RANGE is free"
                         : error == EADDRINUSE ? "; choose another --master-port, or none for a free one"
                         : error == EACCES     ? "; ports below 1024 need privileges, choose a higher one"
                                               : "";
    TORCH_CHECK_WITH(DistNetworkError, false, "can't listen on ", host, ":", port, ": ", std::strerror(error),
                     remedy);
  }
  TORCH_CHECK_WITH(
      DistNetworkError,
      ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&place.address), &place.size) == 0,
      "can't read the store's port: ", std::strerror(errno));
  port_ = place.port();
  const Deadline deadline = Deadline::after(kStartTimeout);
  if (!check_reachable(place, deadline, cancelled)) {
    port_ = 0;
    return;
  }

  c10d::TCPStoreOptions options;
  options.port = port_;
  options.isServer = true;
  options.waitWorkers = false;
  options.timeout = kStartTimeout;
  options.masterListenFd = listener.release();  // the store closes it
  store_ = start_store(options, place, deadline, cancelled);
  if (!store_) port_ = 0;
}

AgentStore::~AgentStore() = default;

}  // namespace lockstep::launch
