#pragma once

#include <algorithm>
#include <cstdint>

#include <ATen/ops/empty.h>

#include <lockstep/base/mix_bits.h>
#include <lockstep/collectives/kernels/reduce_kernels.h>

/// What reductions over hosts are tested with.
namespace lockstep::collectives::internal::algorithms::hosts {

inline bool is_supported(at::ScalarType type, ReduceOperation operation) {
  if (operation == ReduceOperation::kAverage) return type != at::kBool;
  const bool bits = operation == ReduceOperation::kBitAnd || operation == ReduceOperation::kBitOr ||
                    operation == ReduceOperation::kBitXor;
  return !bits || !at::isFloatingType(type);
}

/// Numbers whose sums depend on the order.
inline at::Tensor noise(int rank, int64_t count, at::ScalarType type) {
  at::Tensor values = at::empty({count}, at::kDouble);
  auto* data = values.mutable_data_ptr<double>();
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t bits = mix_bits(static_cast<uint64_t>(rank) << 32 ^ static_cast<uint64_t>(i));
    data[i] = (static_cast<double>(bits >> 11) / 9e15 - 0.5) * (bits % 2 == 0 ? 1 : 1000);
  }
  return values.to(type);
}

/// Inputs for reductions whose results are exact in every type, whatever the order, and the results by plain arithmetic.
/// Averages of integers are truncated, and would differ if a part were divided before the whole.
struct PlainReduction {
  at::ScalarType dtype = at::kFloat;  // of real numbers
  ReduceOperation operation = ReduceOperation::kSum;
  int ranks = 1;
  uint64_t seed = 0;

  bool is_unsigned() const {
    return dtype == at::kBool || dtype == at::kByte || dtype == at::ScalarType::UInt16 ||
           dtype == at::ScalarType::UInt32 || dtype == at::ScalarType::UInt64;
  }

  /// Element i of `rank`, or from `ranks` on the result.
  double value(int rank, int64_t i) const {
    if (rank >= ranks) return result(i);
    const uint64_t bits =
        mix_bits(mix_bits(seed ^ static_cast<uint64_t>(rank) << 40) ^ static_cast<uint64_t>(i));
    if (dtype == at::kBool) return static_cast<double>(bits % 5 != 0);
    switch (operation) {
      case ReduceOperation::kProduct:
        if (bits % 3 == 0 && rank % 4 == 0) return 2;
        return bits % 3 == 1 && !is_unsigned() ? -1 : 1;
      case ReduceOperation::kBitAnd:
      case ReduceOperation::kBitOr:
      case ReduceOperation::kBitXor:
        return static_cast<double>(bits % 128);
      default: {
        const double small = static_cast<double>(bits % 9) - (is_unsigned() ? 0 : 4);
        // Each host's part of a floating-point average is exact, too.
        const bool floating = at::isFloatingType(dtype);
        return operation == ReduceOperation::kAverage && floating ? small * ranks : small;
      }
    }
  }

  at::Tensor tensor(int rank, int64_t count) const {
    at::Tensor values = at::empty({count}, at::kDouble);
    auto* data = values.mutable_data_ptr<double>();
    for (int64_t i = 0; i < count; ++i) data[i] = value(rank, i);
    return values.to(dtype);
  }
  at::Tensor expected(int64_t count) const { return tensor(ranks, count); }

 private:
  double result(int64_t i) const {
    double all = value(0, i);
    for (int rank = 1; rank < ranks; ++rank) all = fold(all, value(rank, i));
    return operation == ReduceOperation::kAverage ? all / ranks : all;
  }
  double fold(double a, double b) const {
    const auto x = static_cast<int64_t>(a);
    const auto y = static_cast<int64_t>(b);
    switch (operation) {
      case ReduceOperation::kProduct:
        return a * b;
      case ReduceOperation::kMin:
        return std::min(a, b);
      case ReduceOperation::kMax:
        return std::max(a, b);
      case ReduceOperation::kBitAnd:
        return static_cast<double>(x & y);
      case ReduceOperation::kBitOr:
        return static_cast<double>(x | y);
      case ReduceOperation::kBitXor:
        return static_cast<double>(x ^ y);
      default:
        return dtype == at::kBool ? static_cast<double>(x | y) : a + b;
    }
  }
};

}  // namespace lockstep::collectives::internal::algorithms::hosts
