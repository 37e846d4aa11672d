#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <sys/resource.h>
#include <sys/time.h>

#include <c10/util/Exception.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/rendezvous/network/socket_address.h>
#include <lockstep/transport/local_socket.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Linux 6.5
#endif

namespace lockstep::transport {
namespace {

std::string open_files_limit() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return std::to_string(limit.rlim_cur);
}

}  // namespace

UniqueFd listen_local(const std::string& name, int backlog) {
  UniqueFd listener(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const SocketAddress address = abstract_address(name);
  TORCH_CHECK_WITH(DistBackendError,
                   listener && ::bind(listener.get(), address.raw(), address.size) == 0 &&
                       ::listen(listener.get(), backlog) == 0,
                   "a local socket for the peers can't be made: ", std::strerror(errno));
  return listener;
}

bool connect_local(int socket, const std::string& name) {
  const SocketAddress address = abstract_address(name);
  int failed = 0;
  do {
    failed = ::connect(socket, address.raw(), address.size);
  } while (failed != 0 && errno == EINTR);
  return failed == 0;
}

void limit_sends(int socket) {
  const timeval patience{10, 0};
  ::setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
}

bool send_with_fd(int socket, const void* data, size_t bytes, int fd, int flags) {
  if (const int error = failpoint::fails_with("send_with_fd"); error != 0) {
    errno = error;
    return false;
  }
  iovec part{const_cast<void*>(data), bytes};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(socket, &message, MSG_NOSIGNAL | flags);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(bytes);
}

bool may_send_later(int error) {
  return error == EAGAIN || error == ETOOMANYREFS;
}

bool peer_has_closed(int error) {
  return error == EPIPE || error == ECONNRESET;
}

UniqueFd receive_with_fd(int socket, void* data, size_t bytes, int flags) {
  iovec part{data, bytes};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  // Not the padded size, which has room for a second descriptor: the kernel closes what does not fit.
  message.msg_controllen = CMSG_LEN(sizeof(int));
  ssize_t received = 0;
  // A peer that ends before it has read all resets the connection. That is told once, ahead of what it had sent.
  do {
    received = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | flags);
  } while (received < 0 && (errno == EINTR || errno == ECONNRESET));
  UniqueFd fd;
  if (received < 0) return fd;
  // The kernel installs no descriptor beyond the limit, and says only this.
  const bool no_room = message.msg_controllen == 0 && (message.msg_flags & MSG_CTRUNC) != 0;
  TORCH_CHECK_WITH(DistBackendError, !no_room, no_descriptor_left(),
                   "so it can't map the memory that a peer shares");
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    int number = -1;
    std::memcpy(&number, CMSG_DATA(header), sizeof number);
    fd.reset(number);
  }
  // An empty message may have one, too.
  if (received != static_cast<ssize_t>(bytes)) fd.reset();
  return fd;
}

std::string no_descriptor_left() {
  return "this process has no file descriptor left (ulimit -n is " + open_files_limit() +
         "; raise it, or close files), ";
}

std::string too_many_in_flight() {
  return "the processes of this user have more descriptors in flight between them than ulimit -n (" +
         open_files_limit() + ") allows; raise it, or end the processes that do not receive theirs";
}

UniqueFd pidfd_of_peer(int socket) {
  int fd = -1;
  socklen_t length = sizeof fd;
  return UniqueFd(::getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &length) == 0 ? fd : -1);
}

}  // namespace lockstep::transport
