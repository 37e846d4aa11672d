#pragma once

#include <cstdint>
#include <string>
#include <sys/socket.h>
#include <vector>

#include <lockstep/base/unique_fd.h>

namespace lockstep::launch {

/// Where a coordinator may be: an IPv4 or IPv6 address and a port. Or a local socket's abstract name.
struct PeerAddress {
  sockaddr_storage storage = {};
  socklen_t size = 0;

  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

/// Its numeric text, without the port; empty where there is none.
std::string text_of_address(const PeerAddress& address);

/// Its port.
uint16_t port_of_address(const PeerAddress& address);

/// The addresses of a name, or a numeric one; IPv4's first. Empty, and why, where there are none.
std::vector<PeerAddress> addresses_of(const std::string& host, uint16_t port, std::string& why);

/// Of a local socket whose name begins with a zero byte and needs no file: `name` behind it, at most 100 bytes.
PeerAddress abstract_address(const std::string& name);

/// Begins a connection that does not block. None, and errno, where it failed at once.
UniqueFd begin_connect(const PeerAddress& address);

/// The next connection of a listening socket, which does not block then; none, and errno.
UniqueFd accept_one(int listener);

/// Whether that errno of accept_one() says that this process or the host has no descriptor or memory left. The connection
/// stays in the queue then, and epoll tells of it again and again.
bool means_no_room(int error);

/// Listens on 127.0.0.1 at a free port, or one of LOCKSTEP_PORT_RANGE, and does not block. Throws
/// c10::DistNetworkError.
UniqueFd listen_on_loopback(uint16_t& port);

/// The numeric address from which a connected socket sends; empty when it is not connected.
std::string local_address_of(int socket);

}  // namespace lockstep::launch
