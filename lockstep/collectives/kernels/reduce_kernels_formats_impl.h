// The formats in which the reduce kernels' values lie in memory, and the vectors in which they are computed
// with. A part of reduce_kernels_impl.h and wire_codec_impl.h; the words and rules of the former hold here too.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LOCKSTEP_INLINE inline __attribute__((always_inline))

namespace lockstep::collectives::internal {
namespace {

#if defined(__AVX512F__)
constexpr size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr size_t kVectorBytes = 32;
#else
constexpr size_t kVectorBytes = 16;
#endif

template <class T, size_t kBytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(kBytes)));
};
template <class T>
using Vector = typename VectorOf<T, kVectorBytes>::type;
/// As many T as there are floats in a vector.
template <class T>
using FloatLanes = typename VectorOf<T, kVectorBytes / sizeof(float) * sizeof(T)>::type;

template <class V>
constexpr bool kIsVector = sizeof(V) >= 16;

template <class T>
LOCKSTEP_INLINE T read(const char* at) {
  T value;
  __builtin_memcpy(&value, at, sizeof(T));
  return value;
}

template <class T>
LOCKSTEP_INLINE void write(char* at, T value) {
  __builtin_memcpy(at, &value, sizeof(T));
}

template <class To, class From>
LOCKSTEP_INLINE To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

template <class Value, class V>
LOCKSTEP_INLINE V quiet_nan(V value) {
  const V nan = V{} + static_cast<Value>(__builtin_nan(""));
  return value != value ? nan : value;
}

// ---- Formats: how values lie in memory. Value: what is computed with; kSize: bytes of an element; load<V>()
// and store<V>() take V = Value or Vector<Value>.

template <class T>
struct Plain {
  using Value = T;
  static constexpr size_t kSize = sizeof(T);
  template <class V>
  static LOCKSTEP_INLINE V load(const char* at) {
    return read<V>(at);
  }
  template <class V>
  static LOCKSTEP_INLINE void store(char* at, V value) {
    write<V>(at, value);
  }
};

/// float32 and float64; what is stored has canonical NaNs.
template <class T>
struct Floating : Plain<T> {
  template <class V>
  static LOCKSTEP_INLINE void store(char* at, V value) {
    write<V>(at, quiet_nan<T>(value));
  }
};

/// Any byte but 0 reads as 1.
struct Bool : Plain<uint8_t> {
  template <class V>
  static LOCKSTEP_INLINE V load(const char* at) {
    return (V)((read<V>(at) != 0) & 1);
  }
};

/// 16-bit lanes, moved into the upper halves of 32-bit ones. The compilers know slower ways than these
/// instructions.
LOCKSTEP_INLINE FloatLanes<uint32_t> to_upper_halves(FloatLanes<uint16_t> lanes) {
#if defined(__AVX512F__)
  return (FloatLanes<uint32_t>)_mm512_cvtepu16_epi32((__m256i)lanes) << 16;
#elif defined(__AVX2__)
  return (FloatLanes<uint32_t>)_mm256_cvtepu16_epi32((__m128i)lanes) << 16;
#elif defined(__x86_64__)
  const __m128i low = _mm_cvtsi64_si128(bits_of<long long>(lanes));
  return (FloatLanes<uint32_t>)_mm_unpacklo_epi16(_mm_setzero_si128(), low);
#else
  return __builtin_convertvector(lanes, FloatLanes<uint32_t>) << 16;
#endif
}

/// The upper halves of 32-bit lanes.
LOCKSTEP_INLINE FloatLanes<uint16_t> from_upper_halves(FloatLanes<uint32_t> lanes) {
#if defined(__AVX512F__)
  return (FloatLanes<uint16_t>)_mm512_cvtepi32_epi16((__m512i)(lanes >> 16));
#elif defined(__AVX2__)
  const __m256i low = (__m256i)(lanes >> 16);
  const __m256i packed = _mm256_packus_epi32(low, low);
  return (FloatLanes<uint16_t>)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#elif defined(__x86_64__)
  // SSE2 packs signed lanes only.
  const __m128i low = _mm_srai_epi32((__m128i)lanes, 16);
  return bits_of<FloatLanes<uint16_t>>(_mm_cvtsi128_si64(_mm_packs_epi32(low, low)));
#else
  return __builtin_convertvector(lanes >> 16, FloatLanes<uint16_t>);
#endif
}

/// A 16-bit floating-point format, by its conversions between float32 and its bits, which are held in the
/// upper half of 32; narrow() leaves anything in the lower half. U is uint32_t and V float, or vectors of
/// them.
template <class Conversion>
struct Narrow {
  using Value = float;
  static constexpr size_t kSize = 2;
  template <class V>
  static LOCKSTEP_INLINE V load(const char* at) {
    if constexpr (kIsVector<V>) {
      return Conversion::template widen<V>(to_upper_halves(read<FloatLanes<uint16_t>>(at)));
    } else {
      return Conversion::template widen<V>(uint32_t{read<uint16_t>(at)} << 16);
    }
  }
  template <class V>
  static LOCKSTEP_INLINE void store(char* at, V value) {
    if constexpr (kIsVector<V>) {
      write(at, from_upper_halves(Conversion::template narrow<FloatLanes<uint32_t>>(value)));
    } else {
      write(at, static_cast<uint16_t>(Conversion::template narrow<uint32_t>(value) >> 16));
    }
  }
};

struct BFloat16Conversion {
  template <class V, class U>
  static LOCKSTEP_INLINE V widen(U upper) {
    return bits_of<V>(upper);
  }
  template <class U, class V>
  static LOCKSTEP_INLINE U narrow(V value) {
    const U bits = bits_of<U>(value);
    // Half of the last place that stays, less one if that place is even: what is cut off then rounds to
    // nearest even.
    const U rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const U nan = U{} + 0x7fc00000u;
    return value != value ? nan : rounded;
  }
};

#if !defined(__F16C__)
/// a < b ? then : otherwise, for numbers below 2^31, whose comparison SSE2 has as signed only.
template <class U>
LOCKSTEP_INLINE U if_less(U a, uint32_t b, U then, U otherwise) {
  if constexpr (kIsVector<U>) {
    using Signed = FloatLanes<int32_t>;
    return (Signed)a < static_cast<int32_t>(b) ? then : otherwise;
  } else {
    return a < b ? then : otherwise;
  }
}

/// Without denormal float32 operands or results, so that flush-to-zero modes do not touch it.
struct Float16Conversion {
  template <class V, class U>
  static LOCKSTEP_INLINE V widen(U upper) {
    const U magnitude = upper & 0x7fff0000u;
    // Infinities and NaNs have the largest exponent in both formats.
    const U rebias = U{} + (112u << 23);
    const U normal = (magnitude >> 3) + if_less<U>(magnitude, 0x7c000000u, rebias, rebias + rebias);
    // 0.5's last place is worth as much as a denormal's.
    const U denormal = bits_of<U>(V(bits_of<V>(U((magnitude >> 16) | 0x3f000000u)) - 0.5f));
    return bits_of<V>(U(if_less<U>(magnitude, 0x04000000u, denormal, normal) | (upper & 0x80000000u)));
  }
  template <class U, class V>
  static LOCKSTEP_INLINE U narrow(V value) {
    const U bits = bits_of<U>(value);
    const U magnitude = bits & 0x7fffffffu;
    // As for bfloat16; a carry out of the mantissa moves the exponent up, to infinity at last.
    const U normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) << 3;
    // Adding 0.5 moves the result's last place to float32's, where the addition itself rounds it.
    const U denormal = bits_of<U>(V(bits_of<V>(magnitude) + 0.5f)) << 16;
    const U infinity = U{} + 0x7c000000u;
    const U nan = U{} + 0x7e000000u;
    const U finite = if_less<U>(magnitude, 113u << 23, denormal, normal);
    const U number = if_less<U>(magnitude, 143u << 23, finite, infinity) | (bits & 0x80000000u);
    return value != value ? nan : number;
  }
};
#endif

using BFloat16 = Narrow<BFloat16Conversion>;

#if defined(__F16C__)
/// float16 by the machine's own conversions, which flush-to-zero modes do not affect.
struct Float16 {
  using Value = float;
  static constexpr size_t kSize = 2;
  template <class V>
  static LOCKSTEP_INLINE V load(const char* at) {
    if constexpr (!kIsVector<V>) {
      return _cvtsh_ss(read<uint16_t>(at));
    } else {
#if defined(__AVX512F__)
      return (V)_mm512_cvtph_ps(read<__m256i_u>(at));
#else
      return (V)_mm256_cvtph_ps(read<__m128i_u>(at));
#endif
    }
  }
  template <class V>
  static LOCKSTEP_INLINE void store(char* at, V value) {
    const V number = quiet_nan<float>(value);
    if constexpr (!kIsVector<V>) {
      write<uint16_t>(at, _cvtss_sh(number, _MM_FROUND_TO_NEAREST_INT));
    } else {
#if defined(__AVX512F__)
      write<__m256i_u>(at, _mm512_cvtps_ph((__m512)number, _MM_FROUND_TO_NEAREST_INT));
#else
      write<__m128i_u>(at, _mm256_cvtps_ph((__m256)number, _MM_FROUND_TO_NEAREST_INT));
#endif
    }
  }
};
#else
using Float16 = Narrow<Float16Conversion>;
#endif

}  // namespace
}  // namespace lockstep::collectives::internal
