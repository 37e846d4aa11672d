#include <algorithm>
#include <arpa/inet.h>
#include <cstring>
#include <memory>
#include <netdb.h>

#include <lockstep/base/unique_fd.h>
#include <lockstep/rendezvous/internal/resolve.h>

namespace lockstep::rendezvous_internal {
namespace {

void make_specified(SocketAddress& address) {
  if (address.is_v4()) {
    auto& v4 = reinterpret_cast<sockaddr_in&>(address.storage);
    if (v4.sin_addr.s_addr == htonl(INADDR_ANY)) v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  } else {
    auto& v6 = reinterpret_cast<sockaddr_in6&>(address.storage);
    if (IN6_IS_ADDR_UNSPECIFIED(&v6.sin6_addr)) v6.sin6_addr = in6addr_loopback;
  }
}

int order_of(const SocketAddress& address) {
  if (address.is_v4()) return address.is_loopback() ? 0 : 1;
  return 2;
}

}  // namespace

std::vector<SocketAddress> resolve(const std::string& host, uint16_t port, std::string& why) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) {
    why = "the name '" + host + "' cannot be resolved: " + ::gai_strerror(error);
    return {};
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  std::vector<SocketAddress> addresses;
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    SocketAddress address;
    std::memcpy(&address.storage, info->ai_addr, info->ai_addrlen);
    address.size = info->ai_addrlen;
    make_specified(address);
    addresses.push_back(address);
  }
  std::stable_sort(addresses.begin(), addresses.end(),
                   [](const auto& a, const auto& b) { return order_of(a) < order_of(b); });
  return addresses;
}

bool is_numeric_or_localhost(const std::string& host) {
  if (host == "localhost") return true;
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return false;
  ::freeaddrinfo(found);
  return true;
}

std::string source_address_for(const SocketAddress& address) {
  // connect() of a datagram socket asks for the route and sends nothing.
  const UniqueFd socket(::socket(address.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket || ::connect(socket.get(), address.raw(), address.size) != 0) return "";
  SocketAddress own;
  own.size = sizeof(own.storage);
  if (::getsockname(socket.get(), own.raw(), &own.size) != 0) return "";
  return own.text();
}

}  // namespace lockstep::rendezvous_internal
