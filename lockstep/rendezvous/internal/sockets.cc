#include <algorithm>
#include <arpa/inet.h>
#include <cerrno>
#include <cstring>
#include <memory>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <vector>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <lockstep/base/log.h>
#include <lockstep/rendezvous/internal/sockets.h>

namespace lockstep::rendezvous_internal {
namespace {

/// An IPv4 or IPv6 address with port.
struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;

  sockaddr* raw() { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage); }
  const sockaddr_in& v4() const { return reinterpret_cast<const sockaddr_in&>(storage); }
  const sockaddr_in6& v6() const { return reinterpret_cast<const sockaddr_in6&>(storage); }
  bool is_v4() const { return storage.ss_family == AF_INET; }

  bool is_loopback() const {
    return is_v4() ? ntohl(v4().sin_addr.s_addr) >> 24 == 127 : IN6_IS_ADDR_LOOPBACK(&v6().sin6_addr) != 0;
  }
  uint16_t port() const { return ntohs(is_v4() ? v4().sin_port : v6().sin6_port); }
  std::string text() const {
    char host[NI_MAXHOST] = "?";
    ::getnameinfo(raw(), size, host, sizeof(host), nullptr, 0, NI_NUMERICHOST);
    return host;
  }
};

Address any_interface(int family, uint16_t port) {
  Address address;
  address.storage.ss_family = static_cast<sa_family_t>(family);
  if (family == AF_INET) {
    reinterpret_cast<sockaddr_in&>(address.storage).sin_port = htons(port);
    address.size = sizeof(sockaddr_in);
  } else {
    reinterpret_cast<sockaddr_in6&>(address.storage).sin6_port = htons(port);
    address.size = sizeof(sockaddr_in6);
  }
  return address;
}

/// All addresses of a name, 127.x first: "localhost" has two, and the store listens at one. Empty with `why`.
std::vector<Address> resolve(const std::string& host, uint16_t port, std::string& why) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) {
    why = "the name '" + host + "' cannot be resolved: " + ::gai_strerror(error);
    return {};
  }
  std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  std::vector<Address> addresses;
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    Address address;
    std::memcpy(&address.storage, info->ai_addr, info->ai_addrlen);
    address.size = info->ai_addrlen;
    addresses.push_back(address);
  }
  std::stable_partition(addresses.begin(), addresses.end(),
                        [](const Address& address) { return address.is_v4() && address.is_loopback(); });
  return addresses;
}

bool is_numeric_or_localhost(const std::string& host) {
  in_addr v4{};
  in6_addr v6{};
  return host == "localhost" || ::inet_pton(AF_INET, host.c_str(), &v4) == 1 ||
         ::inet_pton(AF_INET6, host.c_str(), &v6) == 1;
}

/// Binds and listens; on failure errno is left as the call that failed set it.
UniqueFd try_listen(const Address& address, bool only_v6) {
  UniqueFd socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) return {};
  int on = 1;
  // A job that just ended leaves connections in TIME_WAIT; they must not keep the next one from the port.
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  int v6only = only_v6 ? 1 : 0;
  if (!address.is_v4()) ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &v6only, sizeof(v6only));
  if (::bind(socket.get(), address.raw(), address.size) == 0 && ::listen(socket.get(), SOMAXCONN) == 0)
    return socket;
  int error = errno;
  socket.reset();
  errno = error;
  return {};
}

[[noreturn]] void cannot_listen(const std::string& where, uint16_t port, int error) {
  if (error == EADDRINUSE) {
    C10_THROW_ERROR(
        DistNetworkError,
        c10::str("rank 0 cannot listen on ", where, ": port ", port, " is in use by another process, ",
                 "perhaps by another job or one that has not quite ended; choose another port for all ",
                 "processes (MASTER_PORT, --master-port, or tcp://HOST:PORT)"));
  }
  C10_THROW_ERROR(DistNetworkError,
                  c10::str("rank 0 cannot listen on ", where, " port ", port, ": ", std::strerror(error),
                           error == EACCES ? "; ports below 1024 are for root, choose a higher one" : ""));
}

Listener finish(UniqueFd socket, const std::string& address) {
  Address bound;
  bound.size = sizeof(bound.storage);
  ::getsockname(socket.get(), bound.raw(), &bound.size);
  return Listener{
      .socket = std::move(socket), .address = address, .port = bound.port(), .name_is_loopback = false};
}

/// A connection of a socket to itself, which the kernel makes when the port lies in the ephemeral range and
/// is free.
bool connected_to_itself(int socket) {
  Address here, there;
  here.size = there.size = sizeof(sockaddr_storage);
  if (::getsockname(socket, here.raw(), &here.size) != 0) return false;
  if (::getpeername(socket, there.raw(), &there.size) != 0) return false;
  return here.port() == there.port() && here.text() == there.text();
}

bool try_connect(const Address& address, Deadline deadline, std::string& why) {
  UniqueFd socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  int error = 0;
  if (!socket) {
    error = errno;
  } else if (::connect(socket.get(), address.raw(), address.size) != 0) {
    error = errno;
    if (error == EINPROGRESS) {
      pollfd wait{.fd = socket.get(), .events = POLLOUT, .revents = 0};
      socklen_t size = sizeof(error);
      int ready = ::poll(&wait, 1, std::max(1, deadline.poll_milliseconds(std::chrono::seconds(3))));
      if (ready == 1) {
        ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
      } else {
        error = ETIMEDOUT;
      }
    }
  }
  if (error == 0 && connected_to_itself(socket.get())) error = ECONNREFUSED;
  if (error == 0) return true;
  why = error == ECONNREFUSED ? "nothing listens there (connection refused)"
        : error == ETIMEDOUT  ? "no answer from that host"
                              : std::strerror(error);
  return false;
}

}  // namespace

Listener listen_at(const std::string& host, uint16_t port, bool peers_are_local) {
  std::string why;
  auto addresses = resolve(host, port, why);
  if (addresses.empty()) {
    LOCKSTEP_LOG(kWarning) << "rank 0 listens on all interfaces: " << why
                           << "; see MASTER_ADDR, or the tcp:// address, which the other ranks use";
  }
  for (const auto& address : addresses) {
    if (address.is_loopback() && !peers_are_local && !is_numeric_or_localhost(host)) continue;
    if (auto socket = try_listen(address, /*only_v6=*/true)) {
      auto listener = finish(std::move(socket), address.text());
      listener.name_is_loopback = address.is_loopback() && !is_numeric_or_localhost(host);
      return listener;
    }
    // Not an address of this machine, or of a family that it lacks: try the next one.
    if (errno != EADDRNOTAVAIL && errno != EAFNOSUPPORT) cannot_listen(address.text(), port, errno);
  }
  if (auto socket = try_listen(any_interface(AF_INET6, port), /*only_v6=*/false)) {
    return finish(std::move(socket), "127.0.0.1");
  }
  if (errno == EADDRINUSE) cannot_listen("all interfaces", port, errno);
  if (auto socket = try_listen(any_interface(AF_INET, port), false))
    return finish(std::move(socket), "127.0.0.1");
  cannot_listen("all interfaces", port, errno);
}

std::string probe(const std::string& host, uint16_t port, Deadline deadline, std::string& why) {
  for (const auto& address : resolve(host, port, why)) {
    if (try_connect(address, deadline, why)) return address.text();
  }
  return "";
}

}  // namespace lockstep::rendezvous_internal
