#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include <lockstep/base/failpoint.h>
#include <lockstep/collectives/internal/algorithms.h>

namespace lockstep::algorithms {
namespace {

using transport::GroupChannel;
using Flag = GroupChannel::Flag;

constexpr size_t kCacheLine = 64;
std::atomic<size_t> chunk_bytes_setting{size_t{256} << 10};

/// memcpy(3), which takes no null pointer: the data of an empty tensor.
void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

/// A range of elements.
struct Range {
  size_t begin;
  size_t count;
};

/// Part `index` of `count` elements cut into `parts`, on cache-line boundaries so that no line has two
/// writers.
Range slice_of(size_t count, size_t element_size, int parts, int index) {
  const size_t per_line = std::max<size_t>(1, kCacheLine / element_size);
  const size_t lines = (count + per_line - 1) / per_line;
  const size_t begin = std::min(count, lines * index / parts * per_line);
  const size_t end = std::min(count, lines * (index + 1) / parts * per_line);
  return {begin, end - begin};
}

/// Combines small tensors on their way up the tree of a group beyond eight ranks.
class ReduceCombiner final : public transport::PayloadCombiner {
 public:
  ReduceCombiner(const ReduceKernels& kernels, int ranks, size_t count)
      : kernels_(kernels), ranks_(ranks), count_(count) {}
  void combine(void* partial, const std::vector<const void*>& inputs) const override {
    kernels_.partial(partial, inputs.data(), inputs.size(), count_);
  }
  void finish(void* result, const std::vector<const void*>& partials) const override {
    kernels_.finish(&result, 1, partials.data(), partials.size(), ranks_, count_);
  }

 private:
  const ReduceKernels& kernels_;
  int ranks_;
  size_t count_;
};

/// A tensor's way through the double-buffered scratch, chunk by chunk. Counts chunks over the group's whole
/// life, so that flags only grow.
class Chunks {
 public:
  Chunks(GroupChannel& channel, size_t bytes, size_t element_size)
      : channel_(channel),
        bytes_(bytes),
        chunk_(std::max(chunk_bytes() / element_size, size_t{1}) * element_size) {}

  size_t count() const { return (bytes_ + chunk_ - 1) / chunk_; }
  size_t offset(size_t k) const { return k * chunk_; }
  size_t size(size_t k) const { return std::min(chunk_, bytes_ - k * chunk_); }

  /// This rank's or another's half of the scratch for chunk k.
  std::byte* own(size_t k) { return channel_.scratch(2 * capacity()) + (k & 1) * capacity(); }
  std::byte* of(int rank, size_t k) { return channel_.scratch_of(rank) + (k & 1) * capacity(); }

  /// Copies chunk k of `data` into the own scratch and says so.
  void stage(size_t k, const void* data) {
    copy_bytes(own(k), static_cast<const std::byte*>(data) + offset(k), size(k));
    channel_.publish(Flag::kStaged, number(k));
  }
  /// The value of a flag once chunk k has passed.
  uint64_t number(size_t k) const { return channel_.chunk_base() + k + 1; }
  /// All members call it at the end, staged anything or not.
  void finish() { channel_.add_chunks(count()); }

 private:
  /// Halves have one size for all operations; they begin on cache lines.
  static size_t capacity() { return (chunk_bytes() + kCacheLine - 1) / kCacheLine * kCacheLine; }

  GroupChannel& channel_;
  size_t bytes_;
  size_t chunk_;
};

/// Announces with the data themselves when they are small (then true), else with where they lie.
bool announce_data(GroupChannel& channel, transport::Announcement& announcement, const void* data,
                   size_t bytes) {
  const bool small = bytes <= GroupChannel::kPayloadBytes;
  if (small) {
    announcement.payload = data;
    announcement.payload_bytes = bytes;
  } else {
    announcement.memory = channel.transport().arena().find(data, bytes);
  }
  channel.announce(announcement);
  return small;
}

/// The last phase of every operation beyond the announcements.
void finish(GroupChannel& channel) {
  failpoint::here("finish");
  channel.publish(Flag::kDone, channel.sequence());
  channel.await_all(Flag::kDone, channel.sequence());
  channel.commit();
}

void all_reduce_in_place(GroupChannel& channel, const ReduceKernels& kernels, size_t count) {
  const int ranks = channel.size();
  const Range slice = slice_of(count, kernels.element_size, ranks, channel.rank());
  std::vector<void*> outputs;
  for (int rank = 0; rank < ranks; ++rank) {
    outputs.push_back(channel.memory(rank) + slice.begin * kernels.element_size);
  }
  failpoint::here("reduce");
  if (slice.count > 0) kernels.reduce(outputs.data(), ranks, outputs.data(), ranks, slice.count);
  finish(channel);
}

// Each rank copies its chunk into the scratch and reads all others': with two or three ranks that moves no
// more bytes than slices do, and needs one wait less a chunk.
void all_reduce_staged_direct(GroupChannel& channel, const ReduceKernels& kernels, void* data, size_t bytes) {
  const int ranks = channel.size();
  Chunks chunks(channel, bytes, kernels.element_size);
  std::vector<const void*> inputs(ranks);
  chunks.stage(0, data);
  for (size_t k = 0; k < chunks.count(); ++k) {
    if (k + 1 < chunks.count()) {
      // The half of chunk k+1 is free once everybody has read chunk k−1 from it.
      if (k > 0) channel.await_all(Flag::kReduced, chunks.number(k - 1));
      chunks.stage(k + 1, data);
    }
    channel.await_all(Flag::kStaged, chunks.number(k));
    void* output = static_cast<std::byte*>(data) + chunks.offset(k);
    for (int rank = 0; rank < ranks; ++rank) {
      inputs[rank] = rank == channel.rank() ? output : chunks.of(rank, k);
    }
    failpoint::here("reduce");
    kernels.reduce(&output, 1, inputs.data(), ranks, chunks.size(k) / kernels.element_size);
    channel.publish(Flag::kReduced, chunks.number(k));
  }
  chunks.finish();
  finish(channel);
}

// Each rank reduces its slice of the chunk into its own scratch, where the others fetch it.
void all_reduce_staged_slices(GroupChannel& channel, const ReduceKernels& kernels, void* data, size_t bytes) {
  const int ranks = channel.size();
  const size_t element = kernels.element_size;
  Chunks chunks(channel, bytes, element);
  std::vector<const void*> inputs(ranks);
  chunks.stage(0, data);
  for (size_t k = 0; k < chunks.count(); ++k) {
    const size_t count = chunks.size(k) / element;
    const Range own = slice_of(count, element, ranks, channel.rank());
    channel.await_all(Flag::kStaged, chunks.number(k));
    for (int rank = 0; rank < ranks; ++rank) inputs[rank] = chunks.of(rank, k) + own.begin * element;
    void* output = chunks.own(k) + own.begin * element;
    failpoint::here("reduce");
    if (own.count > 0) kernels.reduce(&output, 1, inputs.data(), ranks, own.count);
    channel.publish(Flag::kReduced, chunks.number(k));
    channel.await_all(Flag::kReduced, chunks.number(k));
    // All have reduced chunk k, so all have fetched chunk k−1, whose half the next chunk takes.
    if (k + 1 < chunks.count()) chunks.stage(k + 1, data);
    for (int rank = 0; rank < ranks; ++rank) {
      const Range slice = slice_of(count, element, ranks, rank);
      copy_bytes(static_cast<std::byte*>(data) + chunks.offset(k) + slice.begin * element,
                 chunks.of(rank, k) + slice.begin * element, slice.count * element);
    }
  }
  chunks.finish();
  finish(channel);
}

}  // namespace

size_t chunk_bytes() {
  return chunk_bytes_setting.load(std::memory_order_relaxed);
}
void set_chunk_bytes_for_testing(size_t bytes) {
  chunk_bytes_setting.store(bytes, std::memory_order_relaxed);
}

Path choose_path(size_t bytes, bool all_in_arena, int ranks) {
  constexpr int kDirectRanks = 3;
  if (bytes <= GroupChannel::kPayloadBytes) return Path::kPayload;
  if (all_in_arena) return Path::kInPlace;
  return ranks <= kDirectRanks ? Path::kStagedDirect : Path::kStagedSlices;
}

void all_reduce(GroupChannel& channel, const Terms& terms, const Signature& signature, void* data) {
  const auto& kernels = reduce_kernels(static_cast<at::ScalarType>(signature.dtype),
                                       static_cast<ReduceOperation>(signature.operation));
  const auto count = static_cast<size_t>(signature.numel);
  const size_t bytes = count * kernels.element_size;
  channel.begin(terms.deadline, terms.background);
  auto announcement = announcement_of(signature);
  const ReduceCombiner combiner(kernels, channel.size(), count);
  const bool small = announce_data(channel, announcement, data, bytes);
  channel.await_announcements(small ? &combiner : nullptr);
  if (channel.size() == 1) return channel.commit();  // a single value is its own sum, average and maximum
  if (small) {
    // The announcements stay until the operation after the next is announced: success can be made final
    // first.
    channel.commit();
    if (channel.size() > GroupChannel::kFlatRanks) {
      copy_bytes(data, channel.combined_payload(), bytes);
      return;
    }
    std::array<const void*, GroupChannel::kFlatRanks> inputs{};
    for (int rank = 0; rank < channel.size(); ++rank) inputs[rank] = channel.payload(rank);
    kernels.reduce(&data, 1, inputs.data(), channel.size(), count);
    return;
  }
  switch (choose_path(bytes, channel.all_have_memory(), channel.size())) {
    case Path::kPayload:
      break;
    case Path::kInPlace:
      return all_reduce_in_place(channel, kernels, count);
    case Path::kStagedDirect:
      return all_reduce_staged_direct(channel, kernels, data, bytes);
    case Path::kStagedSlices:
      return all_reduce_staged_slices(channel, kernels, data, bytes);
  }
}

void broadcast(GroupChannel& channel, const Terms& terms, const Signature& signature, void* data,
               size_t bytes) {
  const int root = signature.root;
  const bool is_root = channel.rank() == root;
  channel.begin(terms.deadline, terms.background);
  auto announcement = announcement_of(signature);
  const bool small = bytes <= GroupChannel::kPayloadBytes;
  if (small && is_root) {
    announcement.payload = data;
    announcement.payload_bytes = bytes;
  }
  // Only the root's memory counts: the others read it and write where they like.
  if (!small)
    announcement.memory =
        is_root ? channel.transport().arena().find(data, bytes) : transport::MemoryReference{};
  channel.announce(announcement);
  channel.await_announcements();
  if (small) {
    channel.commit();
    if (!is_root) copy_bytes(data, channel.payload(root), bytes);
    return;
  }
  if (channel.all_have_memory()) {
    if (!is_root) copy_bytes(data, channel.memory(root), bytes);
    return finish(channel);
  }
  Chunks chunks(channel, bytes, 1);
  for (size_t k = 0; k < chunks.count(); ++k) {
    if (is_root) {
      if (k > 1) {
        // Whoever only receives says "reduced" for "read"; the root itself has nothing to wait for from
        // itself.
        for (int rank = 0; rank < channel.size(); ++rank) {
          if (rank != root) channel.await_rank(Flag::kReduced, rank, chunks.number(k - 2));
        }
      }
      chunks.stage(k, data);
    } else {
      channel.await_rank(Flag::kStaged, root, chunks.number(k));
      copy_bytes(static_cast<std::byte*>(data) + chunks.offset(k), chunks.of(root, k), chunks.size(k));
      channel.publish(Flag::kReduced, chunks.number(k));
    }
  }
  chunks.finish();
  finish(channel);
}

void all_gather(GroupChannel& channel, const Terms& terms, const Signature& signature, const void* input,
                const std::vector<void*>& outputs, size_t bytes) {
  const int ranks = channel.size();
  channel.begin(terms.deadline, terms.background);
  auto announcement = announcement_of(signature);
  const bool small = announce_data(channel, announcement, input, bytes);
  channel.await_announcements();
  if (small) {
    channel.commit();
    for (int rank = 0; rank < ranks; ++rank) copy_bytes(outputs[rank], channel.payload(rank), bytes);
    return;
  }
  const int own = channel.rank();
  if (outputs[own] != input) copy_bytes(outputs[own], input, bytes);
  if (channel.all_have_memory()) {
    for (int step = 1; step < ranks; ++step) {
      // Each rank begins with another peer, so that not all read the same memory at once.
      const int peer = (own + step) % ranks;
      copy_bytes(outputs[peer], channel.memory(peer), bytes);
    }
    return finish(channel);
  }
  Chunks chunks(channel, bytes, 1);
  chunks.stage(0, input);
  for (size_t k = 0; k < chunks.count(); ++k) {
    if (k + 1 < chunks.count()) {
      if (k > 0) channel.await_all(Flag::kReduced, chunks.number(k - 1));
      chunks.stage(k + 1, input);
    }
    channel.await_all(Flag::kStaged, chunks.number(k));
    for (int step = 1; step < ranks; ++step) {
      const int peer = (own + step) % ranks;
      copy_bytes(static_cast<std::byte*>(outputs[peer]) + chunks.offset(k), chunks.of(peer, k),
                 chunks.size(k));
    }
    channel.publish(Flag::kReduced, chunks.number(k));
  }
  chunks.finish();
  finish(channel);
}

void barrier(GroupChannel& channel, const Terms& terms) {
  channel.begin(terms.deadline, terms.background);
  channel.announce(announcement_of(Signature::barrier()));
  channel.await_announcements();
  channel.commit();
}

}  // namespace lockstep::algorithms
