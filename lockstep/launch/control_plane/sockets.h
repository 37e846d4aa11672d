#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <lockstep/base/unique_fd.h>
#include <lockstep/rendezvous/network/socket_address.h>

namespace lockstep::launch {

/// The addresses of a name, or a numeric one; IPv4's first. Empty, and why, where there are none.
std::vector<SocketAddress> addresses_of(const std::string& host, uint16_t port, std::string& why);

/// Begins a connection that does not block. None, and errno, where it failed at once.
UniqueFd begin_connect(const SocketAddress& address);

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
/// The same of the other end.
std::string peer_address_of(int socket);

}  // namespace lockstep::launch
