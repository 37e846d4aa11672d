#pragma once

#include <cstddef>
#include <sys/types.h>
#include <vector>

#include <lockstep/base/deadline.h>

namespace lockstep::launch {

/// Reaps this process's children that have ended, but those in `own`; returns how many. For process 1 of a container, to
/// which the kernel gives what others leave behind, and of which it alone can be the waiting parent. To be called by the thread
/// that has started `own`. Nothing happens where the kernel does not tell the children of a process.
size_t reap_orphans(const std::vector<pid_t>& own);

/// Does that once a second where this is process 1, and elsewhere nothing.
class OrphanWatch {
 public:
  OrphanWatch();

  /// To be called often, and at wake_at().
  void look(const std::vector<pid_t>& own);
  Deadline wake_at() const { return look_at_; }

 private:
  Deadline look_at_;
};

}  // namespace lockstep::launch
