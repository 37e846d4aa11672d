#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include <lockstep/collectives/backend/lockstep_backend.h>

namespace c10d {
class Store;
}

/// For programs that keep process groups themselves, as torch.distributed does in Python: a backend for one
/// group, from nothing but its store. C++ programs call init_process_group() and new_group() instead.
namespace lockstep {

struct OpenBackendOptions {
  std::string group_name = {};  ///< for messages
  std::chrono::milliseconds timeout{};
  /// The members within the job, by group rank, for messages; empty when the group is the whole job.
  std::vector<int> global_ranks = {};
  HostCompression between_hosts = HostCompression::kNone;  ///< on all ranks the same
  LockstepBackend::Make make_subclass = nullptr;           ///< see LockstepBackend::Settings
};

/// Joins `size` ranks to a group. Collective over them; `store` is theirs alone (a PrefixStore will do) and
/// new, and is not needed any more when this returns on all of them.
///
/// All groups of a job share one mapping of their hosts' memory: the members first look for a mapping that all
/// of them have from an earlier group, and make one only if there is none. Thread-safe. Throws
/// c10::ValueError for a rank, size or timeout out of range, DistTimeoutError when ranks are missing after
/// `timeout`, c10::DistBackendError when one ended, ranks don't reach each other, or differ in between_hosts.
c10::intrusive_ptr<LockstepBackend> open_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                 int size, const OpenBackendOptions& options);

/// Ends all backends of open_backend() that are still alive, for a process that ends without having destroyed
/// its groups: operations that are not done fail, on all ranks, instead of keeping this process. With
/// `by_exception` the groups are aborted, as at the end of a DefaultGroup: the other ranks shall not hear
/// that this one has left in good order. Thread-safe.
void close_all_backends(bool by_exception = false);

}  // namespace lockstep
