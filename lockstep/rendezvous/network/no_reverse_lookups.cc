#include <arpa/nameser.h>
#include <array>
#include <netinet/in.h>
#include <resolv.h>
#include <sys/socket.h>
#include <system_error>

#include <lockstep/rendezvous/network/no_reverse_lookups.h>

namespace lockstep {
namespace {

/// A question's header: bit 7 of byte 2 says that this is the answer to it, byte 3 that there is no such name.
constexpr size_t kHeaderBytes = HFIXEDSZ;
constexpr uint8_t kIsAnswer = 0x80;
constexpr uint8_t kRecursionAvailable = 0x80;

/// Answers every question alike; ends with a datagram that is none.
void serve(int socket) {
  std::array<uint8_t, 2048> message{};
  while (true) {
    sockaddr_in asker{};
    socklen_t size = sizeof(asker);
    const auto bytes =
        ::recvfrom(socket, message.data(), message.size(), 0, reinterpret_cast<sockaddr*>(&asker), &size);
    if (bytes < static_cast<ssize_t>(kHeaderBytes)) return;
    message[2] |= kIsAnswer;
    message[3] = kRecursionAvailable | ns_r_nxdomain;
    ::sendto(socket, message.data(), static_cast<size_t>(bytes), MSG_NOSIGNAL,
             reinterpret_cast<const sockaddr*>(&asker), size);
  }
}

}  // namespace

NoReverseLookups::NoReverseLookups() : socket_(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* const raw = reinterpret_cast<sockaddr*>(&address);
  // Where anything fails, the lookups are made as ever.
  if (!socket_ || ::bind(socket_.get(), raw, size) != 0 || ::getsockname(socket_.get(), raw, &size) != 0 ||
      ::res_init() != 0) {
    return;
  }
  try {
    server_.start("lockstep-names", [socket = socket_.get()] { serve(socket); });
  } catch (const std::system_error&) {
    return;
  }
  _res.nsaddr_list[0] = address;
  _res.nscount = 1;
  _res.retrans = 1;  // seconds
  _res.retry = 1;
}

NoReverseLookups::~NoReverseLookups() {
  if (!server_.running()) return;
  sockaddr_in address{};
  socklen_t size = sizeof(address);
  ::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&address), &size);
  ::sendto(socket_.get(), "", 0, MSG_NOSIGNAL, reinterpret_cast<const sockaddr*>(&address), size);
  server_.join();
}

}  // namespace lockstep
