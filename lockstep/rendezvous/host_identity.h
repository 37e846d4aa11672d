#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

/// Which host a process runs on. Two processes are on the same host when they can share memory and see each
/// other's end. For that they must have been booted together, and share
/// - the network namespace, or they don't reach each other's abstract sockets;
/// - the pid namespace, or a pid that one tells means another process, or none, to the other: a peer that was
///   killed or stopped would not be noticed;
/// - the user namespace, or user ids can't be compared, by which the two ends of a socket trust each other.
/// So containers count as hosts of their own, unless they were started to share all three. Mount, IPC and UTS
/// namespaces do not matter: memory is handed over as descriptors.
struct HostIdentity {
  std::string boot_id;             ///< /proc/sys/kernel/random/boot_id
  uint64_t network_namespace = 0;  ///< inode of /proc/self/ns/net; 0: a host that a test pretends
  uint64_t pid_namespace = 0;      ///< of /proc/self/ns/pid; 0: a kernel without
  uint64_t user_namespace = 0;     ///< of /proc/self/ns/user; 0: a kernel without
  std::string hostname;            ///< for messages; counts only where a test pretends the host

  bool is_pretended() const { return network_namespace == 0; }
  bool operator==(const HostIdentity& other) const {
    return boot_id == other.boot_id && network_namespace == other.network_namespace &&
           pid_namespace == other.pid_namespace && user_namespace == other.user_namespace &&
           (!is_pretended() || hostname == other.hostname);
  }

  /// Equal texts for equal identities alone: to sort and group them by.
  std::string key() const;
  /// "BOOT_ID NETWORK/PID/USER HOSTNAME", for a peer to parse(); the two last namespaces are left out where
  /// the kernel has neither.
  std::string to_string() const;
  /// Throws c10::ValueError that shows the text when it is not from to_string().
  static HostIdentity parse(const std::string& text);
};

/// This process's host, read anew at each call (a process can change its namespace). For tests, a host NAME
/// that only processes with the same variable share is pretended by LOCKSTEP_TEST_HOST=NAME.
/// Throws c10::DistBackendError when /proc is not there, c10::ValueError for a name that is none.
HostIdentity this_host();

/// The inode of a namespace, such as /proc/self/ns/pid; 0 where the kernel has none of this kind. Thread-safe.
uint64_t inode_of_namespace(const std::string& path);

/// For tests whose ranks are threads: for this thread, `name` stands in place of LOCKSTEP_TEST_HOST; "" ends
/// that.
void pretend_host(const std::string& name);

}  // namespace lockstep
