#include <array>
#include <atomic>
#include <vector>

#include <lockstep/base/failpoint.h>
#include <lockstep/collectives/algorithms/algorithms.h>
#include <lockstep/collectives/algorithms/exposed_memory.h>
#include <lockstep/collectives/algorithms/hosts/hosts.h>
#include <lockstep/collectives/algorithms/ranges.h>
#include <lockstep/collectives/algorithms/staging.h>

namespace lockstep::collectives::internal::algorithms {
namespace {

using transport::GroupChannel;
using transport::HostChannel;
using Flag = HostChannel::Flag;

/// Up to this many ranks each reduces everything staged for itself: that moves hardly more bytes than slices
/// do, and needs one wait less a chunk.
constexpr int kDirectRanks = 3;
/// Of the scratch's buffers they use no more than this at a time, so that what is staged and the piece of the
/// tensor fit into a core's second-level cache; with slices the extra waits cost more than that gains.
constexpr size_t kDirectChunkBytes = size_t{128} << 10;

/// Combines small tensors on their way up the tree of a group beyond eight ranks.
class ReduceCombiner final : public transport::PayloadCombiner {
 public:
  ReduceCombiner(const ReduceKernels& kernels, int ranks, size_t count)
      : kernels_(kernels), ranks_(ranks), count_(count) {}
  void combine(void* partial, const std::vector<const void*>& inputs) const override {
    kernels_.partial(partial, inputs.data(), inputs.size(), ranks_, count_);
  }
  void finish(void* result, const std::vector<const void*>& partials) const override {
    kernels_.finish(&result, 1, partials.data(), partials.size(), ranks_, count_);
  }

 private:
  const ReduceKernels& kernels_;
  int ranks_;
  size_t count_;
};

/// One reduction on its way.
class Reduction {
 public:
  Reduction(HostChannel& channel, const Signature& signature, void* data)
      : channel_(channel),
        kernels_(reduce_kernels(signature.real_dtype(), static_cast<ReduceOperation>(signature.operation))),
        data_(static_cast<std::byte*>(data)),
        count_(signature.real_numel()),
        bytes_(count_ * kernels_.element_size),
        root_(signature.root) {}

  size_t bytes() const { return bytes_; }
  bool wants_result() const { return root_ < 0 || root_ == channel_.rank(); }
  ReduceCombiner combiner() const { return {kernels_, channel_.size(), count_}; }

  /// From the announcements' payloads.
  void small() {
    // They stay until the operation after the next is announced: success can be made final first.
    channel_.commit();
    if (!wants_result()) return;
    if (channel_.size() > HostChannel::kFlatRanks)
      return copy_bytes(data_, channel_.combined_payload(), bytes_);
    std::array<const void*, HostChannel::kFlatRanks> inputs{};
    for (int rank = 0; rank < channel_.size(); ++rank) inputs[rank] = channel_.payload(rank);
    reduce_into(data_, inputs.data(), count_);
  }

  /// Where the tensors lie: each rank reduces its slice for all.
  void in_place() {
    const Range slice = slice_of(count_, kernels_.element_size, channel_.size(), channel_.rank());
    std::vector<void*> memory;
    for (int rank = 0; rank < channel_.size(); ++rank) {
      memory.push_back(channel_.memory(rank) + slice.begin * kernels_.element_size);
    }
    failpoint::here("reduce");
    void* const* outputs = root_ < 0 ? memory.data() : &memory[root_];
    if (slice.count > 0) {
      kernels_.reduce(outputs, root_ < 0 ? memory.size() : 1, memory.data(), memory.size(), slice.count);
    }
    finish(channel_);
  }

  /// Each rank copies its chunk into the scratch; a rank that wants the result reads them all.
  void staged_direct() {
    DoubleBuffer buffers(channel_);
    const size_t chunk = chunk_of(std::min(buffers.capacity(), kDirectChunkBytes));
    const size_t chunks = (bytes_ + chunk - 1) / chunk;
    // A root reads its own data where they are.
    const bool staging = root_ < 0 || !wants_result();
    const auto stage = [&](size_t k) {
      if (staging) copy_bytes(buffers.own(k), data_ + k * chunk, std::min(chunk, bytes_ - k * chunk));
      channel_.publish(Flag::kStaged, buffers.number(k));
    };
    std::vector<const void*> inputs(channel_.size());
    stage(0);
    for (size_t k = 0; k < chunks; ++k) {
      if (k + 1 < chunks) {
        // The buffer of chunk k+1 is free once all ranks have read chunk k−1 from it.
        if (k > 0) channel_.await_all(Flag::kReduced, buffers.number(k - 1));
        stage(k + 1);
      }
      if (wants_result()) {
        channel_.await_all(Flag::kStaged, buffers.number(k));
        std::byte* output = data_ + k * chunk;
        for (int rank = 0; rank < channel_.size(); ++rank) {
          inputs[rank] = rank == channel_.rank() ? output : buffers.of(rank, k);
        }
        failpoint::here("reduce");
        reduce_into(output, inputs.data(), std::min(chunk, bytes_ - k * chunk) / kernels_.element_size);
      }
      channel_.publish(Flag::kReduced, buffers.number(k));
    }
    channel_.add_chunks(chunks);
    finish(channel_);
  }

  /// Each rank reduces its slice of the chunk into its own scratch, where the ranks that want the result
  /// fetch it.
  void staged_slices() {
    const int ranks = channel_.size();
    const size_t element = kernels_.element_size;
    DoubleBuffer buffers(channel_);
    const size_t chunk = chunk_of(buffers.capacity());
    const size_t chunks = (bytes_ + chunk - 1) / chunk;
    const auto stage = [&](size_t k) {
      copy_bytes(buffers.own(k), data_ + k * chunk, std::min(chunk, bytes_ - k * chunk));
      channel_.publish(Flag::kStaged, buffers.number(k));
    };
    std::vector<const void*> inputs(ranks);
    stage(0);
    for (size_t k = 0; k < chunks; ++k) {
      const size_t count = std::min(chunk, bytes_ - k * chunk) / element;
      const Range own = slice_of(count, element, ranks, channel_.rank());
      channel_.await_all(Flag::kStaged, buffers.number(k));
      for (int rank = 0; rank < ranks; ++rank) inputs[rank] = buffers.of(rank, k) + own.begin * element;
      failpoint::here("reduce");
      if (own.count > 0) reduce_into(buffers.own(k) + own.begin * element, inputs.data(), own.count);
      channel_.publish(Flag::kReduced, buffers.number(k));
      channel_.await_all(Flag::kReduced, buffers.number(k));
      // All have reduced chunk k, so all have fetched chunk k−1, whose buffer the next chunk takes.
      if (k + 1 < chunks) stage(k + 1);
      if (!wants_result()) continue;
      for (int rank = 0; rank < ranks; ++rank) {
        const Range slice = slice_of(count, element, ranks, rank);
        copy_bytes(data_ + k * chunk + slice.begin * element, buffers.of(rank, k) + slice.begin * element,
                   slice.count * element);
      }
    }
    channel_.add_chunks(chunks);
    finish(channel_);
  }

 private:
  size_t chunk_of(size_t bytes) const { return bytes / kernels_.element_size * kernels_.element_size; }
  void reduce_into(void* output, const void* const* inputs, size_t count) const {
    kernels_.reduce(&output, 1, inputs, channel_.size(), count);
  }

  HostChannel& channel_;
  const ReduceKernels& kernels_;
  std::byte* data_;
  size_t count_;
  size_t bytes_;
  int root_;
};

std::atomic<size_t> chunk_bytes_setting{size_t{256} << 10};

}  // namespace

size_t chunk_bytes() {
  return chunk_bytes_setting.load(std::memory_order_relaxed);
}
void set_chunk_bytes_for_testing(size_t bytes) {
  chunk_bytes_setting.store(bytes, std::memory_order_relaxed);
}

void finish(HostChannel& channel) {
  failpoint::here("finish");
  channel.publish(Flag::kDone, channel.sequence());
  channel.await_all(Flag::kDone, channel.sequence());
  channel.commit();
}

void reduce(GroupChannel& group, const Terms& terms, const Signature& signature, void* data,
            BufferOwner owner) {
  if (group.spans_hosts()) return hosts::reduce(group, terms, signature, data, owner);
  HostChannel& channel = group.host();
  Reduction reduction(channel, signature, data);
  channel.begin(terms.deadline, terms.background);
  auto announcement = announcement_of(signature);
  const bool small = reduction.bytes() <= HostChannel::kPayloadBytes;
  bool exposing = false;
  if (small) {
    announcement.payload = data;
    announcement.payload_bytes = reduction.bytes();
  } else {
    const transport::Arena& arena = channel.transport().arena();
    exposing = owner == BufferOwner::kUser && reduction.wants_result();
    announcement.memory =
        exposing ? arena.find_writable(data, reduction.bytes()) : arena.find(data, reduction.bytes());
  }
  ExposedMemory exposed(channel, exposing && announcement.memory ? data : nullptr, reduction.bytes());
  channel.announce(announcement);
  const auto combiner = reduction.combiner();
  channel.await_announcements(small ? &combiner : nullptr);
  if (channel.size() == 1) {
    channel.commit();  // a single value is its own sum, average and maximum
  } else if (small) {
    reduction.small();
  } else if (channel.all_have_memory()) {
    reduction.in_place();
  } else if (channel.size() <= kDirectRanks) {
    reduction.staged_direct();
  } else {
    reduction.staged_slices();
  }
  exposed.succeeded();
}

void barrier(GroupChannel& group, const Terms& terms) {
  if (group.spans_hosts()) return hosts::barrier(group, terms);
  HostChannel& channel = group.host();
  channel.begin(terms.deadline, terms.background);
  channel.announce(announcement_of(Signature::barrier()));
  channel.await_announcements();
  channel.commit();
}

}  // namespace lockstep::collectives::internal::algorithms
