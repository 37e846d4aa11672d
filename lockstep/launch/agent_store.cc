#include <arpa/inet.h>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <future>
#include <memory>
#include <netinet/in.h>
#include <poll.h>
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

void check_in_time(const Deadline& deadline, uint16_t port) {
  TORCH_CHECK_WITH(DistNetworkError, !deadline.expired(), "the store on 127.0.0.1:", port,
                   " did not start within ", to_seconds(kStartTimeout),
                   " s; is a firewall between this host and its own address?");
}

/// Throws where this process can't reach what listens on 127.0.0.1. The store would try again for minutes.
/// False when cancelled.
bool check_loopback(const sockaddr_in& address, const Deadline& deadline,
                    const std::function<bool()>& cancelled) {
  const UniqueFd probe(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  int error = 0;
  if (!probe || ::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    error = errno;
  }
  while (error == EINPROGRESS) {
    if (cancelled && cancelled()) return false;
    check_in_time(deadline, ntohs(address.sin_port));
    pollfd connected = {.fd = probe.get(), .events = POLLOUT, .revents = 0};
    if (::poll(&connected, 1, static_cast<int>(kSlice.count())) <= 0) continue;
    socklen_t length = sizeof(error);
    if (::getsockopt(probe.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = errno;
  }
  TORCH_CHECK_WITH(
      DistNetworkError, error == 0,
      "can't connect to 127.0.0.1, where the processes are to meet: ", std::strerror(error),
      error == ENETUNREACH ? "; the loopback interface is down, start it (ip link set lo up)" : "");
  return true;
}

/// Constructs the store in a thread of its own, whose wait nothing ends. Null when cancelled.
StorePtr start_store(const c10d::TCPStoreOptions& options, const Deadline& deadline,
                     const std::function<bool()>& cancelled) {
  auto promise = std::make_shared<std::promise<StorePtr>>();
  auto result = promise->get_future();
  std::thread([promise, options] {
    try {
      failpoint::here("start_store");
      const NoReverseLookups guard;
      promise->set_value(c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options));
    } catch (...) {
      promise->set_exception(std::current_exception());
    }
  }).detach();
  while (result.wait_for(kSlice) != std::future_status::ready) {
    if (cancelled && cancelled()) return {};
    check_in_time(deadline, options.port);
  }
  return result.get();
}

}  // namespace

AgentStore::AgentStore(uint16_t port, const std::function<bool()>& cancelled) {
  sockaddr_storage place = {};
  auto& address = reinterpret_cast<sockaddr_in&>(place);
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  UniqueFd listener = listen_tcp(place, sizeof(address));
  if (!listener) {
    const int error = errno;
    const char* remedy = error == EADDRINUSE && port == 0 ? "; no port of LOCKSTEP_PORT_RANGE is free"
                         : error == EADDRINUSE ? "; choose another --master-port, or none for a free one"
                         : error == EACCES     ? "; ports below 1024 need privileges, choose a higher one"
                                               : "";
    TORCH_CHECK_WITH(DistNetworkError, false, "can't listen on 127.0.0.1:", port, ": ", std::strerror(error),
                     remedy);
  }
  socklen_t length = sizeof(address);
  TORCH_CHECK_WITH(DistNetworkError,
                   ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0,
                   "can't read the store's port: ", std::strerror(errno));
  port_ = ntohs(address.sin_port);
  const Deadline deadline = Deadline::after(kStartTimeout);
  if (!check_loopback(address, deadline, cancelled)) return;

  c10d::TCPStoreOptions options;
  options.port = port_;
  options.isServer = true;
  options.waitWorkers = false;
  options.timeout = kStartTimeout;
  options.masterListenFd = listener.release();  // the store closes it
  store_ = start_store(options, deadline, cancelled);
}

AgentStore::~AgentStore() = default;

}  // namespace lockstep::launch
