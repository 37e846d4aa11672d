#include <arpa/inet.h>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#include <c10/util/Exception.h>

#include <lockstep/launch/control_plane/sockets.h>
#include <lockstep/rendezvous/network/port_range.h>

namespace lockstep::launch {
namespace {

/// Small messages leave at once.
void set_no_delay(int socket) {
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

std::string address_by(int (*name)(int, sockaddr*, socklen_t*), int socket) {
  SocketAddress address;
  address.size = sizeof(address.storage);
  return name(socket, address.raw(), &address.size) == 0 ? address.text() : "";
}

}  // namespace

std::vector<SocketAddress> addresses_of(const std::string& host, uint16_t port, std::string& why) {
  addrinfo wish = {};
  wish.ai_socktype = SOCK_STREAM;
  addrinfo* first = nullptr;
  const int result = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &wish, &first);
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> all(first, ::freeaddrinfo);
  if (result != 0) {
    why = "the name '" + host +
          "' has no address: " + (result == EAI_SYSTEM ? std::strerror(errno) : ::gai_strerror(result));
    return {};
  }
  std::vector<SocketAddress> addresses;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const addrinfo* entry = first; entry != nullptr; entry = entry->ai_next) {
      if (entry->ai_family != family) continue;
      SocketAddress address;
      std::memcpy(&address.storage, entry->ai_addr, entry->ai_addrlen);
      address.size = entry->ai_addrlen;
      addresses.push_back(address);
    }
  }
  if (addresses.empty()) why = "the name '" + host + "' has no IPv4 or IPv6 address";
  return addresses;
}

UniqueFd begin_connect(const SocketAddress& address) {
  UniqueFd socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return {};
  set_no_delay(socket.get());
  if (::connect(socket.get(), address.raw(), address.size) == 0 || errno == EINPROGRESS) return socket;
  const int error = errno;
  socket.reset();
  errno = error;
  return {};
}

UniqueFd accept_one(int listener) {
  UniqueFd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (socket) set_no_delay(socket.get());
  return socket;
}

bool means_no_room(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

UniqueFd listen_on_loopback(uint16_t& port) {
  sockaddr_storage place = {};
  auto& address = reinterpret_cast<sockaddr_in&>(place);
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  UniqueFd listener = listen_tcp(place, sizeof(address));
  socklen_t size = sizeof(address);
  TORCH_CHECK_WITH(DistNetworkError,
                   listener &&
                       ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0 &&
                       ::fcntl(listener.get(), F_SETFL, O_NONBLOCK) == 0,
                   "can't listen on 127.0.0.1: ", std::strerror(errno));
  port = ntohs(address.sin_port);
  return listener;
}

std::string local_address_of(int socket) {
  return address_by(::getsockname, socket);
}

std::string peer_address_of(int socket) {
  return address_by(::getpeername, socket);
}

}  // namespace lockstep::launch
