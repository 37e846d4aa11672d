#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <sys/socket.h>

#include <lockstep/base/unique_fd.h>

namespace lockstep {

/// The ports that a firewall lets through.
struct PortRange {
  uint16_t first = 0;
  uint16_t last = 0;  ///< inclusive

  int count() const { return last - first + 1; }
  std::string to_string() const { return std::to_string(first) + "-" + std::to_string(last); }
  /// From "FIRST-LAST" or "PORT", as LOCKSTEP_PORT_RANGE has it. Throws c10::ValueError that names the
  /// variable.
  static PortRange parse(const std::string& text);
};

/// LOCKSTEP_PORT_RANGE; nothing when it is not set: then the kernel chooses ports. Throws as parse().
std::optional<PortRange> port_range();

/// A TCP socket that listens at `address`. Where its port is 0: at the lowest free one of port_range().
/// None, and errno, on failure: EADDRINUSE when the port is taken, or all of the range.
UniqueFd listen_tcp(const sockaddr_storage& address, socklen_t size);

/// While a library that chooses by itself takes a port of port_range(): one of the network namespace's processes at a
/// time, and there is one to take. UCX 1.13 tries for ever, without a pause, where all are taken.
class PortTurn {
 public:
  /// Waits for the others, but no longer than ten seconds, for one may be stopped. Throws c10::DistNetworkError when no
  /// port of the range is free at `address` (numeric). Does nothing without a range.
  explicit PortTurn(const std::string& address);

 private:
  UniqueFd turn_;
};

}  // namespace lockstep
