#pragma once

#include <cstddef>
#include <cstdint>

/// What reduce_kernels.h and the files compiled for one instruction set share. Those files see no other
/// header: an inline function of the standard library or of c10 that were compiled with AVX there could be
/// the copy which the linker keeps for the whole program, and would then end it on a machine without AVX.
namespace lockstep {

/// What is computed from the ranks' values; the meaning of each name is torch.distributed.ReduceOp's.
enum class ReduceOperation : uint8_t { kSum, kAverage, kProduct, kMin, kMax, kBitAnd, kBitOr, kBitXor };

/// The functions for one (element type, operation). Counts are in elements. All functions are pure and
/// thread-safe, take pointers of any alignment, accept a count of zero (pointers may then be null), and need
/// at least one input.
///
/// Each element is folded from the first input to the last, so its bits depend on neither the way in which a
/// range is cut, nor the instruction set, nor alignment. bfloat16 and float16 are folded in float32 and
/// rounded once, to nearest even. Their averages, float32's and float64's are finite where all inputs are: each input is
/// multiplied by the inverse of the first power of two that is no less than the number of ranks, which is exact but for
/// quotients that are denormal, and the sum is divided by what this leaves of the number. Integers wrap around; their average is the
/// quotient of what the sum has come to, truncated toward zero, as NCCL's. Minimum and maximum are NaN as soon as one input is, as
/// torch.minimum's; of equal values (-0 and +0) the earlier input's stays. Every NaN that is written is the
/// canonical quiet one (0x7fc00000 and alike), because which payload survives an addition is the compiler's
/// choice. Bools are written as 0 or 1.
struct ReduceKernels {
  /// Bytes of one element of the tensors.
  size_t element_size;
  /// Bytes of one element of a partial result: float's for bfloat16 and float16, else element_size.
  size_t accumulator_size;

  /// outputs[j][i] = inputs[0][i] op inputs[1][i] op ..., for every j; kAverage is that of n_inputs. An
  /// output may be the very buffer of an input (same address); no other overlap.
  void (*reduce)(void* const* outputs, size_t n_outputs, const void* const* inputs, size_t n_inputs,
                 size_t count);

  /// The leaves and inner nodes of a tree: the partial result, in the accumulator's type, of some ranks'
  /// inputs; kAverage prepares the division by `divisor` (the number of ranks), other operations ignore it. The
  /// accumulator overlaps no input.
  void (*partial)(void* accumulator, const void* const* inputs, size_t n_inputs, int64_t divisor,
                  size_t count);

  /// The tree's root: folds partial results in order and writes the element type; kAverage divides, with the
  /// same `divisor`. Where accumulator_size is element_size, an
  /// output may be the very buffer of an accumulator; no other overlap.
  void (*finish)(void* const* outputs, size_t n_outputs, const void* const* accumulators,
                 size_t n_accumulators, int64_t divisor, size_t count);
};

namespace collectives::internal {

/// The element types that the kernels know.
enum class ReduceElement : uint8_t {
  kBool,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt8,
  kUInt16,
  kUInt32,
  kUInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64
};
inline constexpr size_t kReduceElements = 13;
inline constexpr size_t kReduceOperations = 8;

/// Indexed by element type and operation. A combination that is not supported has null functions.
struct ReduceTable {
  ReduceKernels entries[kReduceElements][kReduceOperations];
};

// One table per instruction set; only the first exists on machines that are not x86-64.
extern const ReduceTable kReduceTableDefault;
extern const ReduceTable kReduceTableAvx2;
extern const ReduceTable kReduceTableAvx512;

}  // namespace collectives::internal
}  // namespace lockstep
