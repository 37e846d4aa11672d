#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include <lockstep/base/process/leaked_in_child.h>

namespace lockstep {

/// Hands items from a thread that makes them ahead to a thread that uses them, in order, as far as there is room: items that
/// are being made, that wait, and that are in use take up to `limit`, in whatever unit the two count. An item that alone is
/// larger is made when there is no other.
///
///     while (queue.reserve(1)) queue.push(make());                                    // one thread
///     while (auto item = queue.pop()) { use(*std::move(item)); queue.release(1); }    // the other one
///
/// Thread-safe, for one thread of each kind; stop() is for any. What was written before push() happens before pop() returns
/// the item. A forked child, in which these threads are not, may destroy its copy.
template <class T>
class alignas(64) BoundedQueue {  // a cache line has nothing of a neighbour's, which other threads use
 public:
  explicit BoundedQueue(int64_t limit) : limit_(limit) {}

  /// Waits until an item of this size has room, and takes the room. False if stop() was called.
  bool reserve(int64_t size) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_->wait(lock, [&] { return stopped_ || in_use_ == 0 || in_use_ + size <= limit_; });
    if (stopped_) return false;
    in_use_ += size;
    return true;
  }

  /// Lays in an item. `more`: how much more room it takes than was reserved for it.
  void push(T item, int64_t more = 0) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      in_use_ += more;
      ready_.push_back(std::move(item));
    }
    changed_->notify_all();
  }

  /// Waits for the next item, no longer than the timeout if there is one (0: not at all). Nothing if the time is over, or if
  /// stop() was called and no item is left. The item's room stays taken.
  std::optional<T> pop(std::optional<std::chrono::nanoseconds> timeout = std::nullopt) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto ends = [&] { return !ready_.empty() || stopped_; };
    if (!timeout) {
      changed_->wait(lock, ends);
    } else if (timeout->count() > 0) {
      changed_->wait_for(lock, *timeout, ends);
    }
    if (ready_.empty()) return std::nullopt;
    std::optional<T> item(std::move(ready_.front()));
    ready_.pop_front();
    return item;
  }

  /// Gives the room of an item back.
  void release(int64_t size) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      in_use_ -= size;
    }
    changed_->notify_all();
  }

  /// Ends the waiting of both threads, for good.
  void stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
    }
    changed_->notify_all();
  }

  bool stopped() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stopped_;
  }
  /// The room that is taken.
  int64_t in_use() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return in_use_;
  }

 private:
  const int64_t limit_;
  mutable std::mutex mutex_;
  LeakedInChild<std::condition_variable> changed_;
  std::deque<T> ready_;  // guarded by mutex_, as all below
  int64_t in_use_ = 0;
  bool stopped_ = false;
};

}  // namespace lockstep
