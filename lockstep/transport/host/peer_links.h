#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <sys/types.h>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/transport/host/memory/segment.h>

namespace c10d {
class Store;
}

namespace lockstep::transport {

/// This process's connection to one peer process on the same host.
struct PeerLink {
  UniqueFd socket;  // SOCK_SEQPACKET; carries further segments; its end of file says that the peer is gone
  UniqueFd pidfd;   // readable once the peer has ended; none on old kernels
  pid_t pid = 0;
  std::shared_ptr<Segment> segment;  // the peer's first segment
  std::string wire_address;          // of a peer on another host, which has but this and the pid
};

/// What a job over several hosts needs beside links.
struct OtherHosts {
  std::vector<int> host_of = {};                   // by rank; empty: all are on one host
  std::function<std::string()> make_address = {};  // of this rank's wire
  /// Passes the first messages between hosts: once the ranks of this host are linked, with the answer of connect_peers().
  /// `look`, again and again, throws when a rank of this host has ended or another one has failed the joining for all.
  std::function<void(const std::vector<PeerLink>& links, const std::function<void()>& look)> meet = {};
  /// To be called again and again after that: throws c10::DistBackendError when a rank is lost.
  std::function<void()> look = {};
};

/// Connects this process with every other of the job on its host and exchanges first segments. The answer has one entry
/// per rank; the own one is empty.
///
/// Every rank listens on an abstract unix socket with a random name and puts {process, user, name, random
/// 128-bit token} into the store. It connects to each lower rank and shows that rank's token; the user id of
/// the process at the other end must be ours. `met_at`: an exchange to which all ranks have come, or empty.
///
/// Succeeds on all ranks or on none, as far as a store can tell. Throws c10::DistBackendError that names a
/// rank whose process has ended, at once; or when a peer is of another user or its socket can't be reached;
/// DistTimeoutError at the deadline, naming the missing ranks. Processes of different generations of a job (Generation) never
/// join each other: DistBackendError, with both.
std::vector<PeerLink> connect_peers(c10d::Store& store, int rank, int world_size, const Segment& own,
                                    const Deadline& deadline, const std::string& met_at,
                                    const OtherHosts& others);

/// Sends a further segment to a peer, without waiting. False with errno: see may_send_later(), peer_has_closed().
bool send_segment(const PeerLink& link, uint32_t index, const Segment& segment);

/// The next message of send_segment(), mapped; nothing if there is none now, or none any more: then `open`
/// becomes false. No segment, but a problem, where it could not be mapped: it is not as announced, or this
/// process has no descriptor or no address space left.
struct ReceivedSegment {
  uint32_t index;
  std::shared_ptr<Segment> segment;
  std::string problem = {};
};
std::optional<ReceivedSegment> receive_segment(const PeerLink& link, bool& open);

}  // namespace lockstep::transport
