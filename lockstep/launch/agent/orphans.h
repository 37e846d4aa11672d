#pragma once

#include <cstddef>
#include <sys/types.h>
#include <vector>

namespace lockstep::launch {

/// Reaps this process's children that have ended, but those in `own`; returns how many. For process 1 of a container, to
/// which the kernel gives what others leave behind, and of which it alone can be the waiting parent. To be called by the thread
/// that has started `own`. Nothing happens where the kernel does not tell the children of a process.
size_t reap_orphans(const std::vector<pid_t>& own);

}  // namespace lockstep::launch
