#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/collectives/kernels/testing/capabilities.h>
#include <lockstep/collectives/kernels/wire_codec.h>

namespace lockstep::wire_codec_test {
namespace {

using testing::capabilities;

constexpr HostCompression kAll[] = {HostCompression::kNone, HostCompression::kBf16, HostCompression::kInt8};
constexpr size_t kCounts[] = {0,   1,   2,   3,   7,   15,  16,  17,  63,   64,
                              255, 256, 257, 300, 511, 512, 515, 767, 1024, 4099};

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// Bit by bit.
bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// ---- The reference: the definition in wire_codec_table.h, one element at a time.

struct Reference {
  std::vector<char> encoded;
  std::vector<float> decoded;
  std::vector<float> residual;
};

float canonical(float value) {
  return std::isnan(value) ? float_of(0x7fc00000u) : value;
}

void append(std::vector<char>& bytes, const void* data, size_t size) {
  bytes.insert(bytes.end(), static_cast<const char*>(data), static_cast<const char*>(data) + size);
}

void encode_int8_block(Reference& result, const float* values, const float* residual, size_t count) {
  std::vector<float> wanted(values, values + count);
  for (size_t i = 0; i < count; ++i) {
    if (residual != nullptr) wanted[i] = values[i] + residual[i];
  }
  float largest = 0;
  bool finite = true;
  for (const float value : wanted) {
    finite = finite && std::isfinite(value);
    largest = std::max(largest, std::fabs(value));
  }
  const float smallest = 127 * std::ldexp(1.0f, -126);
  const bool zero = finite && largest < smallest;
  // 127 of the scale must be finite, which is a matter of rounding for the largest float alone.
  float scale = zero ? 0 : largest / 127;
  if (std::isinf(127 * scale)) scale = std::nextafter(scale, 0.0f);
  if (!finite) scale = float_of(0x7fc00000u);
  append(result.encoded, &scale, sizeof scale);
  for (size_t i = 0; i < count; ++i) {
    const auto quantised =
        finite && !zero ? static_cast<int8_t>(std::nearbyint(wanted[i] * (127 / largest))) : int8_t{0};
    append(result.encoded, &quantised, 1);
    const float decoded = canonical(static_cast<float>(quantised) * scale);
    result.decoded.push_back(decoded);
    if (residual != nullptr) result.residual.push_back(finite ? wanted[i] - decoded : residual[i]);
  }
}

Reference reference(HostCompression compression, const std::vector<float>& values, const float* residual) {
  Reference result;
  if (compression == HostCompression::kInt8) {
    for (size_t i = 0; i < values.size(); i += kCodecBlock) {
      encode_int8_block(result, &values[i], residual == nullptr ? nullptr : residual + i,
                        std::min(kCodecBlock, values.size() - i));
    }
    return result;
  }
  for (const float value : values) {
    if (compression == HostCompression::kNone) {
      append(result.encoded, &value, sizeof value);
      result.decoded.push_back(value);
    } else {
      const auto narrow =
          std::isnan(value) ? c10::BFloat16(0x7fc0, c10::BFloat16::from_bits()) : c10::BFloat16(value);
      append(result.encoded, &narrow, sizeof narrow);
      result.decoded.push_back(static_cast<float>(narrow));
    }
  }
  return result;
}

// ---- Inputs

enum class Kind { kTame, kAnyBits, kDenormal, kHuge, kZero, kSparse, kOneNan, kOneInfinity, kTies };
constexpr Kind kKinds[] = {Kind::kTame,   Kind::kAnyBits, Kind::kDenormal,    Kind::kHuge, Kind::kZero,
                           Kind::kSparse, Kind::kOneNan,  Kind::kOneInfinity, Kind::kTies};

std::vector<float> values_of(Kind kind, size_t count, std::mt19937_64& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) {
    switch (kind) {
      case Kind::kAnyBits:
        value = float_of(static_cast<uint32_t>(random()));
        break;
      case Kind::kDenormal:
        value = float_of(static_cast<uint32_t>(random()) & 0x83ffffffu);
        break;
      case Kind::kHuge:
        value = std::copysign(random() % 4 == 0 ? FLT_MAX : FLT_MAX / static_cast<float>(1 + random() % 9),
                              normal(random));
        break;
      case Kind::kZero:
        value = random() % 2 ? 0.0f : -0.0f;
        break;
      case Kind::kSparse:
        value = random() % 50 ? 0.0f : normal(random);
        break;
      case Kind::kTies:  // with 127 among them, the scale is 1 and halves are ties
        value = static_cast<float>(static_cast<int>(random() % 509) - 254) / 2;
        break;
      default:
        value = normal(random) * std::ldexp(1.0f, static_cast<int>(random() % 12));
    }
  }
  if (count > 0) {
    float& one = values[random() % count];
    if (kind == Kind::kOneNan) one = float_of(random() % 2 ? 0xffc12345u : 0x7f800001u);
    if (kind == Kind::kOneInfinity) one = random() % 2 ? INFINITY : -INFINITY;
    if (kind == Kind::kTies) one = -127;
  }
  return values;
}

/// `size` bytes at an address of any alignment, between guards.
class GuardedBytes {
 public:
  GuardedBytes(const void* data, size_t size, size_t offset) : begin_(kGuard + offset), size_(size) {
    bytes_.assign(begin_ + size + kGuard, kGuardByte);
    if (data != nullptr && size > 0) std::memcpy(&bytes_[begin_], data, size);
  }
  char* data() { return &bytes_[begin_]; }
  float* floats() { return reinterpret_cast<float*>(data()); }
  std::vector<float> values() const {
    std::vector<float> list(size_ / sizeof(float));
    if (size_ > 0) std::memcpy(list.data(), &bytes_[begin_], size_);
    return list;
  }
  bool holds(const std::vector<char>& expected) const {
    return std::equal(expected.begin(), expected.end(), bytes_.begin() + begin_,
                      bytes_.begin() + begin_ + size_);
  }
  bool guards_are_whole() const {
    const auto is_guard = [](char byte) { return byte == kGuardByte; };
    return std::all_of(bytes_.begin(), bytes_.begin() + begin_, is_guard) &&
           std::all_of(bytes_.begin() + begin_ + size_, bytes_.end(), is_guard);
  }

 private:
  static constexpr size_t kGuard = 128;
  static constexpr char kGuardByte = 0x5a;
  std::ptrdiff_t begin_;
  std::ptrdiff_t size_;
  std::vector<char> bytes_;
};

void check(CpuCapability capability, HostCompression compression, const std::vector<float>& values,
           const std::vector<float>* residual, const std::vector<float>& sum, size_t offset) {
  const WireCodec& codec = wire_codec_for(capability, compression);
  const size_t count = values.size(), bytes = count * sizeof(float);
  const Reference expected = reference(compression, values, residual == nullptr ? nullptr : residual->data());
  GuardedBytes encoded(nullptr, encoded_bytes(compression, count), offset);
  GuardedBytes from(values.data(), bytes, offset);
  GuardedBytes left(residual == nullptr ? nullptr : residual->data(), bytes, offset);
  codec.encode(encoded.data(), from.floats(), residual == nullptr ? nullptr : left.floats(), count);
  ASSERT_TRUE(encoded.guards_are_whole() && left.guards_are_whole());
  ASSERT_TRUE(encoded.holds(expected.encoded));
  ASSERT_TRUE(same(from.values(), values));
  if (residual != nullptr) {
    ASSERT_TRUE(same(left.values(), expected.residual));
  }

  GuardedBytes into(nullptr, bytes, offset);
  codec.decode_into(into.floats(), encoded.data(), count);
  ASSERT_TRUE(into.guards_are_whole());
  ASSERT_TRUE(same(into.values(), expected.decoded));

  GuardedBytes added(sum.data(), bytes, offset);
  codec.decode_add(added.floats(), encoded.data(), count);
  std::vector<float> sums(count);
  for (size_t i = 0; i < count; ++i) sums[i] = canonical(sum[i] + expected.decoded[i]);
  ASSERT_TRUE(added.guards_are_whole());
  ASSERT_TRUE(same(added.values(), sums));
}

TEST(WireCodec, EveryVariantEqualsTheReference) {
  std::mt19937_64 random(20);
  for (const size_t count : kCounts) {
    for (const Kind kind : kKinds) {
      const std::vector<float> values = values_of(kind, count, random);
      const std::vector<float> sum = values_of(Kind::kTame, count, random);
      // What an earlier step leaves, and, for the blocks' edges, anything.
      const std::vector<float> residual = values_of(random() % 3          ? Kind::kSparse
                                                    : kind == Kind::kHuge ? Kind::kTies
                                                                          : kind,
                                                    count, random);
      for (const HostCompression compression : kAll) {
        for (const CpuCapability capability : capabilities()) {
          SCOPED_TRACE(c10::str(to_string(capability), ", codec ", static_cast<int>(compression), ", ", count,
                                " elements of kind ", static_cast<int>(kind)));
          const size_t offset = random() % 2 ? random() % 64 : 0;
          check(capability, compression, values, nullptr, sum, offset);
          if (compression == HostCompression::kInt8 &&
              std::none_of(residual.begin(), residual.end(), [](float x) { return std::isnan(x); })) {
            check(capability, compression, values, &residual, sum, offset);
          }
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

std::vector<float> round_trip(HostCompression compression, const std::vector<float>& values,
                              std::vector<float>* residual = nullptr) {
  std::vector<char> encoded(encoded_bytes(compression, values.size()));
  std::vector<float> decoded(values.size());
  wire_codec(compression)
      .encode(encoded.data(), values.data(), residual == nullptr ? nullptr : residual->data(), values.size());
  wire_codec(compression).decode_into(decoded.data(), encoded.data(), values.size());
  return decoded;
}

TEST(WireCodec, Int8IsWithinHalfAStepOfEachBlock) {
  std::mt19937_64 random(21);
  std::vector<float> values = values_of(Kind::kTame, 3000, random);
  for (size_t i = 1024; i < 1280; ++i) values[i] *= 1e-20f;  // a block of small numbers beside large ones
  const std::vector<float> decoded = round_trip(HostCompression::kInt8, values);
  for (size_t begin = 0; begin < values.size(); begin += kCodecBlock) {
    const size_t end = std::min(values.size(), begin + kCodecBlock);
    float largest = 0;
    for (size_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(values[i]));
    for (size_t i = begin; i < end; ++i) {
      ASSERT_LE(std::fabs(decoded[i] - values[i]), largest / 127 * 0.5001f) << i;
    }
  }
}

TEST(WireCodec, AnElementThatIsNotFiniteStaysVisible) {
  for (const float bad : {NAN, -NAN, INFINITY, -INFINITY}) {
    for (const size_t at : {0, 255, 256, 700, 999}) {
      std::vector<float> values(1000, 1.0f);
      values[at] = bad;
      const std::vector<float> narrow = round_trip(HostCompression::kBf16, values);
      EXPECT_TRUE(std::isnan(bad) ? std::isnan(narrow[at]) : narrow[at] == bad);
      const std::vector<float> coded = round_trip(HostCompression::kInt8, values);
      for (size_t i = 0; i < values.size(); ++i) {
        EXPECT_TRUE(i == at || narrow[i] == 1.0f) << i;
        if (i / kCodecBlock == at / kCodecBlock) {
          EXPECT_TRUE(std::isnan(coded[i])) << i;
        } else {
          EXPECT_EQ(coded[i], 1.0f) << i;
        }
      }
    }
  }
}

TEST(WireCodec, TheLargestNumbersStayFinite) {
  std::vector<float> values = {FLT_MAX, -FLT_MAX, FLT_MAX / 2, 1.0f};
  const std::vector<float> coded = round_trip(HostCompression::kInt8, values);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(std::isfinite(coded[i]));
    EXPECT_NEAR(coded[i] / values[i], 1, 0.01);
  }
  EXPECT_EQ(coded[3], 0.0f);
  EXPECT_EQ(round_trip(HostCompression::kBf16, {FLT_MAX, -FLT_MAX}),
            (std::vector<float>{INFINITY, -INFINITY}));
}

// The sum of what was sent in n steps differs from the sum of what was meant by no more than one step's rounding.
TEST(WireCodec, ErrorFeedbackMakesUpForTheRounding) {
  std::mt19937_64 random(22);
  const size_t count = 517;
  std::vector<float> values(count);
  std::uniform_real_distribution<float> uniform(-0.003f,
                                                0.003f);  // below half a step: without feedback never sent
  for (float& value : values) value = uniform(random);
  values[0] = values[256] = values[512] = 1;
  std::vector<float> residual(count);
  std::vector<double> sent(count);
  constexpr int kSteps = 200;
  for (int step = 0; step < kSteps; ++step) {
    const std::vector<float> decoded = round_trip(HostCompression::kInt8, values, &residual);
    for (size_t i = 0; i < count; ++i) sent[i] += static_cast<double>(decoded[i]);
  }
  for (size_t i = 0; i < count; ++i) {
    ASSERT_NEAR(sent[i], kSteps * static_cast<double>(values[i]), 1.02 / 127) << i;
    ASSERT_NEAR(sent[i] + static_cast<double>(residual[i]), kSteps * static_cast<double>(values[i]), 1e-4)
        << i;
  }
}

TEST(WireCodec, TheErrorSurvivesAStepThatIsNotFinite) {
  std::mt19937_64 random(23);
  std::vector<float> values = values_of(Kind::kTame, 512, random), residual(512);
  round_trip(HostCompression::kInt8, values, &residual);
  const std::vector<float> before = residual;
  values[300] = INFINITY;
  round_trip(HostCompression::kInt8, values, &residual);
  for (size_t i = 256; i < 512; ++i) EXPECT_EQ(residual[i], before[i]);
  EXPECT_FALSE(std::equal(before.begin(), before.begin() + 256, residual.begin()))
      << "the other block was sent";
}

// Segments may be encoded by themselves.
TEST(WireCodec, PartsCutBetweenBlocksEncodeAsTheWhole) {
  std::mt19937_64 random(24);
  const std::vector<float> values = values_of(Kind::kTame, 1100, random);
  for (const HostCompression compression : kAll) {
    std::vector<char> whole(encoded_bytes(compression, values.size())), parts(whole.size());
    wire_codec(compression).encode(whole.data(), values.data(), nullptr, values.size());
    for (const size_t cut : {256, 768, 1024}) {
      const size_t bytes = encoded_bytes(compression, cut);
      ASSERT_EQ(bytes + encoded_bytes(compression, values.size() - cut), whole.size());
      wire_codec(compression).encode(parts.data(), values.data(), nullptr, cut);
      wire_codec(compression).encode(&parts[bytes], &values[cut], nullptr, values.size() - cut);
      EXPECT_EQ(parts, whole);
    }
  }
}

// Hosts may differ in torch.set_flush_denormal() without differing in what they decode.
TEST(WireCodec, DecodingIsBlindToFlushedDenormals) {
  std::mt19937_64 random(25);
  for (const HostCompression compression : kAll) {
    for (const Kind kind : {Kind::kTame, Kind::kDenormal, Kind::kAnyBits}) {
      const std::vector<float> values = values_of(kind, 2000, random);
      for (const CpuCapability capability : capabilities()) {
        const WireCodec& codec = wire_codec_for(capability, compression);
        std::vector<char> encoded(encoded_bytes(compression, values.size()));
        std::vector<float> decoded(values.size()), flushed(values.size());
        codec.encode(encoded.data(), values.data(), nullptr, values.size());
        codec.decode_into(decoded.data(), encoded.data(), values.size());
        if (!at::globalContext().setFlushDenormal(true))
          GTEST_SKIP() << "this machine cannot flush denormals";
        codec.decode_into(flushed.data(), encoded.data(), values.size());
        at::globalContext().setFlushDenormal(false);
        EXPECT_TRUE(same(decoded, flushed));
      }
    }
  }
}

TEST(WireCodec, OnlyLargeSumsAndAveragesOfFloat32AreEncoded) {
  constexpr size_t kLarge = 4096;
  for (const HostCompression compression : {HostCompression::kBf16, HostCompression::kInt8}) {
    EXPECT_TRUE(is_encoded(compression, at::kFloat, ReduceOperation::kSum, kLarge));
    EXPECT_TRUE(is_encoded(compression, at::kFloat, ReduceOperation::kAverage, kLarge));
    EXPECT_FALSE(is_encoded(compression, at::kFloat, ReduceOperation::kSum, kLarge - 1));
    EXPECT_FALSE(is_encoded(compression, at::kFloat, ReduceOperation::kMax, kLarge));
    for (const auto type : {at::kDouble, at::kHalf, at::kBFloat16, at::kInt}) {
      EXPECT_FALSE(is_encoded(compression, type, ReduceOperation::kSum, kLarge));
    }
  }
  EXPECT_FALSE(is_encoded(HostCompression::kNone, at::kFloat, ReduceOperation::kSum, kLarge));
}

}  // namespace
}  // namespace lockstep::wire_codec_test
