#pragma once

#include <atomic>
#include <cstdint>

namespace lockstep::data::internal {

/// Bytes of row groups that are decoded, or being decoded, and not yet used up. Thread-safe.
class BytesInFlight {
 public:
  void add(int64_t bytes) {
    const int64_t now = now_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    int64_t peak = peak_.load(std::memory_order_relaxed);
    while (now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
    }
  }
  int64_t now() const { return now_.load(std::memory_order_relaxed); }
  int64_t peak() const { return peak_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> now_{0};
  std::atomic<int64_t> peak_{0};
};

}  // namespace lockstep::data::internal
