#pragma once

#include <cstdint>
#include <netinet/in.h>
#include <string>
#include <sys/socket.h>

namespace lockstep {

/// An IPv4 or IPv6 address with port; or a local socket's name, of which only raw() and size say anything.
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

/// Of a local socket whose name begins with a zero byte and needs no file: `name` follows it, at most 106 bytes. Thread-safe.
SocketAddress abstract_address(const std::string& name);

}  // namespace lockstep
