#pragma once

#include <memory>

#include <lockstep/base/process/fork_guard.h>

namespace lockstep {

/// A value that a forked child does not destroy. For condition variables: one that the parent's threads wait at has waiters in
/// the child's copy, too, for which its destructor would wait there for ever. As thread-safe as T.
template <class T>
class LeakedInChild {
 public:
  LeakedInChild() : value_(std::make_unique<T>()) {}
  LeakedInChild(const LeakedInChild&) = delete;
  LeakedInChild& operator=(const LeakedInChild&) = delete;
  ~LeakedInChild() {
    if (fork_guard_.in_forked_child()) (void)value_.release();
  }

  T& operator*() const { return *value_; }
  T* operator->() const { return value_.get(); }

 private:
  ForkGuard fork_guard_;
  std::unique_ptr<T> value_;
};

}  // namespace lockstep
