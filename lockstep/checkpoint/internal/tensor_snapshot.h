#pragma once

#include <cstdint>
#include <vector>

#include <c10/core/Event.h>

#include <lockstep/checkpoint/internal/pages.h>
#include <lockstep/serialization/state_json.h>

namespace lockstep::checkpoint::internal {

/// The values that tensors had at one moment, in the host's memory. Not thread-safe, but the second step may
/// run in another thread.
class TensorSnapshot {
 public:
  TensorSnapshot() = default;
  TensorSnapshot(const TensorSnapshot&) = delete;
  TensorSnapshot& operator=(const TensorSnapshot&) = delete;
  /// Waits for copies under way, which write into the memory.
  ~TensorSnapshot();

  /// Copies into `memory`, which must stay as it is while the copies are used, and puts each copy in its
  /// tensor's place. With `later`, large tensors in the CPU's memory are left to copy_rest(). Of tensors on
  /// devices it takes the values that the current streams will have made; their copies are done when this
  /// returns, with `later` when copy_rest() does. Once.
  void copy(const std::vector<serialization::StateTensor*>& tensors, Pages& memory, bool later);
  /// Copies what copy() left, in any thread; the tensors must still be there. Throws c10::ValueError for a tensor that was
  /// changed in between, as far as its version tells. Writes through data() have no version (C++'s SGD makes its step so):
  /// of tensors on the CPU some values are compared, too.
  void copy_rest();

 private:
  void await_device_copies();

  /// A copy that is made, or ends, later: to where, and what the tensor must be then.
  struct Rest {
    serialization::StateTensor* tensor;
    char* to;
    uint32_t version;
    std::vector<uint64_t> sample;  // some of its values, by sample_of(); of a tensor on the CPU
  };
  std::vector<Rest> rest_;
  std::vector<c10::Event> device_copies_;  // the ends of copies that are under way
};

}  // namespace lockstep::checkpoint::internal
