#pragma once

#include <cstdint>
#include <string>

#include <lockstep/base/deadline.h>
#include <lockstep/base/unique_fd.h>

namespace lockstep::rendezvous_internal {

/// A socket that listens, and how its own process reaches it.
struct ListeningSocket {
  UniqueFd socket = {};
  std::string address = {};  ///< numeric
  uint16_t port = 0;
};

/// Listens at host:port (0: one of LOCKSTEP_PORT_RANGE, or any free port), never on all interfaces: on
/// loopback when `host` is localhost or a loopback or unspecified address; on the host's own address when
/// that belongs to this machine; else, as behind a forwarding address, on that of interface_between_hosts().
/// A name that only this machine maps to loopback (Debian's 127.0.1.1) counts as loopback only with
/// `peers_are_local`, because the others resolve it differently. Throws c10::DistNetworkError that names the
/// port when it is in use.
ListeningSocket listen_at(const std::string& host, uint16_t port, bool peers_are_local);

/// Why a port is not a store's.
inline constexpr const char* kNoStore =
    "something listens there, but does not answer as a store does; the port may belong to another program";

/// Connects to host:port to see whether a store's server listens, and closes again; one attempt of at most a few
/// seconds an address. (TCPStore itself would try a port that is not a store's again and again, with a stack trace on stderr
/// each time.) Where listen_at() would not take the name's loopback address, that of interface_between_hosts() is tried too.
/// Returns the numeric address that answered, or "" and, in `why`, the reason.
std::string probe(const std::string& host, uint16_t port, Deadline deadline, std::string& why);

}  // namespace lockstep::rendezvous_internal
