#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <lockstep/bench/internal/pattern.h>

namespace lockstep::bench::internal {
namespace {

template <class Function>
void with_type(c10::ScalarType type, Function function) {
  switch (type) {
    case c10::ScalarType::Float:
      return function(float());
    case c10::ScalarType::Double:
      return function(double());
    case c10::ScalarType::Half:
      return function(c10::Half());
    case c10::ScalarType::BFloat16:
      return function(c10::BFloat16());
    case c10::ScalarType::Char:
      return function(int8_t());
    case c10::ScalarType::Byte:
      return function(uint8_t());
    case c10::ScalarType::Short:
      return function(int16_t());
    case c10::ScalarType::Int:
      return function(int32_t());
    case c10::ScalarType::Long:
      return function(int64_t());
    default:
      TORCH_INTERNAL_ASSERT(false, "no pattern of type ", c10::toString(type));
  }
}

/// A double as T: floats are rounded, integers wrap around as their sums do.
template <class T>
T rounded(double value) {
  if constexpr (std::is_integral_v<T>)
    return static_cast<T>(static_cast<int64_t>(value));
  else
    return static_cast<T>(static_cast<std::conditional_t<std::is_same_v<T, double>, double, float>>(value));
}

template <class T>
int64_t count_differing(const char* got, const char* expected, size_t bytes, double tolerance) {
  int64_t wrong = 0;
  for (size_t at = 0; at < bytes; at += sizeof(T)) {
    T a, b;
    std::memcpy(&a, got + at, sizeof(T));
    std::memcpy(&b, expected + at, sizeof(T));
    if (a == b) continue;
    const double difference = std::abs(static_cast<double>(a) - static_cast<double>(b));
    // Negated, so that a NaN is wrong.
    if (tolerance == 0 || !(difference <= tolerance * std::abs(static_cast<double>(b)))) ++wrong;
  }
  return wrong;
}

/// The distance of 1 to the next larger number of the type.
double epsilon(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Half:
      return 1.0 / (1 << 10);
    case c10::ScalarType::BFloat16:
      return 1.0 / (1 << 7);
    case c10::ScalarType::Float:
      return std::numeric_limits<float>::epsilon();
    default:
      return std::numeric_limits<double>::epsilon();
  }
}

/// 64 bits that look random (the finaliser of SplitMix64).
uint64_t mix(int rank, int64_t iteration, int64_t index) {
  uint64_t x = static_cast<uint64_t>(index) * 0x9e3779b97f4a7c15 +
               static_cast<uint64_t>(iteration) * 0xd1b54a32d192ed03 +
               static_cast<uint64_t>(rank) * 0x8cb92ba72f3d8dd7;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

Pattern::Pattern(c10::ScalarType type, int64_t length, const std::function<double(int64_t)>& value,
                 double tolerance)
    : type_(type), tolerance_(tolerance), element_bytes_(static_cast<int64_t>(c10::elementSize(type))) {
  const int64_t elements = std::min(length, kPeriod);
  block_.resize(static_cast<size_t>(elements * element_bytes_));
  with_type(type, [&]<class T>(T) {
    for (int64_t i = 0; i < elements; ++i) {
      const T element = rounded<T>(value(i));
      std::memcpy(block_.data() + i * element_bytes_, &element, sizeof(T));
    }
  });
}

template <class Visit>
void Pattern::for_each_run(int64_t elements, int64_t first, Visit visit) const {
  int64_t offset = 0;
  for (int64_t done = 0; done < elements;) {
    const int64_t phase = (first + done) % kPeriod;
    const int64_t run = std::min(elements - done, kPeriod - phase);
    TORCH_INTERNAL_ASSERT((phase + run) * element_bytes_ <= static_cast<int64_t>(block_.size()));
    visit(offset, block_.data() + phase * element_bytes_, static_cast<size_t>(run * element_bytes_));
    done += run;
    offset += run * element_bytes_;
  }
}

void Pattern::fill(void* data, int64_t elements, int64_t first) const {
  for_each_run(elements, first, [&](int64_t offset, const char* part, size_t bytes) {
    std::memcpy(static_cast<char*>(data) + offset, part, bytes);
  });
}

int64_t Pattern::count_wrong(const void* data, int64_t elements, int64_t first) const {
  int64_t wrong = 0;
  for_each_run(elements, first, [&](int64_t offset, const char* part, size_t bytes) {
    const char* got = static_cast<const char*>(data) + offset;
    if (std::memcmp(got, part, bytes) == 0) return;
    with_type(type_, [&]<class T>(T) { wrong += count_differing<T>(got, part, bytes, tolerance_); });
  });
  return wrong;
}

Contributions::Contributions(c10::ScalarType type, std::optional<RedOpType> op, int ranks, int64_t length)
    : type_(type), op_(op), ranks_(ranks), length_(length) {}

int64_t Contributions::value(int rank, int64_t iteration, int64_t index) const {
  const uint64_t random = mix(rank, iteration, index) >> 32;
  if (op_ == RedOpType::SUM || op_ == RedOpType::AVG) {
    // All ranks' sum stays below 128 as long as there are at most 127.
    return static_cast<int64_t>(random % static_cast<uint64_t>(std::clamp(127 / ranks_, 1, 7) + 1));
  }
  if (op_ == RedOpType::PRODUCT) return rank < 6 ? 1 + static_cast<int64_t>(random & 1) : 1;  // at most 64
  return static_cast<int64_t>(random & 127);
}

double Contributions::reduced_value(int64_t iteration, int64_t index) const {
  int64_t result = value(0, iteration, index);
  for (int rank = 1; rank < ranks_; ++rank) {
    const int64_t next = value(rank, iteration, index);
    switch (op_.value()) {
      case RedOpType::SUM:
      case RedOpType::AVG:
        result += next;
        break;
      case RedOpType::PRODUCT:
        result *= next;
        break;
      case RedOpType::MIN:
        result = std::min(result, next);
        break;
      case RedOpType::MAX:
        result = std::max(result, next);
        break;
      case RedOpType::BAND:
        result &= next;
        break;
      case RedOpType::BOR:
        result |= next;
        break;
      case RedOpType::BXOR:
        result ^= next;
        break;
      default:
        TORCH_INTERNAL_ASSERT(false, "no expectation for this reduce operation");
    }
  }
  const auto total = static_cast<double>(result);
  return op_ == RedOpType::AVG ? total / ranks_ : total;
}

Pattern Contributions::of(int rank, int64_t iteration) const {
  return Pattern(type_, length_,
                 [&](int64_t index) { return static_cast<double>(value(rank, iteration, index)); });
}

Pattern Contributions::reduced(int64_t iteration) const {
  // A quotient may be rounded once more than ours; integers' are exact.
  const double tolerance = op_ == RedOpType::AVG ? 2 * epsilon(type_) : 0;
  return Pattern(
      type_, length_, [&](int64_t index) { return reduced_value(iteration, index); }, tolerance);
}

}  // namespace lockstep::bench::internal
