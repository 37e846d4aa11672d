#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <lockstep/collectives/kernels/reduce_kernels.h>

// The naive reference of the reduction kernels: one element at a time, floats by way of double (whose double rounding is
// harmless).
namespace lockstep::testing {

/// A byte of a bool tensor, which need not be 0 or 1.
struct Bool {
  uint8_t byte;
};

template <class T>
constexpr bool kIsHalf = std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>;
template <class T>
constexpr bool kIsFloating = kIsHalf<T> || std::is_floating_point_v<T>;
template <class T>
using AccumulatorOf = std::conditional_t<kIsHalf<T>, float, T>;

template <class A>
A step(ReduceOperation operation, A a, A b) {
  if constexpr (std::is_same_v<A, Bool>) {
    const bool x = a.byte != 0, y = b.byte != 0;
    switch (operation) {
      case ReduceOperation::kSum:
      case ReduceOperation::kMax:
      case ReduceOperation::kBitOr:
        return {x || y};
      case ReduceOperation::kBitXor:
        return {x != y};
      default:
        return {x && y};
    }
  } else if constexpr (std::is_floating_point_v<A>) {
    switch (operation) {
      case ReduceOperation::kProduct:
        return static_cast<A>(static_cast<double>(a) * static_cast<double>(b));
      case ReduceOperation::kMin:
        return std::isnan(a) || std::isnan(b) ? A(NAN) : (b < a ? b : a);
      case ReduceOperation::kMax:
        return std::isnan(a) || std::isnan(b) ? A(NAN) : (b > a ? b : a);
      default:
        return static_cast<A>(static_cast<double>(a) + static_cast<double>(b));
    }
  } else {
    const auto x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
    switch (operation) {
      case ReduceOperation::kSum:
      case ReduceOperation::kAverage:
        return static_cast<A>(x + y);
      case ReduceOperation::kProduct:
        return static_cast<A>(x * y);
      case ReduceOperation::kMin:
        return std::min(a, b);
      case ReduceOperation::kMax:
        return std::max(a, b);
      case ReduceOperation::kBitAnd:
        return static_cast<A>(x & y);
      case ReduceOperation::kBitOr:
        return static_cast<A>(x | y);
      default:
        return static_cast<A>(x ^ y);
    }
  }
}

/// What a kernel may store: NaNs are canonical, bools 0 or 1.
template <class T>
T canonical(T value) {
  if constexpr (kIsHalf<T>) {
    if (std::isnan(static_cast<float>(value)))
      return T(std::is_same_v<T, c10::Half> ? 0x7e00 : 0x7fc0, T::from_bits());
  } else if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(value)) return std::numeric_limits<T>::quiet_NaN();
  } else if constexpr (std::is_same_v<T, Bool>) {
    return {value.byte != 0};
  }
  return value;
}

template <class A>
A fold(ReduceOperation operation, const std::vector<A>& values) {
  return canonical(std::accumulate(values.begin() + 1, values.end(), values[0],
                                   [&](A a, A b) { return step(operation, a, b); }));
}

/// By what the inputs of an average are divided; its sum by the rest.
inline double power_of(int64_t divisor) {
  return static_cast<double>(std::bit_ceil(static_cast<uint64_t>(divisor)));
}

template <class T>
AccumulatorOf<T> begun(ReduceOperation operation, T value, int64_t divisor) {
  using A = AccumulatorOf<T>;
  const auto input = static_cast<A>(value);
  if constexpr (kIsFloating<T>) {
    if (operation == ReduceOperation::kAverage)
      return static_cast<A>(static_cast<double>(input) / power_of(divisor));
  }
  return input;
}

template <class T>
T finished(ReduceOperation operation, AccumulatorOf<T> value, int64_t divisor) {
  if constexpr (kIsFloating<T>) {
    using A = AccumulatorOf<T>;
    if (operation == ReduceOperation::kAverage) {
      const double rest = static_cast<double>(divisor) / power_of(divisor);
      value = static_cast<A>(static_cast<double>(value) / rest);
    }
  } else if constexpr (std::is_integral_v<T>) {
    using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    if (operation == ReduceOperation::kAverage)
      value = static_cast<T>(static_cast<Wide>(value) / static_cast<Wide>(divisor));
  }
  return canonical(static_cast<T>(value));
}

}  // namespace lockstep::testing
