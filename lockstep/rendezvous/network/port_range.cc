#include <cerrno>
#include <chrono>
#include <cstddef>
#include <netinet/in.h>
#include <thread>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <lockstep/base/deadline.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/process/interrupt.h>
#include <lockstep/base/text/parse_number.h>
#include <lockstep/rendezvous/internal/resolve.h>
#include <lockstep/rendezvous/network/port_range.h>

namespace lockstep {
namespace {

uint16_t& port_of(sockaddr_storage& address) {
  return address.ss_family == AF_INET ? reinterpret_cast<sockaddr_in&>(address).sin_port
                                      : reinterpret_cast<sockaddr_in6&>(address).sin6_port;
}

UniqueFd listen_at_port(sockaddr_storage address, socklen_t size, uint16_t port) {
  port_of(address) = htons(port);
  UniqueFd socket(::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) return {};
  const int on = 1;
  // A job that just ended leaves connections in TIME_WAIT; they must not keep the next one from the port.
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (address.ss_family == AF_INET6) {
    ::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
  }
  // listen() too: two sockets with SO_REUSEADDR may both bind one port, but only one may listen on it.
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), size) == 0 &&
      ::listen(socket.get(), SOMAXCONN) == 0) {
    return socket;
  }
  const int error = errno;
  socket.reset();
  errno = error;
  return {};
}

}  // namespace

PortRange PortRange::parse(const std::string& text) {
  const size_t dash = text.find('-');
  const auto first = parse_number<uint16_t>(text.substr(0, dash));
  const auto last = dash == std::string::npos ? first : parse_number<uint16_t>(text.substr(dash + 1));
  TORCH_CHECK_VALUE(first && last && *first >= 1 && *first <= *last,
                    "environment variable LOCKSTEP_PORT_RANGE is '", text,
                    "'; write FIRST-LAST, two numbers from 1 to 65535, as in 20000-20100");
  return {.first = *first, .last = *last};
}

std::optional<PortRange> port_range() {
  const auto text = environment::text("LOCKSTEP_PORT_RANGE");
  return text ? std::optional(PortRange::parse(*text)) : std::nullopt;
}

PortTurn::PortTurn(const std::string& address) {
  const auto range = port_range();
  if (!range) return;
  const SocketAddress name = abstract_address("lockstep-port-turn");  // which goes with the process
  turn_.reset(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto patience = Deadline::after(std::chrono::seconds(10));
  while (turn_ && ::bind(turn_.get(), name.raw(), name.size) != 0 && errno == EADDRINUSE &&
         !patience.expired()) {
    check_interrupts();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::string ignored;
  for (const auto& place : rendezvous_internal::resolve(address, 0, ignored)) {
    if (listen_tcp(place.storage, place.size) || errno != EADDRINUSE) continue;
    C10_THROW_ERROR(DistNetworkError,
                    c10::str("no port of LOCKSTEP_PORT_RANGE (", range->to_string(), ") is free at ", address,
                             "; give a wider range: a port for each rank of a host, one for the store, and "
                             "those of other jobs"));
  }
}

UniqueFd listen_tcp(const sockaddr_storage& address, socklen_t size) {
  auto wanted = address;
  const uint16_t port = ntohs(port_of(wanted));
  const auto range = port == 0 ? port_range() : std::nullopt;
  if (!range) return listen_at_port(address, size, port);
  for (int candidate = range->first; candidate <= range->last; ++candidate) {
    if (auto socket = listen_at_port(address, size, static_cast<uint16_t>(candidate))) return socket;
    if (errno != EADDRINUSE) return {};
  }
  return {};
}

}  // namespace lockstep
