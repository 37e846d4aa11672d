#pragma once

#include <cstddef>
#include <iterator>
#include <memory>
#include <utility>

namespace lockstep::data::internal {

/// The current batch of an epoch and those to come. Move-only; the end is std::default_sentinel. `Epoch` has next(), which
/// returns an owning pointer to the next batch, null after the last one.
template <class Batch, class Epoch>
class BatchIterator {
 public:
  using value_type = Batch;
  using difference_type = std::ptrdiff_t;
  using iterator_concept = std::input_iterator_tag;

  /// Waits for the first batch.
  explicit BatchIterator(std::unique_ptr<Epoch> epoch) : epoch_(std::move(epoch)) { ++*this; }
  BatchIterator(BatchIterator&&) noexcept = default;
  BatchIterator& operator=(BatchIterator&&) noexcept = default;

  Batch& operator*() const { return *batch_; }
  Batch* operator->() const { return batch_.get(); }
  BatchIterator& operator++() {
    batch_.reset();  // its memory may serve the next one
    batch_ = std::static_pointer_cast<Batch>(std::shared_ptr(epoch_->next()));
    return *this;
  }
  void operator++(int) { ++*this; }
  friend bool operator==(const BatchIterator& iterator, std::default_sentinel_t /*end*/) {
    return !iterator.batch_;
  }

 private:
  std::unique_ptr<Epoch> epoch_;
  std::shared_ptr<Batch> batch_;
};

}  // namespace lockstep::data::internal
