#pragma once

#include <cstddef>
#include <string>
#include <sys/socket.h>

#include <lockstep/base/unique_fd.h>

namespace lockstep::transport {

// Connections between processes of a host: sockets of SOCK_SEQPACKET with an abstract name (one that begins with a zero
// byte and needs no file), over which each message carries one file descriptor.

/// Throws c10::DistBackendError when the kernel refuses.
UniqueFd listen_local(const std::string& name, int backlog);

/// False with errno.
bool connect_local(int socket, const std::string& name);

/// A stopped peer does not read; a rank that connects or sends to it must not wait for it for ever.
void limit_sends(int socket);

/// False with errno.
bool send_with_fd(int socket, const void* data, size_t bytes, int fd, int flags = 0);

/// Whether a send that failed with this errno can succeed later: a peer's queue is full, or the processes of this user have
/// sent more descriptors that no process has received yet than RLIMIT_NOFILE of this one allows (ETOOMANYREFS).
bool may_send_later(int error);
/// Whether it says that the peer has closed the connection.
bool peer_has_closed(int error);

/// The descriptor that came with a message of exactly `bytes`; none at end of file or for anything else. With
/// MSG_DONTWAIT in `flags` errno is EAGAIN when there is no message. Throws c10::DistBackendError when this
/// process has no room for the descriptor, which is then lost.
UniqueFd receive_with_fd(int socket, void* data, size_t bytes, int flags = 0);

/// The beginning of a message; the operation follows.
std::string no_descriptor_left();
/// The end of a message: why descriptors could not be sent, and what to do.
std::string too_many_in_flight();

/// None on kernels before 6.5.
UniqueFd pidfd_of_peer(int socket);

}  // namespace lockstep::transport
