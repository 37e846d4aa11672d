#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
#include <utility>

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <lockstep/data/internal/batch_iterator.h>
#include <lockstep/data/to_device.h>
#include <lockstep/device/copy_stream.h>
#include <lockstep/serialization/state_dict.h>

namespace lockstep::data {

struct DeviceLoaderOptions {
  /// Batches that are on their way to the device before they are asked for. 0: each is copied when it is
  /// asked for.
  int prefetch = 1;
};

namespace internal {

/// How far a DeviceLoader is ahead of its user.
struct Ahead {
  int64_t batches = 0;  // taken from the other loader, not handed out
  bool end = false;     // the other loader's, which the user has not seen
};

/// An epoch of a DeviceLoader: the other loader's iterator, and what was taken from it ahead.
template <class Loader>
class DeviceEpoch {
  using Batch = typename Loader::Batch;

 public:
  DeviceEpoch(Loader& loader, c10::Device device, int64_t prefetch, std::shared_ptr<Ahead> ahead)
      : loader_(loader), iterator_(loader.begin()), prefetch_(prefetch), ahead_(std::move(ahead)) {
    look();
    if (!device.is_cpu()) copies_.emplace(device);
  }
  DeviceEpoch(const DeviceEpoch&) = delete;
  DeviceEpoch& operator=(const DeviceEpoch&) = delete;
  ~DeviceEpoch() {
    for (auto* entries : {&ahead_entries_, &handed_out_}) {
      for (const Entry& entry : *entries) {
        try {
          entry.done->synchronize();  // the host's memory is still read
        } catch (...) {
          // The device is broken, and reads no more; an exception may be on its way that says so.
        }
      }
    }
  }

  /// The next batch; null at the end.
  std::unique_ptr<Batch> next() {
    fetch_until(1);
    std::unique_ptr<Batch> batch;
    if (!ready_.empty()) {
      batch = std::make_unique<Batch>(std::move(ready_.front()));
      ready_.pop_front();
      if (copies_) hand_out(*batch);
      fetch_until(prefetch_);
      if (stands_ == Stands::kAtBatch) failure_ = nullptr;  // there may be memory for it when it is asked for
    }
    *ahead_ = {static_cast<int64_t>(ready_.size()) + (stands_ == Stands::kAtBatch ? 1 : 0),
               stands_ == Stands::kAtEnd && batch};
    if (!batch && failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    return batch;
  }

 private:
  /// Where the other loader's iterator stands.
  enum class Stands : uint8_t {
    kAtBatch,    // whose copy is to be made, or has failed and is to be tried again
    kPastBatch,  // at a copied batch; ++ leads to the next, also where the other loader failed to make one
    kAtEnd,
  };
  struct Entry {
    Batch host;
    std::optional<c10::Event> done;  // copying
  };

  void look() { stands_ = iterator_ == loader_.end() ? Stands::kAtEnd : Stands::kAtBatch; }

  void fetch_until(int64_t count) {
    while (static_cast<int64_t>(ready_.size()) < count && stands_ != Stands::kAtEnd && !failure_) {
      try {
        if (stands_ == Stands::kPastBatch) {
          ++iterator_;
          look();
        }
        if (stands_ == Stands::kAtEnd) break;
        fetch(*iterator_);
        stands_ = Stands::kPastBatch;
      } catch (...) {
        failure_ = std::current_exception();  // for the caller that asks for that batch
      }
    }
  }

  void fetch(const Batch& host) {
    Batch batch = host;
    if (copies_) {
      auto done = copies_->run([&] { batch = to_device(std::move(batch), copies_->device(), true); });
      ahead_entries_.push_back({host, std::move(done)});
    }
    ready_.push_back(std::move(batch));
  }

  void hand_out(Batch& batch) {
    Entry entry = std::move(ahead_entries_.front());
    ahead_entries_.pop_front();
    copies_->let_current_stream_wait(*entry.done);
    for_each_owned_tensor(batch, [&](at::Tensor& tensor) { copies_->used_by_current_stream(tensor); });
    handed_out_.push_back(std::move(entry));
    // What was handed out two batches ago is long copied, unless the program is far ahead of the device.
    while (handed_out_.size() > 2) {
      handed_out_.front().done->synchronize();
      handed_out_.pop_front();
    }
  }

  Loader& loader_;
  decltype(std::declval<Loader&>().begin()) iterator_;
  const int64_t prefetch_;
  const std::shared_ptr<Ahead> ahead_;
  std::optional<CopyStream> copies_;  // none on the CPU
  std::deque<Batch> ready_;
  std::deque<Entry> ahead_entries_;  // with copies_, of the batches in ready_
  std::deque<Entry> handed_out_;     // with copies_, whose copies may still run
  Stands stands_ = Stands::kAtEnd;
  std::exception_ptr failure_;
};

}  // namespace internal

/// Another loader's batches, on a device: the copy of the next batch runs there beside the computation on
/// this one, on a stream of its own. (What NVIDIA's examples do by hand, as data_prefetcher.)
///
///     DataLoader host(train, {.batch_size = 64, .sampler = &sampler, .num_workers = 2, .pin_memory = true});
///     DeviceLoader loader(host, device);
///     for (auto& batch : loader) step(batch.data, batch.target);   // on the device
///
/// Only copies from pinned memory run beside anything (DataLoaderOptions::pin_memory); others are right too,
/// and the program waits for them. A batch may be used on the stream that is current in the thread that asked
/// for it, at once, and kept; its memory is not used again before that stream is done with it. On the CPU
/// batches pass through, so that a program need not tell devices apart.
///
/// `Loader`: a DataLoader, or what has its Batch, begin() and end(). The other members are the other
/// loader's, as far as it has them; state_dict() counts batches that were fetched ahead as unseen. An error
/// is thrown where its batch is asked for; if only its copy has failed, for lack of memory say, the next ++
/// tries that again, so no batch is lost. The other loader must outlive this one and its iterators, of which
/// there is one at a time. One thread at a time.
template <class Loader>
class DeviceLoader {
 public:
  using Batch = typename Loader::Batch;

  /// Throws c10::ValueError for a negative prefetch.
  DeviceLoader(Loader& loader, c10::Device device, const DeviceLoaderOptions& options = {})
      : loader_(loader), device_(device), prefetch_(device.is_cpu() ? 0 : options.prefetch) {
    TORCH_CHECK_VALUE(options.prefetch >= 0, "DeviceLoader: prefetch is ", options.prefetch,
                      "; it must not be negative");
  }

  /// The current batch and those to come. Move-only; the end is std::default_sentinel.
  using Iterator = internal::BatchIterator<Batch, internal::DeviceEpoch<Loader>>;

  /// Starts an epoch of the other loader, and waits for its first batches.
  Iterator begin() {
    auto ahead = std::make_shared<internal::Ahead>();
    auto epoch = std::make_unique<internal::DeviceEpoch<Loader>>(loader_, device_, prefetch_, ahead);
    ahead_ = std::move(ahead);
    return Iterator(std::move(epoch));
  }
  std::default_sentinel_t end() const { return {}; }

  c10::Device device() const { return device_; }

  int64_t size() const requires requires(const Loader& loader) { loader.size(); }
  { return loader_.size(); }
  double waited() const requires requires(const Loader& loader) { loader.waited(); }
  { return loader_.waited(); }
  void set_epoch(int64_t epoch) requires requires(Loader& loader) { loader.set_epoch(epoch); }
  { loader_.set_epoch(epoch); }
  bool start_at(int64_t position) requires requires(Loader& loader) { loader.start_at(position); }
  { return loader_.start_at(position); }
  StateDict state_dict(int64_t unseen_batches = 0) const requires requires(const Loader& loader) {
    loader.state_dict(int64_t{}, bool{});
  }
  { return loader_.state_dict(unseen_batches + ahead_->batches, ahead_->end); }
  void load_state_dict(const StateDict& state) requires requires(Loader& loader, const StateDict& loaded) {
    loader.load_state_dict(loaded);
  }
  {
    loader_.load_state_dict(state);
    ahead_ = std::make_shared<internal::Ahead>();
  }

 private:
  Loader& loader_;
  c10::Device device_;
  int64_t prefetch_;
  std::shared_ptr<internal::Ahead> ahead_ = std::make_shared<internal::Ahead>();  // in the latest epoch
};

}  // namespace lockstep::data
