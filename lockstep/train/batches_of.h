#pragma once

#include <cstdint>
#include <utility>

#include <lockstep/train/batch_access.h>

namespace lockstep::train {

/// Goes through a loader. Asks for the next batch only when it is wanted. Passes over batches without a
/// sample, so that a rank without samples in a step is always one whose loader has ended.
template <class Loader>
class BatchesOf {
 public:
  /// Counts in `taken` the batches that it takes from the loader, with those that it passes over.
  explicit BatchesOf(Loader& loader, int64_t* taken = nullptr)
      : loader_(loader), iterator_(loader.begin()), taken_(taken) {}
  /// Null at the end.
  auto* next() {
    do {
      if (std::exchange(begun_, true) && !ended_) ++iterator_;
      ended_ = ended_ || iterator_ == loader_.end();
      if (!ended_ && taken_ != nullptr) ++*taken_;
    } while (!ended_ && BatchAccess<typename Loader::Batch>::samples(*iterator_) == 0);
    return ended_ ? nullptr : &*iterator_;
  }

 private:
  Loader& loader_;
  decltype(std::declval<Loader&>().begin()) iterator_;
  int64_t* taken_;
  bool begun_ = false;
  bool ended_ = false;
};

}  // namespace lockstep::train
