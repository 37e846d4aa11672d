#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace lockstep::testing {

using Random = std::mt19937_64;

/// A whole number in [low, high]. The same on every machine, which std::uniform_int_distribution is not.
int64_t draw(Random& random, int64_t low, int64_t high);

/// One tensor of a collective's call on one rank: what it holds before and what it must hold afterwards.
struct Slot {
  at::Tensor initial;       ///< undefined: nothing that matters (an output)
  at::Tensor expected;      ///< undefined: not one byte may change
  bool contiguous = false;  ///< the operation wants no other layout
};

/// Uninitialised memory that the peers see: `numel` elements.
using SharedMemory = std::function<at::Tensor(int64_t numel, at::ScalarType type)>;

/// A slot's tensor as a view into a larger buffer whose other bytes, before it, after it and in its gaps,
/// hold a pattern: whatever is written beside the tensor's own elements is found. Sparse tensors are plain.
class GuardedTensor {
 public:
  /// `local` decides what may differ by tensor and rank: the memory (plain, or from `shared`), the place
  /// within it, and unless the slot wants it contiguous the layout (transposed, channels last, with gaps). On
  /// another device than the CPU the memory is that device's.
  GuardedTensor(const Slot& slot, Random& local, const SharedMemory& shared, c10::Device device = c10::kCPU);

  const at::Tensor& tensor() const { return tensor_; }
  /// What is wrong after the operation; empty if nothing is.
  std::string problem() const;
  /// The same after an operation that failed half-way: its results may hold anything, nothing else may.
  std::string problem_after_failure() const;
  /// Whether any byte differs from what was there before the operation.
  bool changed() const;

 private:
  std::string sparse_problem() const;
  /// The buffer, or what it holds on its device by now.
  at::Tensor host_buffer() const;
  /// The tensor's elements in a copy of the buffer's bytes.
  at::Tensor elements_of(std::vector<std::byte>& bytes) const;

  Slot slot_;
  at::Tensor buffer_;  // flat
  at::Tensor tensor_;
  std::vector<std::byte> before_;
};

}  // namespace lockstep::testing
