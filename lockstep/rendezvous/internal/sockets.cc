#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <optional>
#include <poll.h>
#include <sys/socket.h>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <lockstep/base/log.h>
#include <lockstep/rendezvous/internal/resolve.h>
#include <lockstep/rendezvous/internal/sockets.h>
#include <lockstep/rendezvous/network/network_interface.h>
#include <lockstep/rendezvous/network/port_range.h>
#include <lockstep/rendezvous/network/socket_address.h>

namespace lockstep::rendezvous_internal {
namespace {

[[noreturn]] void cannot_listen(const std::string& where, uint16_t port, int error) {
  if (error == EADDRINUSE && port == 0) {
    const auto range = port_range();
    C10_THROW_ERROR(DistNetworkError,
                    c10::str("rank 0 cannot listen on ", where, ": no port of LOCKSTEP_PORT_RANGE (",
                             range ? range->to_string() : "unset", ") is free; give a wider range"));
  }
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

/// None, and errno, on failure.
std::optional<ListeningSocket> try_listen(const SocketAddress& address) {
  auto socket = listen_tcp(address.storage, address.size);
  if (!socket) return std::nullopt;
  SocketAddress bound;
  bound.size = sizeof(bound.storage);
  ::getsockname(socket.get(), bound.raw(), &bound.size);
  return ListeningSocket{.socket = std::move(socket), .address = bound.text(), .port = bound.port()};
}

bool is_unspecified(const std::string& host) {
  return host == "0.0.0.0" || host == "::";
}

/// Whether this host has the name for itself alone, as Debian's 127.0.1.1: others resolve it differently.
bool is_loopback_here_only(const SocketAddress& address, const std::string& host) {
  return address.is_loopback() && !is_numeric_or_localhost(host);
}

/// A connection of a socket to itself, which the kernel makes when the port lies in the ephemeral range and
/// is free.
bool connected_to_itself(int socket) {
  SocketAddress here, there;
  here.size = there.size = sizeof(sockaddr_storage);
  if (::getsockname(socket, here.raw(), &here.size) != 0) return false;
  if (::getpeername(socket, there.raw(), &there.size) != 0) return false;
  return here.port() == there.port() && here.text() == there.text();
}

/// Asks what TCPStore's constructor asks first, and reads the answer by the deadline. The questions are not in torch's
/// public headers (torch/csrc/distributed/c10d/TCPStore.cpp: validate(), ping()).
bool answers_as_store(int socket, Deadline deadline) {
  constexpr uint32_t kValidation = 0x3C85F7CE;
  constexpr uint32_t kNonce = 0x4c4b5354;
  std::array<unsigned char, 10> questions{};
  questions[0] = 0;  // VALIDATE
  std::memcpy(&questions[1], &kValidation, sizeof kValidation);
  questions[5] = 13;  // PING
  std::memcpy(&questions[6], &kNonce, sizeof kNonce);
  if (::send(socket, questions.data(), questions.size(), MSG_NOSIGNAL) != std::ssize(questions)) return false;
  std::array<unsigned char, sizeof kNonce> answer{};
  size_t read = 0;
  while (read < answer.size()) {
    pollfd wait{.fd = socket, .events = POLLIN, .revents = 0};
    const int ready = ::poll(&wait, 1, deadline.poll_milliseconds());
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return false;
    const ssize_t bytes = ::recv(socket, answer.data() + read, answer.size() - read, MSG_DONTWAIT);
    if (bytes < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (bytes <= 0) return false;
    read += static_cast<size_t>(bytes);
  }
  return std::memcmp(answer.data(), &kNonce, sizeof kNonce) == 0;
}

bool try_connect(const SocketAddress& address, Deadline deadline, std::string& why) {
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
  if (error == 0) {
    // 200 ms at least, also where the connection came just before the deadline.
    const auto patience = std::clamp<std::chrono::nanoseconds>(
        deadline.remaining(), std::chrono::milliseconds(200), std::chrono::seconds(3));
    if (answers_as_store(socket.get(), Deadline::after(patience))) return true;
    why = kNoStore;
    return false;
  }
  why = error == ECONNREFUSED ? "nothing listens there (connection refused)"
        : error == ETIMEDOUT  ? "no answer from that host"
                              : std::strerror(error);
  return false;
}

}  // namespace

ListeningSocket listen_at(const std::string& host, uint16_t port, bool peers_are_local) {
  std::string why;
  const auto addresses = resolve(host, port, why);
  if (is_unspecified(host) && !peers_are_local) {
    LOCKSTEP_LOG(kWarning) << "rank 0 listens on loopback only, for the meeting point is " << host
                           << "; ranks on other hosts need this host's name or address (MASTER_ADDR)";
  }
  for (const auto& address : addresses) {
    if (!peers_are_local && is_loopback_here_only(address, host)) continue;
    if (auto listener = try_listen(address)) return std::move(*listener);
    // Not an address of this machine, or of a family that it lacks: try the next one.
    if (errno != EADDRNOTAVAIL && errno != EAFNOSUPPORT) cannot_listen(address.text(), port, errno);
  }
  const auto interface = interface_between_hosts(host);
  if (addresses.empty()) {
    LOCKSTEP_LOG(kWarning) << "rank 0 listens on " << interface.address << " (" << interface.name
                           << "): " << why
                           << "; see MASTER_ADDR, or the tcp:// address, which the other ranks use";
  }
  const auto own = resolve(interface.address, port, why);
  if (own.empty()) C10_THROW_ERROR(DistNetworkError, "rank 0 cannot listen on " + interface.address);
  if (auto listener = try_listen(own.front())) return std::move(*listener);
  cannot_listen(interface.address, port, errno);
}

std::string probe(const std::string& host, uint16_t port, Deadline deadline, std::string& why) {
  auto addresses = resolve(host, port, why);
  const bool only_here =
      !addresses.empty() && std::all_of(addresses.begin(), addresses.end(), [&](const auto& address) {
        return is_loopback_here_only(address, host);
      });
  if (only_here) {  // then rank 0 is here, too, and listens where other hosts reach it, unless it knows better
    std::string unused;
    for (const auto& address : resolve(interface_between_hosts(host).address, port, unused)) {
      addresses.push_back(address);
    }
  }
  for (const auto& address : addresses) {
    if (try_connect(address, deadline, why)) return address.text();
    if (address.is_loopback()) why += "; " + address.text() + " is this host itself";
  }
  return "";
}

}  // namespace lockstep::rendezvous_internal
