#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include <ATen/Context.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <lockstep/collectives/kernels/reduce_kernels.h>
#include <lockstep/collectives/kernels/testing/capabilities.h>
#include <lockstep/collectives/kernels/testing/reduce_reference.h>

namespace lockstep::reduce_kernels_test {
namespace {

using testing::AccumulatorOf;
using testing::begun;
using testing::Bool;
using testing::canonical;
using testing::finished;
using testing::fold;
using testing::kIsFloating;
using Operation = ReduceOperation;
constexpr Operation kOperations[] = {Operation::kSum,   Operation::kAverage, Operation::kProduct,
                                     Operation::kMin,   Operation::kMax,     Operation::kBitAnd,
                                     Operation::kBitOr, Operation::kBitXor};

std::vector<const char*> capabilities() {
  std::vector<const char*> names;
  for (const CpuCapability capability : testing::capabilities()) names.push_back(to_string(capability));
  return names;
}

bool supported(bool floating, bool boolean, Operation operation) {
  if (operation == Operation::kAverage) return !boolean;
  return operation < Operation::kBitAnd || !floating || boolean;
}

/// Elements at an address of any alignment, between guard bytes that must not change.
template <class T>
class Buffer {
 public:
  Buffer(size_t count, size_t offset) : offset_(kGuard + offset), count_(count) {
    bytes_.assign(offset_ + count * sizeof(T) + kGuard, kGuardByte);
  }
  T get(size_t index) const {
    T value;
    std::memcpy(&value, &bytes_[offset_ + index * sizeof(T)], sizeof(T));
    return value;
  }
  void set(size_t index, T value) { std::memcpy(&bytes_[offset_ + index * sizeof(T)], &value, sizeof(T)); }
  void* data() { return &bytes_[offset_]; }
  std::string difference(const std::vector<T>& expected) const {
    if (expected.size() != count_) return "the sizes differ";
    for (size_t i = 0; i < count_; ++i) {
      const T value = get(i);
      if (std::memcmp(&value, &expected[i], sizeof(T)) != 0)
        return "element " + std::to_string(i) + " differs";
    }
    for (size_t i = 0; i < bytes_.size(); ++i) {
      const bool inside = i >= offset_ && i < offset_ + count_ * sizeof(T);
      if (!inside && bytes_[i] != kGuardByte) return "a byte outside was written, at " + std::to_string(i);
    }
    return "";
  }

 private:
  static constexpr size_t kGuard = 64;
  static constexpr uint8_t kGuardByte = 0xa5;
  size_t offset_;
  size_t count_;
  std::vector<uint8_t> bytes_;
};

template <class B>
std::vector<void*> pointers(std::vector<B>& buffers) {
  std::vector<void*> list;
  for (B& buffer : buffers) list.push_back(buffer.data());
  return list;
}

const void* const* as_inputs(const std::vector<void*>& list) {
  return const_cast<const void* const*>(list.data());
}

/// Any bits (NaNs of all payloads, denormals, infinities), or a tame number, so that sums are not all NaN.
template <class T>
T random_value(std::mt19937_64& random) {
  const uint64_t bits = random();
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  if constexpr (kIsFloating<T>) {
    const unsigned kind = (bits >> 56) & 15u;
    if (kind == 0) return static_cast<T>(-0.0f);
    if (kind == 1) return static_cast<T>(bits & 1u ? INFINITY : -INFINITY);
    if (kind > 3) return static_cast<T>(static_cast<float>(static_cast<int32_t>(bits)) * 1e-8f);
  }
  return value;
}

template <class T>
class ReduceKernelsOf : public ::testing::Test {
 public:
  static constexpr at::ScalarType type() {
    if constexpr (std::is_same_v<T, Bool>) {
      return at::kBool;
    } else {
      return c10::CppTypeToScalarType<T>::value;
    }
  }
  static std::vector<Operation> operations() {
    std::vector<Operation> list;
    for (const Operation operation : kOperations) {
      if (supported(kIsFloating<T>, type() == at::kBool, operation)) list.push_back(operation);
    }
    return list;
  }

  std::vector<Buffer<T>> random_buffers(size_t n, size_t count) {
    std::vector<Buffer<T>> buffers;
    for (size_t k = 0; k < n; ++k) {
      buffers.emplace_back(count, random() % 3 == 0 ? random() % 64 : 0);
      for (size_t i = 0; i < count; ++i) buffers[k].set(i, random_value<T>(random));
    }
    return buffers;
  }

  /// Element i of inputs [begin, end), as accumulators.
  static std::vector<AccumulatorOf<T>> column(Operation operation, const std::vector<Buffer<T>>& inputs,
                                              size_t i, size_t begin, size_t end) {
    std::vector<AccumulatorOf<T>> values;
    for (size_t k = begin; k < end; ++k) {
      values.push_back(begun(operation, inputs[k].get(i), static_cast<int64_t>(inputs.size())));
    }
    return values;
  }

  void check_reduce(Operation operation, size_t n_inputs, size_t count) {
    const std::vector<Buffer<T>> original = random_buffers(n_inputs, count);
    std::vector<T> expected;
    for (size_t i = 0; i < count; ++i) {
      expected.push_back(finished<T>(operation, fold(operation, column(operation, original, i, 0, n_inputs)),
                                     static_cast<int64_t>(n_inputs)));
    }
    for (const char* capability : capabilities()) {
      const ReduceKernels& kernels = reduce_kernels_for(capability, type(), operation);
      ASSERT_EQ(kernels.element_size, sizeof(T));
      ASSERT_EQ(kernels.accumulator_size, sizeof(AccumulatorOf<T>));
      const size_t picked = random() % n_inputs;
      for (const std::string mode : {"in place", "into one input", "elsewhere", "in place and elsewhere"}) {
        std::vector<Buffer<T>> inputs = original;
        std::vector<Buffer<T>> others = random_buffers(1 + random() % 10, count);
        std::vector<void*> outputs = mode == "elsewhere" ? pointers(others) : pointers(inputs);
        if (mode == "into one input") outputs = {outputs[picked]};
        if (mode == "in place and elsewhere") {
          for (void* other : pointers(others)) outputs.push_back(other);
        }
        kernels.reduce(outputs.data(), outputs.size(), as_inputs(pointers(inputs)), n_inputs, count);
        const auto check = [&](Buffer<T>& buffer, const char* what, size_t index) {
          const bool written = std::find(outputs.begin(), outputs.end(), buffer.data()) != outputs.end();
          std::vector<T> wanted = expected;
          if (!written) {
            for (size_t i = 0; i < count; ++i) wanted[i] = original[index].get(i);
          }
          ASSERT_EQ(buffer.difference(wanted), "")
              << to_string(operation) << " of " << n_inputs << " inputs of " << count << " elements, " << mode
              << ", " << capability << ": " << what << " " << index;
        };
        for (size_t k = 0; k < n_inputs; ++k) check(inputs[k], "input", k);
        if (mode == "elsewhere" || mode == "in place and elsewhere") {
          for (size_t j = 0; j < others.size(); ++j) check(others[j], "output", j);
        }
        if (this->HasFatalFailure()) return;
      }
    }
  }

  /// Groups of `group` ranks each make a partial result; the root folds those.
  void check_tree(Operation operation, size_t n_inputs, size_t group, size_t count) {
    using A = AccumulatorOf<T>;
    std::vector<Buffer<T>> inputs = random_buffers(n_inputs, count);
    const int64_t divisor = static_cast<int64_t>(n_inputs);
    const size_t n_groups = (n_inputs + group - 1) / group;
    std::vector<std::vector<A>> partials(n_groups);
    std::vector<T> expected;
    for (size_t i = 0; i < count; ++i) {
      std::vector<A> parts;
      for (size_t g = 0; g < n_groups; ++g) {
        const size_t end = std::min(n_inputs, (g + 1) * group);
        parts.push_back(fold(operation, column(operation, inputs, i, g * group, end)));
        partials[g].push_back(parts.back());
      }
      expected.push_back(finished<T>(operation, fold(operation, parts), divisor));
    }
    for (const char* capability : capabilities()) {
      SCOPED_TRACE(std::string(capability) + " " + to_string(operation) + " n=" + std::to_string(n_inputs) +
                   " group=" + std::to_string(group) + " count=" + std::to_string(count));
      const ReduceKernels& kernels = reduce_kernels_for(capability, type(), operation);
      std::vector<Buffer<A>> accumulators;
      const std::vector<void*> list = pointers(inputs);
      for (size_t g = 0; g < n_groups; ++g) {
        accumulators.emplace_back(count, random() % 8);
        kernels.partial(accumulators[g].data(), as_inputs(list) + g * group,
                        std::min(group, n_inputs - g * group), divisor, count);
        ASSERT_EQ(accumulators[g].difference(partials[g]), "") << "group " << g;
      }
      std::vector<Buffer<T>> outputs = random_buffers(1 + random() % 10, count);
      kernels.finish(pointers(outputs).data(), outputs.size(), as_inputs(pointers(accumulators)), n_groups,
                     divisor, count);
      for (Buffer<T>& output : outputs) ASSERT_EQ(output.difference(expected), "");
    }
  }

  std::mt19937_64 random{20240607};
};

using Types = ::testing::Types<Bool, int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t,
                               c10::Half, c10::BFloat16, float, double>;
TYPED_TEST_SUITE(ReduceKernelsOf, Types);

TYPED_TEST(ReduceKernelsOf, ReduceEqualsTheReference) {
  for (const Operation operation : this->operations()) {
    for (size_t n = 1; n <= 9; ++n) {
      for (const size_t count : {0, 1, 2, 3, 5, 15, 16, 17, 63, 64, 67, 129, 331}) {
        this->check_reduce(operation, n, count);
        if (this->HasFatalFailure()) return;
      }
    }
  }
}

// Above 9 inputs or 8 outputs the range is cut into blocks of 16 KiB of accumulators.
TYPED_TEST(ReduceKernelsOf, ReduceInBlocksEqualsTheReference) {
  const size_t block = 16384 / sizeof(AccumulatorOf<TypeParam>);
  for (const Operation operation : this->operations()) {
    for (const size_t n : {10, 17, 18, 25}) {
      this->check_reduce(operation, n, 1 + this->random() % 99);
      if (this->HasFatalFailure()) return;
    }
    this->check_reduce(operation, 11, block + 1 + this->random() % 99);
    if (this->HasFatalFailure()) return;
  }
  this->check_reduce(Operation::kSum, 9, 2 * block);
}

TYPED_TEST(ReduceKernelsOf, TreeEqualsTheReferenceOfTheSameTree) {
  for (const Operation operation : this->operations()) {
    for (const size_t n : {1, 2, 3, 8, 9, 16, 23}) {
      for (const size_t group : {1, 2, 4, 8, 11}) {
        for (const size_t count : {0, 1, 19, 200}) {
          this->check_tree(operation, n, group, count);
          if (this->HasFatalFailure()) return;
        }
      }
    }
  }
}

/// Every bit pattern widened, and floats at and about every rounding boundary narrowed, against c10's
/// conversions.
template <class T>
void check_conversions(at::ScalarType type) {
  constexpr size_t kAll = 65536;
  std::vector<T> narrow(kAll), narrowed;
  std::vector<float> wide(kAll), near;
  for (size_t i = 0; i < kAll; ++i) narrow[i] = T(static_cast<uint16_t>(i), T::from_bits());
  for (const T value : narrow) {
    uint32_t bits;
    const auto exact = static_cast<float>(value);
    std::memcpy(&bits, &exact, sizeof(bits));
    for (const uint32_t half_step : {0x1000u, 0x8000u}) {
      for (const uint32_t delta : {half_step, half_step - 1, half_step + 1, 0u - 1, 1u}) {
        const uint32_t moved = bits + delta;
        float other;
        std::memcpy(&other, &moved, sizeof(other));
        near.push_back(other);
      }
    }
  }
  std::mt19937 random(7);
  for (size_t i = 0; i < kAll; ++i)
    near.push_back(std::ldexp(static_cast<float>(random()), -56 + int(random() % 12)));
  for (const char* capability : capabilities()) {
    SCOPED_TRACE(capability);
    const ReduceKernels& kernels = reduce_kernels_for(capability, type, Operation::kSum);
    const void* input = narrow.data();
    kernels.partial(wide.data(), &input, 1, 1, kAll);
    for (size_t i = 0; i < kAll; ++i) {
      const float expected = canonical(static_cast<float>(narrow[i]));
      ASSERT_EQ(std::memcmp(&wide[i], &expected, sizeof(float)), 0) << "bits " << i;
    }
    narrowed.resize(near.size());
    void* output = narrowed.data();
    input = near.data();
    kernels.finish(&output, 1, &input, 1, 1, near.size());
    for (size_t i = 0; i < near.size(); ++i) ASSERT_EQ(narrowed[i].x, canonical(T(near[i])).x) << near[i];
    // One by one, which takes the path of single values.
    for (size_t i = 0; i < near.size(); i += 7) {
      T single;
      output = &single;
      input = &near[i];
      kernels.finish(&output, 1, &input, 1, 1, 1);
      ASSERT_EQ(single.x, narrowed[i].x) << near[i];
    }
  }
}

TEST(ReduceKernels, ConversionsOf16BitFormatsAreExactAndRoundToNearestEven) {
  check_conversions<c10::Half>(at::kHalf);
  check_conversions<c10::BFloat16>(at::kBFloat16);
}

template <class T>
T reduce_two(at::ScalarType type, Operation operation, T a, T b) {
  T result;
  void* output = &result;
  const void* const inputs[] = {&a, &b};
  reduce_kernels(type, operation).reduce(&output, 1, inputs, 2, 1);
  return result;
}

TEST(ReduceKernels, NanZeroAndInfinity) {
  for (const Operation operation : {Operation::kMin, Operation::kMax, Operation::kSum, Operation::kProduct}) {
    EXPECT_TRUE(std::isnan(reduce_two(at::kFloat, operation, NAN, 1.0f))) << to_string(operation);
    EXPECT_TRUE(std::isnan(reduce_two(at::kDouble, operation, 1.0, double(NAN)))) << to_string(operation);
    EXPECT_TRUE(std::isnan(static_cast<float>(reduce_two<c10::Half>(at::kHalf, operation, 1.0f, NAN))));
  }
  EXPECT_TRUE(std::isnan(reduce_two(at::kFloat, Operation::kSum, INFINITY, -INFINITY)));
  EXPECT_EQ(reduce_two(at::kFloat, Operation::kMax, -INFINITY, 1.0f), 1.0f);
  EXPECT_TRUE(std::signbit(reduce_two(at::kFloat, Operation::kMax, -0.0f, 0.0f)))
      << "the earlier of equals stays";
  EXPECT_FALSE(std::signbit(reduce_two(at::kFloat, Operation::kMin, 0.0f, -0.0f)));
  EXPECT_TRUE(std::signbit(reduce_two(at::kFloat, Operation::kSum, -0.0f, -0.0f)));
  EXPECT_TRUE(
      std::isinf(static_cast<float>(reduce_two<c10::Half>(at::kHalf, Operation::kSum, 65504.0f, 65504.0f))));
  EXPECT_EQ(static_cast<float>(reduce_two<c10::Half>(at::kHalf, Operation::kAverage, 65504.0f, 65504.0f)),
            65504.0f)
      << "the sum is held in float32";
}

/// Of so many inputs of one value, at once and by way of partial results of four each.
template <class T>
void check_average_of_equals(at::ScalarType type, T value, size_t n_inputs) {
  using A = AccumulatorOf<T>;
  const std::vector<const void*> inputs(n_inputs, &value);
  for (const char* capability : capabilities()) {
    SCOPED_TRACE(std::string(capability) + " " + c10::toString(type) + " n=" + std::to_string(n_inputs));
    const ReduceKernels& kernels = reduce_kernels_for(capability, type, Operation::kAverage);
    T average{}, average_of_partials{};
    void* output = &average;
    kernels.reduce(&output, 1, inputs.data(), n_inputs, 1);
    EXPECT_EQ(A(average), A(value));

    const auto divisor = static_cast<int64_t>(n_inputs);
    std::vector<A> partials((n_inputs + 3) / 4);
    std::vector<const void*> accumulators;
    for (size_t g = 0; g < partials.size(); ++g) {
      kernels.partial(&partials[g], &inputs[4 * g], std::min<size_t>(4, n_inputs - 4 * g), divisor, 1);
      accumulators.push_back(&partials[g]);
    }
    output = &average_of_partials;
    kernels.finish(&output, 1, accumulators.data(), accumulators.size(), divisor, 1);
    EXPECT_EQ(A(average_of_partials), A(value));
  }
}

// The sum of two is infinite already.
TEST(ReduceKernels, AveragesOfLargeNumbersAreFinite) {
  for (const size_t n_inputs : {2, 3, 4, 5, 8, 11, 16, 20}) {
    for (const int sign : {1, -1}) {
      check_average_of_equals(at::kFloat, std::ldexp(static_cast<float>(sign), 127), n_inputs);
      check_average_of_equals(at::kDouble, std::ldexp(static_cast<double>(sign), 1023), n_inputs);
      check_average_of_equals(at::kBFloat16, c10::BFloat16(std::ldexp(static_cast<float>(sign), 127)),
                              n_inputs);
    }
  }
}

TEST(ReduceKernels, IntegersWrapAndBoolsAreNormalised) {
  EXPECT_EQ(reduce_two<int8_t>(at::kChar, Operation::kSum, 127, 1), -128);
  EXPECT_EQ(reduce_two<uint16_t>(at::kUInt16, Operation::kProduct, 65535, 65535), 1);
  EXPECT_EQ(reduce_two<int64_t>(at::kLong, Operation::kSum, INT64_MAX, 1), INT64_MIN);
  EXPECT_EQ(reduce_two<int32_t>(at::kInt, Operation::kMin, -1, 1), -1);
  EXPECT_EQ(reduce_two<uint32_t>(at::kUInt32, Operation::kMin, 0xffffffffu, 1), 1u);
  EXPECT_EQ(reduce_two<uint8_t>(at::kBool, Operation::kSum, 2, 4), 1);
  EXPECT_EQ(reduce_two<uint8_t>(at::kBool, Operation::kBitAnd, 2, 4), 1);
  EXPECT_EQ(reduce_two<uint8_t>(at::kBool, Operation::kBitXor, 2, 4), 0);
}

TEST(ReduceKernels, AveragesOfIntegersWrapAndAreTruncatedTowardZero) {
  EXPECT_EQ(reduce_two<int64_t>(at::kLong, Operation::kAverage, -2, -5), -3);
  EXPECT_EQ(reduce_two<int32_t>(at::kInt, Operation::kAverage, 2, 5), 3);
  EXPECT_EQ(reduce_two<int16_t>(at::kShort, Operation::kAverage, -1, 0), 0);
  EXPECT_EQ(reduce_two<uint32_t>(at::kUInt32, Operation::kAverage, 0xfffffffdu, 1), 0x7fffffffu);
  EXPECT_EQ(reduce_two<int8_t>(at::kChar, Operation::kAverage, 127, 1), -64) << "the sum wraps around";
  EXPECT_EQ(reduce_two<int64_t>(at::kLong, Operation::kAverage, INT64_MAX, 1), INT64_MIN / 2);
}

// So many ranks that their number is beyond what the type holds.
template <class T>
T finish_one(at::ScalarType type, T sum, int64_t ranks) {
  T result;
  void* output = &result;
  const void* const input = &sum;
  reduce_kernels(type, Operation::kAverage).finish(&output, 1, &input, 1, ranks, 1);
  return result;
}

TEST(ReduceKernels, IntegersAreAveragedOverMoreRanksThanTheyCount) {
  EXPECT_EQ(finish_one<uint8_t>(at::kByte, 255, 256), 0);
  EXPECT_EQ(finish_one<int8_t>(at::kChar, -128, 127), -1);
  EXPECT_EQ(finish_one<int8_t>(at::kChar, -128, 200), 0);
  EXPECT_EQ(finish_one<uint16_t>(at::kUInt16, 65535, 65536), 0);
  EXPECT_EQ(finish_one<int64_t>(at::kLong, INT64_MIN, 1), INT64_MIN);
}

// torch.set_flush_denormal(True) changes the arithmetic, but in every variant alike.
TEST(ReduceKernels, CapabilitiesAgreeWhenDenormalsAreFlushed) {
  if (!at::globalContext().setFlushDenormal(true)) GTEST_SKIP() << "this machine cannot flush denormals";
  constexpr size_t kCount = 4099;
  std::mt19937_64 random(3);
  std::vector<uint64_t> a(kCount), b(kCount);
  for (size_t i = 0; i < kCount; ++i) {
    a[i] = random() & (i % 2 ? ~uint64_t{0} : 0x800f'03ff'807f'03ffu);
    b[i] = random() & (i % 3 ? ~uint64_t{0} : 0x800f'03ff'807f'03ffu);
  }
  const void* const inputs[] = {a.data(), b.data()};
  for (const at::ScalarType type : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
    for (const Operation operation :
         {Operation::kSum, Operation::kAverage, Operation::kProduct, Operation::kMin, Operation::kMax}) {
      std::vector<uint64_t> first;
      for (const char* capability : capabilities()) {
        std::vector<uint64_t> result(kCount, 0);
        void* output = result.data();
        const ReduceKernels& kernels = reduce_kernels_for(capability, type, operation);
        const size_t count = kCount * sizeof(uint64_t) / kernels.element_size;
        kernels.reduce(&output, 1, inputs, 2, count);
        if (first.empty()) first = result;
        EXPECT_TRUE(first == result) << capability << " " << c10::toString(type) << " "
                                     << to_string(operation);
      }
    }
  }
  at::globalContext().setFlushDenormal(false);
}

std::string error_of(at::ScalarType type, Operation operation) {
  try {
    reduce_kernels(type, operation);
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(ReduceKernels, RefusesWhatHasNoMeaning) {
  const auto contains = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos;
  };
  for (const at::ScalarType type :
       {at::kBool, at::kChar, at::kShort, at::kInt, at::kLong, at::kByte, at::kUInt16, at::kUInt32,
        at::kUInt64, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
    for (const Operation operation : kOperations) {
      const std::string error = error_of(type, operation);
      if (supported(c10::isFloatingType(type), type == at::kBool, operation)) {
        EXPECT_EQ(error, "");
      } else {
        EXPECT_TRUE(contains(error, to_string(operation)) && contains(error, c10::toString(type))) << error;
        EXPECT_TRUE(contains(error, "integer")) << error;
      }
    }
  }
  EXPECT_TRUE(contains(error_of(at::kComplexFloat, Operation::kSum), "view_as_real"));
  EXPECT_TRUE(contains(error_of(at::kFloat8_e4m3fn, Operation::kSum), "Float8_e4m3fn"));
  EXPECT_THROW(reduce_kernels(at::kFloat, static_cast<Operation>(8)), c10::ValueError);
}

}  // namespace
}  // namespace lockstep::reduce_kernels_test
