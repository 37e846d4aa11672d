#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <sys/types.h>

#include <lockstep/rendezvous/generation.h>
#include <lockstep/rendezvous/process_watch.h>

namespace lockstep::transport::internal {

/// Shown by the rank that connects: only a process that reads the job's store knows it.
using Token = std::array<uint8_t, 16>;

/// What a rank puts into the store, so that the others can connect to it.
struct PeerAddress {
  ProcessIdentity process;
  uid_t uid = 0;
  std::string socket_name;  // of an abstract unix socket
  Token token{};
  Generation generation = {};

  /// One line: "UID SOCKET TOKEN GENERATION RUN PROCESS", for a peer to parse().
  std::string to_string() const;
  /// Throws c10::DistBackendError that shows the text when it is not from to_string().
  static PeerAddress parse(const std::string& text);
};

}  // namespace lockstep::transport::internal
