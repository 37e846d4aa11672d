#pragma once

#include <sys/socket.h>
#include <sys/types.h>

namespace lockstep {

/// The process and the user at the other end of a local socket, when the connection was made or the other end began to listen,
/// as this process's namespaces have them. The pid is 0 for a process that this pid namespace does not see; the uid is -1 where
/// nothing is known. Thread-safe.
inline ucred credentials_of(int socket) {
  ucred credentials = {};
  socklen_t size = sizeof credentials;
  const bool known = ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) == 0;
  return known ? credentials : ucred{.pid = 0, .uid = static_cast<uid_t>(-1), .gid = static_cast<gid_t>(-1)};
}

}  // namespace lockstep
