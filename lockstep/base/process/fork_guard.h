#pragma once

#include <cstdint>

namespace lockstep {

/// Knows whether this object lives in a child that was forked after it was made. Threads, shared mappings and
/// sockets of the parent are useless there: their owner asks before it touches them, in its destructor too.
/// Costs one relaxed load. Thread-safe.
class ForkGuard {
 public:
  ForkGuard();
  bool in_forked_child() const;

 private:
  uint64_t generation_;
};

}  // namespace lockstep
