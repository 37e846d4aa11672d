#include <condition_variable>
#include <mutex>
#include <set>
#include <utility>

#include <lockstep/base/ranks.h>
#include <lockstep/parallel/ddp/hooks/bucket_order.h>

namespace lockstep {

/// The turns that are not over. Outlives the BucketOrder while one of them is on its way.
struct BucketOrder::Open {
  std::mutex mutex;
  std::condition_variable changed;
  std::set<uint64_t> numbers;
};

BucketOrder::Turn::Turn(ProcessGroup group, std::shared_ptr<Open> open, uint64_t number)
    : group_(std::move(group)), open_(std::move(open)), number_(number) {
  std::lock_guard lock(open_->mutex);
  open_->numbers.insert(number_);
}

BucketOrder::Turn::~Turn() {
  std::lock_guard lock(open_->mutex);
  open_->numbers.erase(number_);
  open_->changed.notify_all();
}

void BucketOrder::Turn::wait() const {
  std::unique_lock lock(open_->mutex);
  open_->changed.wait(lock, [this] { return *open_->numbers.begin() == number_; });
}

BucketOrder::BucketOrder() : open_(std::make_shared<Open>()) {}

std::shared_ptr<BucketOrder::Turn> BucketOrder::take_turn(const ProcessGroup& group) {
  const ProcessGroup parent = group ? group : default_group();
  if (parent != parent_) {
    // Alone there is no order to keep.
    own_ = parent->getSize() == 1 ? parent
                                  : split_group(parent, {all_ranks(parent->getSize())}, {},
                                                "communication hook of " + parent->getGroupDesc());
    parent_ = parent;
  }
  return std::make_shared<Turn>(own_, open_, taken_++);
}

}  // namespace lockstep
