#pragma once

#include <string>
#include <sys/types.h>
#include <utility>
#include <vector>

#include <lockstep/base/boot_clock.h>
#include <lockstep/base/unique_fd.h>

namespace lockstep::launch {

/// open_pidfd() that throws c10::DistBackendError.
UniqueFd require_pidfd(pid_t pid);

/// Until when a guardian leaves the workers alone: a launcher that is stopped, or has lost its coordinator, must not leave
/// workers behind that others take for ended. It may outlive the guardian, and does nothing then.
class GuardianLease {
 public:
  explicit GuardianLease(UniqueFd line) : line_(std::move(line)) {}

  /// The guardian kills the process groups, and goes on, should `until` come before the next call. BootTime::max(): never.
  void renew(BootTime until);
  /// As the guardian was told last, or when the lease was over before that: it may have killed.
  BootTime until() const { return until_; }

 private:
  UniqueFd line_;
  BootTime until_ = BootTime::max();
};

/// A small process that outlives its launcher by an instant and then kills the process groups of all workers,
/// so that nothing of a job is left even when the launcher gets SIGKILL: neither workers nor what they
/// started in their groups. (PR_SET_PDEATHSIG, which the workers have too, reaches only the worker itself.)
/// Where the workers have a cgroup it kills and removes that, and with it what has left their groups. It removes the
/// launcher's temporary files then, too.
///
/// It is forked before the workers, has a session of its own (Ctrl-C does not reach it), no descriptors but
/// its two, and waits until the launcher's process ends or dismisses it. It never writes to the launcher's
/// memory, so it costs page tables only.
class Guardian {
 public:
  /// Starts it, for at most `capacity` process groups. `temporary`: files and then their folders, which it
  /// removes in this order when the launcher has not dismissed it. `cgroup`: the folder of the workers', see WorkerCgroup;
  /// empty: they have none. Throws c10::DistBackendError when the system refuses.
  explicit Guardian(int capacity, const std::vector<std::string>& temporary = {},
                    const std::string& cgroup = {});
  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;
  /// Dismisses the guardian, which ends without killing any process.
  ~Guardian();

  /// Puts a process group under its care. Async-signal-safe: a worker calls it between fork and exec, before
  /// it can have children of its own. A guardian that is gone is ignored.
  void enlist(pid_t process_group) const;

  /// The workers' lease, which never ends until it is set for the first time. Throws c10::DistBackendError.
  GuardianLease lease() const;

  pid_t pid() const { return pid_; }

 private:
  UniqueFd line_;
  pid_t pid_ = -1;
};

}  // namespace lockstep::launch
