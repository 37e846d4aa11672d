#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <sys/types.h>

#include <lockstep/base/unique_fd.h>
#include <lockstep/rendezvous/host_identity.h>

namespace lockstep {

/// A process as the other ranks of its job know it: enough to tell it from one that gets its pid later.
struct ProcessIdentity {
  HostIdentity host;  ///< by its pid namespace, too: a pid means something within one only
  pid_t pid = 0;
  uint64_t start = 0;  ///< when it started, in clock ticks since the boot

  /// "PID START HOST", for a peer to parse().
  std::string to_string() const;
  /// Throws c10::ValueError that shows the text when it is not from to_string().
  static ProcessIdentity parse(const std::string& text);
};

/// This process. Throws c10::DistBackendError when /proc is not there.
ProcessIdentity this_process();

/// Tells when a process of this host has ended, and how. Holds a descriptor where the kernel has pidfds
/// (Linux 5.3). Movable, not thread-safe.
class ProcessWatch {
 public:
  /// `own`: this_process(). A process of another host can't be watched: it never counts as ended.
  ProcessWatch(const ProcessIdentity& process, const ProcessIdentity& own);

  bool can_tell() const { return can_tell_; }
  bool has_ended() const;
  /// Becomes readable when the process ends; -1 where there is none.
  int pidfd() const { return pidfd_.get(); }
  /// Gives the descriptor away.
  UniqueFd release_pidfd() { return std::move(pidfd_); }
  /// "(pid 42) killed by signal 9 (SIGKILL)", for a process that has ended: see known_end(). Takes up to half
  /// a second.
  std::string describe_end() const;
  /// "(pid 42) is stopped (by SIGSTOP, SIGTSTP or a debugger; …)" while it is, if that can be told; else empty.
  std::string describe_stop() const;

 private:
  pid_t pid_;
  uint64_t start_;
  bool can_tell_;
  UniqueFd pidfd_;
};

/// From the moment at which a dying process has closed its sockets, by which others notice its end, until it has ended, at
/// most: it frees its memory in between, on a busy machine.
inline constexpr std::chrono::milliseconds kLongestEnding{2000};

/// How a process ended, in words, from the launcher's exit status table or from the kernel (PIDFD_GET_INFO,
/// Linux 6.15, once the parent has reaped the process; /proc/PID/stat, until it has), as soon as one knows
/// within `patience` of its end, which may take kLongestEnding itself. `pidfd` may be -1.
std::optional<std::string> known_end(pid_t pid, int pidfd, std::chrono::milliseconds patience);

}  // namespace lockstep
