#include <cstddef>
#include <cstring>
#include <netdb.h>
#include <sys/un.h>

#include <c10/util/Exception.h>

#include <lockstep/rendezvous/network/socket_address.h>

namespace lockstep {
namespace {

const sockaddr_in& v4_of(const SocketAddress& address) {
  return reinterpret_cast<const sockaddr_in&>(address.storage);
}
const sockaddr_in6& v6_of(const SocketAddress& address) {
  return reinterpret_cast<const sockaddr_in6&>(address.storage);
}

}  // namespace

bool SocketAddress::is_loopback() const {
  return is_v4() ? ntohl(v4_of(*this).sin_addr.s_addr) >> 24 == 127
                 : IN6_IS_ADDR_LOOPBACK(&v6_of(*this).sin6_addr) != 0;
}

bool SocketAddress::is_link_local() const {
  return !is_v4() && IN6_IS_ADDR_LINKLOCAL(&v6_of(*this).sin6_addr) != 0;
}

uint16_t SocketAddress::port() const {
  return ntohs(is_v4() ? v4_of(*this).sin_port : v6_of(*this).sin6_port);
}

std::string SocketAddress::text() const {
  char host[NI_MAXHOST] = "?";
  ::getnameinfo(raw(), size, host, sizeof(host), nullptr, 0, NI_NUMERICHOST);
  return host;
}

SocketAddress abstract_address(const std::string& name) {
  SocketAddress address;
  auto& local = reinterpret_cast<sockaddr_un&>(address.storage);
  local.sun_family = AF_UNIX;
  TORCH_INTERNAL_ASSERT(name.size() + 1 < sizeof(local.sun_path));
  std::memcpy(local.sun_path + 1, name.data(), name.size());
  address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

}  // namespace lockstep
