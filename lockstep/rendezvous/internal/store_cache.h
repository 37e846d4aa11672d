#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <lockstep/base/process/fork_guard.h>
#include <lockstep/base/unique_fd.h>

namespace lockstep::rendezvous_internal {

/// The stores that this process has met its peers at, one for each address and rank, kept until the process
/// ends.
///
/// Why: a program may initialise, destroy and initialise again with one environment. If rank 0 stopped the
/// server in between, a rank that still signed off would fail, and one that was quick would meet in the old
/// server. So the server stays, and each initialisation gets keys of its own by its number, `joined`, which
/// counts those that succeeded. Where ranks are threads of one process, each has an entry of its own.
class StoreCache {
 public:
  struct Entry {
    std::mutex opening;                     ///< held while the store is made
    c10::intrusive_ptr<c10d::Store> store;  ///< guarded by `opening`
    UniqueFd file;  ///< of a FileStore, open so that its inode is not given to another; guarded by `opening`
    std::optional<c10::weak_intrusive_ptr<c10d::Store>> given;  ///< instead, the caller's own
    int64_t joined = 0;                                         ///< guarded by `opening`
  };

  /// The process's cache. At the end of the process its stores are dropped (a FileStore then removes its
  /// file), but not in a forked child, to which they do not belong.
  static StoreCache& instance();

  std::shared_ptr<Entry> entry(const std::string& address, int rank);
  /// The entry of a store that the caller made: it counts, but does not keep the store alive.
  std::shared_ptr<Entry> entry(const c10::intrusive_ptr<c10d::Store>& given, int rank);

 private:
  StoreCache() = default;
  ~StoreCache();
  void forget_if_forked();

  std::mutex mutex_;
  ForkGuard guard_;
  std::map<std::string, std::shared_ptr<Entry>> entries_;
};

}  // namespace lockstep::rendezvous_internal
