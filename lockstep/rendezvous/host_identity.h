#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

/// Which host a process runs on. Two processes are on the same host when they were booted together and share
/// a network namespace: only then can they reach each other's abstract sockets. The name is for messages and
/// does not count.
struct HostIdentity {
  std::string boot_id;             ///< /proc/sys/kernel/random/boot_id
  uint64_t network_namespace = 0;  ///< inode of /proc/self/ns/net
  std::string hostname;

  bool operator==(const HostIdentity& other) const {
    return boot_id == other.boot_id && network_namespace == other.network_namespace;
  }

  /// "BOOT_ID NAMESPACE HOSTNAME", for a peer to parse().
  std::string to_string() const;
  /// Throws c10::ValueError that shows the text when it is not from to_string().
  static HostIdentity parse(const std::string& text);
};

/// This process's host, read anew at each call (a process can change its namespace).
/// Throws c10::DistBackendError when /proc is not there.
HostIdentity this_host();

}  // namespace lockstep
