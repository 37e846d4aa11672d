#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <lockstep/rendezvous/network/socket_address.h>

namespace lockstep::rendezvous_internal {

/// All addresses of a name, or of a numeric address: first 127.x ("localhost" has two, and a store listens at
/// one), then IPv4's (a host may lack IPv6), then IPv6's. An unspecified address (0.0.0.0, ::) is loopback,
/// as for connect(2). Empty with `why`.
std::vector<SocketAddress> resolve(const std::string& host, uint16_t port, std::string& why);

/// Names that mean the same on every host: numeric addresses, and localhost.
bool is_numeric_or_localhost(const std::string& host);

/// This host's address from which it would send to `address`; empty where there is no route. Sends nothing.
std::string source_address_for(const SocketAddress& address);

}  // namespace lockstep::rendezvous_internal
