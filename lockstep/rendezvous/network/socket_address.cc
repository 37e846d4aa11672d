#include <netdb.h>

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

}  // namespace lockstep
