#pragma once

#include <cstdint>
#include <netinet/in.h>
#include <string>
#include <sys/socket.h>
#include <vector>

namespace lockstep::rendezvous_internal {

/// An IPv4 or IPv6 address with port.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  sockaddr* raw() { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage); }
  bool is_v4() const { return storage.ss_family == AF_INET; }
  bool is_loopback() const;
  bool is_link_local() const;  ///< of IPv6
  uint16_t port() const;
  std::string text() const;  ///< numeric, without the port
};

/// All addresses of a name, or of a numeric address: first 127.x ("localhost" has two, and a store listens at
/// one), then IPv4's (a host may lack IPv6), then IPv6's. An unspecified address (0.0.0.0, ::) is loopback,
/// as for connect(2). Empty with `why`.
std::vector<SocketAddress> resolve(const std::string& host, uint16_t port, std::string& why);

/// Names that mean the same on every host: numeric addresses, and localhost.
bool is_numeric_or_localhost(const std::string& host);

/// This host's address from which it would send to `address`; empty where there is no route. Sends nothing.
std::string source_address_for(const SocketAddress& address);

}  // namespace lockstep::rendezvous_internal
