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
      take();
    } while (stands_ == Stands::kAtTaken && BatchAccess<typename Loader::Batch>::samples(*iterator_) == 0);
    return stands_ == Stands::kAtEnd ? nullptr : &*iterator_;
  }

 private:
  /// Where the loader's iterator stands.
  enum class Stands : uint8_t {
    kAtFirst,  // batch, which begin() has made and the caller has not taken yet
    kAtTaken,  // batch, which was taken; ++ leads to the next, also where the loader failed to make one
    kAtEnd,
  };

  /// The one place where it moves.
  void take() {
    if (stands_ == Stands::kAtEnd) return;
    if (stands_ == Stands::kAtTaken) ++iterator_;
    stands_ = iterator_ == loader_.end() ? Stands::kAtEnd : Stands::kAtTaken;
    if (stands_ == Stands::kAtTaken && taken_ != nullptr) ++*taken_;
  }

  Loader& loader_;
  decltype(std::declval<Loader&>().begin()) iterator_;
  int64_t* taken_;
  Stands stands_ = Stands::kAtFirst;
};

}  // namespace lockstep::train
