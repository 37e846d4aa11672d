#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <lockstep/flight/operation_observer.h>

namespace lockstep::flight::internal {

/// Those that are told of operations beside the recorder. Without any, a look costs one load. Thread-safe; observers are
/// told without a lock.
class Observers {
 public:
  bool any() const { return any_.load(std::memory_order_relaxed); }

  void attach(std::shared_ptr<OperationObserver> observer) {
    std::lock_guard lock(mutex_);
    auto more = std::make_shared<List>(*list_);
    more->push_back(std::move(observer));
    replace(std::move(more));
  }

  void detach(const std::shared_ptr<OperationObserver>& observer) {
    std::lock_guard lock(mutex_);
    auto fewer = std::make_shared<List>(*list_);
    std::erase(*fewer, observer);
    replace(std::move(fewer));
  }

  template <class Call>
  void tell(const Call& call) {
    if (!any()) return;
    std::unique_lock lock(mutex_);
    const std::shared_ptr<const List> list = list_;
    lock.unlock();
    for (const auto& observer : *list) call(*observer);
  }

 private:
  using List = std::vector<std::shared_ptr<OperationObserver>>;

  void replace(std::shared_ptr<const List> list) {
    list_ = std::move(list);
    any_.store(!list_->empty(), std::memory_order_relaxed);
  }

  std::mutex mutex_;
  std::shared_ptr<const List> list_ = std::make_shared<const List>();  // replaced as a whole
  std::atomic<bool> any_{false};
};

}  // namespace lockstep::flight::internal
