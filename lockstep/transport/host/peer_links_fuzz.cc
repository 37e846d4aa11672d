// What comes to a rank from other processes: the address that a peer puts into the store, and the messages on
// the socket to it. Any text is an address or a DistBackendError; any messages are segments, an end of the
// connection or a DistBackendError, and no descriptor stays open.
//
// The input is an address, or messages of { size, attachments, flags, size bytes }.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <string_view>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <c10/util/Exception.h>

#include <lockstep/testing/fuzz_driver.h>
#include <lockstep/transport/host/memory/arena.h>
#include <lockstep/transport/host/peer_links.h>
#include <lockstep/transport/internal/peer_address.h>

namespace lockstep::transport::peer_links_fuzz {

using internal::PeerAddress;

namespace {

constexpr size_t kMaxAttachments = 3;
// As in peer_links.cc: index, padding, bytes.
constexpr size_t kNoticeBytes = 16;

void parse_address(const std::string& text) {
  try {
    const auto address = PeerAddress::parse(text);
    if (PeerAddress::parse(address.to_string()).to_string() != address.to_string()) std::abort();
  } catch (const c10::DistBackendError&) {
    // what is documented
  }
}

/// A page, or as the flags say: longer, not sealed, no memory at all.
UniqueFd attachment(uint8_t flags) {
  if ((flags & 1) != 0) return UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC));
  UniqueFd fd(::memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd || ::ftruncate(fd.get(), (flags & 2) != 0 ? 100'000 : 4096) != 0) std::abort();
  if ((flags & 4) == 0) ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  return fd;
}

void send_message(int socket, std::string_view bytes, size_t attachments, uint8_t flags) {
  iovec part{const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxAttachments * sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  std::array<UniqueFd, kMaxAttachments> owned;
  if (attachments > 0) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(attachments * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(attachments * sizeof(int));
    for (size_t i = 0; i < attachments; ++i) {
      owned[i] = attachment(flags);
      const int fd = owned[i].get();
      std::memcpy(CMSG_DATA(header) + i * sizeof(int), &fd, sizeof fd);
    }
  }
  ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);  // a full socket: fewer messages
}

void receive_all(const PeerLink& link) {
  for (int messages = 0; messages < 256; ++messages) {
    bool open = true;
    const auto received = receive_segment(link, open);
    if (received && received->segment) {
      if (received->index >= Arena::kMaxSegments || received->segment->size() == 0) std::abort();
      received->segment->data()[received->segment->size() - 1] = std::byte{1};
    } else if (received) {
      if (received->problem.empty()) std::abort();  // this message was no segment; the next may be
    } else if (!open) {
      return;
    }
  }
  std::abort();  // the sender has closed, so there must be an end
}

void exchange_messages(std::string_view text) {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) std::abort();
  PeerLink link;
  link.socket.reset(ends[0]);
  UniqueFd sender(ends[1]);
  for (int messages = 0; messages < 64 && text.size() >= 3; ++messages) {
    const auto size = std::min<size_t>(static_cast<uint8_t>(text[0]), text.size() - 3);
    send_message(sender.get(), text.substr(3, size), static_cast<uint8_t>(text[1]) % (kMaxAttachments + 1),
                 static_cast<uint8_t>(text[2]));
    text.remove_prefix(3 + size);
  }
  sender.reset();
  receive_all(link);
}

/// The lowest numbers that are free, more than the two sockets take: a descriptor that is left may have the second one's.
std::array<int, 3> free_descriptors() {
  std::array<UniqueFd, 3> taken;
  std::array<int, 3> numbers{};
  for (size_t i = 0; i < taken.size(); ++i) {
    taken[i].reset(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    numbers[i] = taken[i].get();
  }
  return numbers;
}

std::string message(uint8_t attachments, uint8_t flags, uint32_t index, uint64_t bytes) {
  std::string text{static_cast<char>(kNoticeBytes), static_cast<char>(attachments), static_cast<char>(flags)};
  text.resize(3 + kNoticeBytes, '\0');
  std::memcpy(text.data() + 3, &index, sizeof index);
  std::memcpy(text.data() + 11, &bytes, sizeof bytes);
  return text;
}

std::vector<std::string> seeds() {
  PeerAddress address;
  address.process =
      ProcessIdentity::parse("4242 777 8f14e45f-ceea-467f-9d3b-0d2b5e1f2a3c 4026531840/4026531836/1 host-1");
  address.uid = 1000;
  address.socket_name = "lockstep-00112233445566778899aabb";
  return {
      address.to_string(),     message(1, 0, 1, 4096) + message(1, 2, 2, 100'000),
      message(2, 0, 1, 4096),  message(3, 2, 1023, 100'000) + message(0, 0, 2, 4096) + message(1, 0, 3, 4096),
      message(1, 4, 1, 4096),  message(1, 1, 1, 0),
      std::string("\0\1\0", 3)};
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(peer_links, seeds) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  parse_address(text);
  const auto before = free_descriptors();
  exchange_messages(text);
  if (free_descriptors() != before) std::abort();
  return 0;
}

}  // namespace lockstep::transport::peer_links_fuzz
