// The wire codecs' source, compiled once per instruction set: included by wire_codec_{default,avx2,avx512}.cc only,
// each of which names its table by LOCKSTEP_WIRE_CODECS. The rules of reduce_kernels_impl.h hold here too.
#pragma once

#include <lockstep/collectives/kernels/reduce_kernels_formats_impl.h>
#include <lockstep/collectives/kernels/wire_codec_table.h>

namespace lockstep::collectives::internal {
namespace {

using Floats = Vector<float>;
using Ints = FloatLanes<int32_t>;
constexpr size_t kFloatLanes = kVectorBytes / sizeof(float);
/// The vectors that are narrowed to bytes together.
constexpr size_t kQuad = 4;
static_assert(kCodecBlock % (kQuad * kFloatLanes) == 0);

// ---- Codecs without state: a format of reduce_kernels_formats_impl.h.

template <class Format>
struct FormatCodec {
  template <class Each>
  static LOCKSTEP_INLINE void for_each(size_t count, Each each) {
    size_t i = 0;
    for (; i + kFloatLanes <= count; i += kFloatLanes) each(i, Floats{});
    for (; i < count; ++i) each(i, float{});
  }
  static void encode(void* encoded, const float* values, float*, size_t count) {
    char* to = static_cast<char*>(encoded);
    const char* from = reinterpret_cast<const char*>(values);
    for_each(
        count, [=]<class V>(size_t i, V) __attribute__((always_inline)) {
          Format::template store<V>(to + i * Format::kSize, read<V>(from + i * sizeof(float)));
        });
  }
  static void decode_into(float* values, const void* encoded, size_t count) {
    char* to = reinterpret_cast<char*>(values);
    const char* from = static_cast<const char*>(encoded);
    for_each(
        count, [=]<class V>(size_t i, V) __attribute__((always_inline)) {
          write<V>(to + i * sizeof(float), Format::template load<V>(from + i * Format::kSize));
        });
  }
  static void decode_add(float* values, const void* encoded, size_t count) {
    char* to = reinterpret_cast<char*>(values);
    const char* from = static_cast<const char*>(encoded);
    for_each(
        count, [=]<class V>(size_t i, V) __attribute__((always_inline)) {
          char* at = to + i * sizeof(float);
          Floating<float>::store<V>(at, V(read<V>(at) + Format::template load<V>(from + i * Format::kSize)));
        });
  }
};

// ---- kInt8.

constexpr uint32_t kNan = 0x7fc00000u;
constexpr int32_t kInfinity = 0x7f800000;
/// 127 · 2^-126, which has the smallest scale that is not denormal: what is decoded is then the same where denormals
/// are flushed.
constexpr int32_t kSmallestMagnitude = 0x03fe0000;
/// The largest scale of which 127 are not infinite: one step below the largest float's / 127.
constexpr float kLargestScale = 0x1.020406p+121f;
/// Added to a number of small magnitude it leaves the nearest integer, to even, in the low bits.
constexpr float kRounder = 12582912.0f;  // 1.5 · 2^23
constexpr int32_t kRounderBits = 0x4b400000;

/// Lanes from -128 to 127 as bytes.
LOCKSTEP_INLINE void write_bytes(char* at, const Ints (&lanes)[kQuad]) {
#if defined(__AVX512F__)
  for (size_t u = 0; u < kQuad; ++u) write(at + u * kFloatLanes, _mm512_cvtepi32_epi8((__m512i)lanes[u]));
#elif defined(__AVX2__)
  // The packs work within halves: groups of four end up in the order 0 2 4 6 1 3 5 7.
  const __m256i low = _mm256_packs_epi32((__m256i)lanes[0], (__m256i)lanes[1]);
  const __m256i high = _mm256_packs_epi32((__m256i)lanes[2], (__m256i)lanes[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  write(at, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
#elif defined(__x86_64__)
  const __m128i low = _mm_packs_epi32((__m128i)lanes[0], (__m128i)lanes[1]);
  const __m128i high = _mm_packs_epi32((__m128i)lanes[2], (__m128i)lanes[3]);
  write(at, _mm_packs_epi16(low, high));
#else
  for (size_t u = 0; u < kQuad; ++u) {
    write(at + u * kFloatLanes, __builtin_convertvector(lanes[u], FloatLanes<int8_t>));
  }
#endif
}

LOCKSTEP_INLINE Ints read_bytes(const char* at) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32(read<__m128i>(at));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(read<long long>(at)));
#elif defined(__x86_64__)
  const __m128i bytes = _mm_cvtsi32_si128(read<int>(at));
  const __m128i twice = _mm_unpacklo_epi8(bytes, bytes);
  return (Ints)_mm_srai_epi32(_mm_unpacklo_epi16(twice, twice), 24);
#else
  return __builtin_convertvector(read<FloatLanes<int8_t>>(at), Ints);
#endif
}

LOCKSTEP_INLINE Floats decoded(Ints quantised, float scale) {
  return __builtin_convertvector(quantised, Floats) * scale;
}

/// A whole block. `residual` is null unless kFeedback.
template <bool kFeedback>
LOCKSTEP_INLINE void encode_block(char* to, const char* values, char* residual) {
  const auto value_at = [=](size_t i) __attribute__((always_inline)) {
    const Floats value = read<Floats>(values + i * sizeof(float));
    if constexpr (!kFeedback) return value;
    return Floats(value + read<Floats>(residual + i * sizeof(float)));
  };
  // As integers, magnitudes have the order of the numbers, with NaNs above infinity.
  Ints largest{};
  for (size_t i = 0; i < kCodecBlock; i += kFloatLanes) {
    const Ints magnitude = bits_of<Ints>(value_at(i)) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  int32_t magnitude = 0;
  for (size_t lane = 0; lane < kFloatLanes; ++lane) {
    if (largest[lane] > magnitude) magnitude = largest[lane];
  }
  char* bytes = to + sizeof(float);
  if (magnitude >= kInfinity || magnitude < kSmallestMagnitude) {
    write<uint32_t>(to, magnitude >= kInfinity ? kNan : 0);
    __builtin_memset(bytes, 0, kCodecBlock);
    if constexpr (kFeedback) {
      for (size_t i = 0; magnitude < kInfinity && i < kCodecBlock; i += kFloatLanes) {
        write(residual + i * sizeof(float), value_at(i));
      }
    }
    return;
  }
  const float exact = bits_of<float>(magnitude) / 127.0f;
  const float scale = exact < kLargestScale ? exact : kLargestScale;
  const float inverse = 127.0f / bits_of<float>(magnitude);
  write(to, scale);
  for (size_t i = 0; i < kCodecBlock; i += kQuad * kFloatLanes) {
    Ints quantised[kQuad];
    for (size_t u = 0; u < kQuad; ++u) {
      const size_t index = i + u * kFloatLanes;
      const Floats value = value_at(index);
      quantised[u] = bits_of<Ints>(Floats(value * inverse + kRounder)) - kRounderBits;
      if constexpr (kFeedback) {
        write(residual + index * sizeof(float), Floats(value - decoded(quantised[u], scale)));
      }
    }
    write_bytes(bytes + i, quantised);
  }
}

template <bool kAdd>
LOCKSTEP_INLINE void decode_block(char* values, const char* encoded) {
  const float scale = read<float>(encoded);
  for (size_t i = 0; i < kCodecBlock; i += kFloatLanes) {
    char* at = values + i * sizeof(float);
    Floats value = decoded(read_bytes(encoded + sizeof(float) + i), scale);
    if constexpr (kAdd) value = read<Floats>(at) + value;
    Floating<float>::store<Floats>(at, value);
  }
}

struct Int8Codec {
  static constexpr size_t kEncodedBlock = sizeof(float) + kCodecBlock;

  /// A block that is not whole is filled up with zeros, which change neither scale nor the other elements.
  template <bool kFeedback>
  static void encode_blocks(char* to, const char* values, char* residual, size_t count) {
    for (; count >= kCodecBlock; count -= kCodecBlock) {
      encode_block<kFeedback>(to, values, residual);
      to += kEncodedBlock;
      values += kCodecBlock * sizeof(float);
      if constexpr (kFeedback) residual += kCodecBlock * sizeof(float);
    }
    if (count == 0) return;
    char encoded[kEncodedBlock], filled[kCodecBlock * sizeof(float)] = {},
                                                      rest[kCodecBlock * sizeof(float)] = {};
    __builtin_memcpy(filled, values, count * sizeof(float));
    if constexpr (kFeedback) __builtin_memcpy(rest, residual, count * sizeof(float));
    encode_block<kFeedback>(encoded, filled, rest);
    __builtin_memcpy(to, encoded, sizeof(float) + count);
    if constexpr (kFeedback) __builtin_memcpy(residual, rest, count * sizeof(float));
  }
  static void encode(void* encoded, const float* values, float* residual, size_t count) {
    char* to = static_cast<char*>(encoded);
    const char* from = reinterpret_cast<const char*>(values);
    if (residual == nullptr) return encode_blocks<false>(to, from, nullptr, count);
    encode_blocks<true>(to, from, reinterpret_cast<char*>(residual), count);
  }

  template <bool kAdd>
  static LOCKSTEP_INLINE void decode_blocks(float* values, const void* encoded, size_t count) {
    char* to = reinterpret_cast<char*>(values);
    const char* from = static_cast<const char*>(encoded);
    for (; count >= kCodecBlock; count -= kCodecBlock) {
      decode_block<kAdd>(to, from);
      to += kCodecBlock * sizeof(float);
      from += kEncodedBlock;
    }
    if (count == 0) return;
    char block[kEncodedBlock] = {}, result[kCodecBlock * sizeof(float)] = {};
    __builtin_memcpy(block, from, sizeof(float) + count);
    if constexpr (kAdd) __builtin_memcpy(result, to, count * sizeof(float));
    decode_block<kAdd>(result, block);
    __builtin_memcpy(to, result, count * sizeof(float));
  }
  static void decode_into(float* values, const void* encoded, size_t count) {
    decode_blocks<false>(values, encoded, count);
  }
  static void decode_add(float* values, const void* encoded, size_t count) {
    decode_blocks<true>(values, encoded, count);
  }
};

// ---- The table.

template <class Codec>
constexpr WireCodec codec() {
  return {Codec::encode, Codec::decode_into, Codec::decode_add};
}

constexpr WireCodecTable make_codecs() {
  WireCodecTable table{};
  table.entries[size_t(HostCompression::kNone)] = codec<FormatCodec<Plain<float>>>();
  table.entries[size_t(HostCompression::kBf16)] = codec<FormatCodec<BFloat16>>();
  table.entries[size_t(HostCompression::kInt8)] = codec<Int8Codec>();
  return table;
}

}  // namespace

// Made at compile time: no code of this file runs before the table is chosen.
constinit const WireCodecTable LOCKSTEP_WIRE_CODECS = make_codecs();

}  // namespace lockstep::collectives::internal

#undef LOCKSTEP_INLINE
