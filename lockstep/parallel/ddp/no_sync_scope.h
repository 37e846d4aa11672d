#pragma once

#include <utility>

namespace lockstep {

/// While it lives, the gradients of the core behind `CorePointer` (a plain or a shared pointer) are not synchronised. Movable.
/// Not thread-safe.
template <class CorePointer>
class [[nodiscard]] NoSyncScope {
 public:
  explicit NoSyncScope(CorePointer core) : core_(std::move(core)) { core_->enter_no_sync(); }
  NoSyncScope(NoSyncScope&& other) noexcept : core_(std::exchange(other.core_, nullptr)) {}
  /// Ends the scope that it had.
  NoSyncScope& operator=(NoSyncScope&& other) noexcept {
    NoSyncScope taken(std::move(other));
    std::swap(core_, taken.core_);
    return *this;
  }
  ~NoSyncScope() {
    if (core_ != nullptr) core_->leave_no_sync();
  }

 private:
  CorePointer core_;  // none when it was moved from
};

}  // namespace lockstep
