// The reduce kernels' source, compiled once per instruction set: included by
// reduce_kernels_{default,avx2,avx512}.cc only, each of which names its table by LOCKSTEP_REDUCE_TABLE.
//
// Words: a *value* is what is computed with (an accumulator: float for the 16-bit floating-point types); a
// *vector* is a register full of values, by the compiler's vector extension; a *chunk* is kUnroll vectors.
// Arithmetic is written once, as templates over V, which is a vector in the body of a range and a single
// value where a range is shorter than a vector. Everything is in an anonymous namespace and nothing of std::
// is called: see reduce_kernels_table.h. Compile with -ffp-contract=off: a fused multiply-add would round
// differently on machines that have it.
#pragma once

#include <lockstep/collectives/kernels/reduce_kernels_formats_impl.h>
#include <lockstep/collectives/kernels/reduce_kernels_table.h>

#if defined(__clang__)
#define LOCKSTEP_UNROLL _Pragma("unroll")
#else
#define LOCKSTEP_UNROLL _Pragma("GCC unroll 4")
#endif

namespace lockstep::collectives::internal {
namespace {

constexpr size_t kUnroll = 4;
// So many buffers are read, or written, at a time: hardware prefetchers follow about that many streams.
constexpr size_t kFan = 8;
// An intermediate result on the stack, when there are more inputs than that: half of a small L1 cache.
constexpr size_t kBlockBytes = 16384;

// ---- Operations: from the result so far and the next value.

struct Sum {
  template <class V>
  static LOCKSTEP_INLINE V apply(V a, V b) {
    return V(a + b);
  }
};
struct Product {
  template <class V>
  static LOCKSTEP_INLINE V apply(V a, V b) {
    // A single uint16_t would be promoted to int, whose overflow is undefined.
    if constexpr (sizeof(V) == sizeof(uint16_t)) return V(uint32_t{a} * uint32_t{b});
    return V(a * b);
  }
};
struct Min {
  template <class V>
  static LOCKSTEP_INLINE V apply(V a, V b) {
    // A NaN in `a` stays, for no comparison with it is true. One condition, not two selections: compilers
    // make a minimum instruction of `b < a ? b : a`, which zeroes denormals where they are flushed, as a
    // selection does not.
    const auto take = (b < a) | (b != b);
    return take ? b : a;
  }
};
struct Max {
  template <class V>
  static LOCKSTEP_INLINE V apply(V a, V b) {
    const auto take = (b > a) | (b != b);
    return take ? b : a;
  }
};
struct And {
  template <class V>
  static LOCKSTEP_INLINE V apply(V a, V b) {
    return V(a & b);
  }
};
struct Or {
  template <class V>
  static LOCKSTEP_INLINE V apply(V a, V b) {
    return V(a | b);
  }
};
struct Xor {
  template <class V>
  static LOCKSTEP_INLINE V apply(V a, V b) {
    return V(a ^ b);
  }
};

// ---- Beginnings and endings: what becomes of each input before it is folded, and of the folded value before it is
// stored.

struct Keep {
  template <class V>
  LOCKSTEP_INLINE V operator()(V value) const {
    return value;
  }
};
template <class Value>
struct Over {
  Value divisor;
  template <class V>
  LOCKSTEP_INLINE V operator()(V value) const {
    return value / divisor;
  }
};
template <class Value>
struct Times {
  Value factor;
  template <class V>
  LOCKSTEP_INLINE V operator()(V value) const {
    return value * factor;
  }
};
/// For integers T, held in vectors of the type without a sign: toward zero, as NCCL. The divisor need not fit into T.
/// Machines have no division of vectors of integers, so each lane is divided by itself.
template <class T>
struct Truncated {
  int divisor;
  template <class V>
  LOCKSTEP_INLINE V operator()(V value) const {
    if constexpr (kIsVector<V>) {
      for (size_t i = 0; i < sizeof(V) / sizeof(T); ++i) value[i] = (*this)(value[i]);
      return value;
    } else {
      return static_cast<V>(static_cast<T>(value) / divisor);
    }
  }
};

// ---- Folding: from inputs to outputs. First is the format of inputs[0], In that of the others, Out the
// outputs'. A First that is not In is a result so far, to which the beginning was applied already.

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

template <class First, class In, class Out, class Operation, class V, size_t kVectors, class Beginning,
          class Ending>
LOCKSTEP_INLINE void fold_at(size_t index, const char* const* inputs, size_t n_inputs, V (&result)[kVectors],
                             Beginning beginning, Ending ending) {
  constexpr size_t kLanes = sizeof(V) / sizeof(typename In::Value);
  LOCKSTEP_UNROLL
  for (size_t u = 0; u < kVectors; ++u) {
    result[u] = First::template load<V>(inputs[0] + (index + u * kLanes) * First::kSize);
    if constexpr (kSame<First, In>) result[u] = beginning(result[u]);
  }
  for (size_t k = 1; k < n_inputs; ++k) {
    LOCKSTEP_UNROLL
    for (size_t u = 0; u < kVectors; ++u) {
      const V value = In::template load<V>(inputs[k] + (index + u * kLanes) * In::kSize);
      result[u] = Operation::apply(result[u], beginning(value));
    }
  }
  LOCKSTEP_UNROLL
  for (size_t u = 0; u < kVectors; ++u) result[u] = ending(result[u]);
}

template <class Out, class V, size_t kVectors>
LOCKSTEP_INLINE void store_at(size_t index, char* const* outputs, size_t n_outputs,
                              const V (&result)[kVectors]) {
  constexpr size_t kLanes = sizeof(V) / sizeof(typename Out::Value);
  for (size_t j = 0; j < n_outputs; ++j) {
    LOCKSTEP_UNROLL
    for (size_t u = 0; u < kVectors; ++u) {
      Out::template store<V>(outputs[j] + (index + u * kLanes) * Out::kSize, result[u]);
    }
  }
}

/// One pass; every input element is read before any output element of the same chunk is written, which is
/// what lets outputs be inputs. Inlined where n_inputs and n_outputs are constants, and where they are not.
template <class First, class In, class Out, class Operation, class Beginning, class Ending>
LOCKSTEP_INLINE void fold_pass(char* const* outputs, size_t n_outputs, const char* const* inputs,
                               size_t n_inputs, size_t count, Beginning beginning, Ending ending) {
  using Value = typename In::Value;
  using V = Vector<Value>;
  constexpr size_t kLanes = sizeof(V) / sizeof(Value);
  constexpr size_t kChunk = kUnroll * kLanes;
  if (count < kLanes) {
    for (size_t i = 0; i < count; ++i) {
      Value result[1];
      fold_at<First, In, Out, Operation>(i, inputs, n_inputs, result, beginning, ending);
      store_at<Out>(i, outputs, n_outputs, result);
    }
    return;
  }
  // The last vector overlaps the one before it, so it is computed while all inputs are untouched, and stored
  // last.
  V last[1];
  fold_at<First, In, Out, Operation>(count - kLanes, inputs, n_inputs, last, beginning, ending);
  size_t i = 0;
  for (; i + kChunk <= count; i += kChunk) {
    V result[kUnroll];
    fold_at<First, In, Out, Operation>(i, inputs, n_inputs, result, beginning, ending);
    store_at<Out>(i, outputs, n_outputs, result);
  }
  for (; i + kLanes <= count; i += kLanes) {
    V result[1];
    fold_at<First, In, Out, Operation>(i, inputs, n_inputs, result, beginning, ending);
    store_at<Out>(i, outputs, n_outputs, result);
  }
  store_at<Out>(count - kLanes, outputs, n_outputs, last);
}

/// The same for at most kFan others and kFan outputs, not inlined. The pointers are copied, for a store
/// through them can not change the copies, as far as the compiler knows.
template <class First, class In, class Out, class Operation, class Beginning, class Ending>
__attribute__((noinline)) void fold_few(void* const* outputs, size_t n_outputs, const void* first,
                                        const void* const* others, size_t n_others, size_t begin,
                                        size_t count, Beginning beginning, Ending ending) {
  const char* in[kFan + 1];
  char* out[kFan];
  in[0] = static_cast<const char*>(first);
  for (size_t k = 0; k < n_others; ++k) in[k + 1] = static_cast<const char*>(others[k]) + begin * In::kSize;
  for (size_t j = 0; j < n_outputs; ++j) out[j] = static_cast<char*>(outputs[j]);
  fold_pass<First, In, Out, Operation>(out, n_outputs, in, n_others + 1, count, beginning, ending);
}

/// The same for any number of inputs and outputs: a block of the range at a time, folded kFan inputs at a
/// time into an accumulator that stays in the L1 cache, as do the first outputs, of which the others are
/// copies.
template <class In, class Out, class Operation, class Beginning, class Ending>
__attribute__((noinline)) void fold_many(void* const* outputs, size_t n_outputs, const void* const* inputs,
                                         size_t n_inputs, size_t count, Beginning beginning, Ending ending) {
  using Accumulator = Plain<typename In::Value>;
  constexpr size_t kBlock = kBlockBytes / Accumulator::kSize;
  alignas(64) char accumulator[kBlockBytes];
  void* const into_accumulator[] = {accumulator};
  const size_t n_direct = n_outputs < kFan ? n_outputs : kFan;
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t length = count - begin < kBlock ? count - begin : kBlock;
    void* direct[kFan];
    for (size_t j = 0; j < n_direct; ++j) direct[j] = static_cast<char*>(outputs[j]) + begin * Out::kSize;
    const void* first = static_cast<const char*>(inputs[0]) + begin * In::kSize;
    if (n_inputs <= kFan + 1) {
      fold_few<In, In, Out, Operation>(direct, n_direct, first, inputs + 1, n_inputs - 1, begin, length,
                                       beginning, ending);
    } else {
      fold_few<In, In, Accumulator, Operation>(into_accumulator, 1, first, inputs + 1, kFan, begin, length,
                                               beginning, Keep{});
      size_t done = kFan + 1;
      for (; n_inputs - done > kFan; done += kFan) {
        fold_few<Accumulator, In, Accumulator, Operation>(into_accumulator, 1, accumulator, inputs + done,
                                                          kFan, begin, length, beginning, Keep{});
      }
      fold_few<Accumulator, In, Out, Operation>(direct, n_direct, accumulator, inputs + done, n_inputs - done,
                                                begin, length, beginning, ending);
    }
    for (size_t j = n_direct; j < n_outputs; ++j) {
      __builtin_memcpy(static_cast<char*>(outputs[j]) + begin * Out::kSize, direct[0], length * Out::kSize);
    }
  }
}

template <class In, class Out, class Operation, class Beginning, class Ending>
LOCKSTEP_INLINE void fold(void* const* outputs, size_t n_outputs, const void* const* inputs, size_t n_inputs,
                          size_t count, Beginning beginning, Ending ending) {
  if (n_inputs == 2 && (n_outputs == 1 || n_outputs == 2)) {
    const char* const in[] = {static_cast<const char*>(inputs[0]), static_cast<const char*>(inputs[1])};
    char* const out[] = {static_cast<char*>(outputs[0]), static_cast<char*>(outputs[n_outputs - 1])};
    if (n_outputs == 1) {
      fold_pass<In, In, Out, Operation>(out, 1, in, 2, count, beginning, ending);
    } else {
      fold_pass<In, In, Out, Operation>(out, 2, in, 2, count, beginning, ending);
    }
  } else if (n_inputs <= kFan + 1 && n_outputs <= kFan) {
    fold_few<In, In, Out, Operation>(outputs, n_outputs, inputs[0], inputs + 1, n_inputs - 1, 0, count,
                                     beginning, ending);
  } else {
    fold_many<In, Out, Operation>(outputs, n_outputs, inputs, n_inputs, count, beginning, ending);
  }
}

// ---- The table.

/// The three functions of one combination. Format is the elements' and Partial the partial results' format.
template <class Format, class Partial, class Operation>
struct Kernels {
  static void reduce(void* const* outputs, size_t n_outputs, const void* const* inputs, size_t n_inputs,
                     size_t count) {
    fold<Format, Format, Operation>(outputs, n_outputs, inputs, n_inputs, count, Keep{}, Keep{});
  }
  static void partial(void* accumulator, const void* const* inputs, size_t n_inputs, int64_t, size_t count) {
    fold<Format, Partial, Operation>(&accumulator, 1, inputs, n_inputs, count, Keep{}, Keep{});
  }
  static void finish(void* const* outputs, size_t n_outputs, const void* const* accumulators,
                     size_t n_accumulators, int64_t, size_t count) {
    fold<Partial, Format, Operation>(outputs, n_outputs, accumulators, n_accumulators, count, Keep{}, Keep{});
  }
};

/// The same for averages of floating-point numbers. Each input is multiplied by a power of two, so that no sum is
/// beyond the largest input; this is exact but for quotients that are denormal. The sum is divided by the rest of the divisor.
template <class Format, class Partial>
struct FloatingAverage {
  using Value = typename Format::Value;

  /// The first power of two that is no less than the divisor.
  static LOCKSTEP_INLINE int64_t power_of(int64_t divisor) {
    int64_t power = 1;
    while (power < divisor) power *= 2;
    return power;
  }
  static LOCKSTEP_INLINE Times<Value> beginning_for(int64_t divisor) {
    return {Value(1) / static_cast<Value>(power_of(divisor))};
  }
  template <class In, class Beginning>
  static LOCKSTEP_INLINE void end(void* const* outputs, size_t n_outputs, const void* const* inputs,
                                  size_t n_inputs, int64_t divisor, size_t count, Beginning beginning) {
    const int64_t power = power_of(divisor);
    if (power == divisor) {
      fold<In, Format, Sum>(outputs, n_outputs, inputs, n_inputs, count, beginning, Keep{});
    } else {
      const Over<Value> rest{static_cast<Value>(divisor) / static_cast<Value>(power)};
      fold<In, Format, Sum>(outputs, n_outputs, inputs, n_inputs, count, beginning, rest);
    }
  }
  static void reduce(void* const* outputs, size_t n_outputs, const void* const* inputs, size_t n_inputs,
                     size_t count) {
    const auto divisor = static_cast<int64_t>(n_inputs);
    end<Format>(outputs, n_outputs, inputs, n_inputs, divisor, count, beginning_for(divisor));
  }
  static void partial(void* accumulator, const void* const* inputs, size_t n_inputs, int64_t divisor,
                      size_t count) {
    fold<Format, Partial, Sum>(&accumulator, 1, inputs, n_inputs, count, beginning_for(divisor), Keep{});
  }
  static void finish(void* const* outputs, size_t n_outputs, const void* const* accumulators,
                     size_t n_accumulators, int64_t divisor, size_t count) {
    end<Partial>(outputs, n_outputs, accumulators, n_accumulators, divisor, count, Keep{});
  }
};

/// The same for averages of integers T, whose sums are made in Format, where overflow is defined.
template <class T, class Format>
struct IntegerAverage : Kernels<Format, Format, Sum> {
  static void reduce(void* const* outputs, size_t n_outputs, const void* const* inputs, size_t n_inputs,
                     size_t count) {
    finish(outputs, n_outputs, inputs, n_inputs, static_cast<int64_t>(n_inputs), count);
  }
  static void finish(void* const* outputs, size_t n_outputs, const void* const* accumulators,
                     size_t n_accumulators, int64_t divisor, size_t count) {
    fold<Format, Format, Sum>(outputs, n_outputs, accumulators, n_accumulators, count, Keep{},
                              Truncated<T>{static_cast<int>(divisor)});
  }
};

template <class Format, class Partial, class Functions>
constexpr ReduceKernels entry_of() {
  return {Format::kSize, Partial::kSize, Functions::reduce, Functions::partial, Functions::finish};
}
template <class Format, class Partial, class Operation>
constexpr ReduceKernels entry() {
  return entry_of<Format, Partial, Kernels<Format, Partial, Operation>>();
}

template <class Format, class Partial>
constexpr void fill_floating(ReduceKernels (&row)[kReduceOperations]) {
  row[size_t(ReduceOperation::kSum)] = entry<Format, Partial, Sum>();
  row[size_t(ReduceOperation::kAverage)] = entry_of<Format, Partial, FloatingAverage<Format, Partial>>();
  row[size_t(ReduceOperation::kProduct)] = entry<Format, Partial, Product>();
  row[size_t(ReduceOperation::kMin)] = entry<Format, Partial, Min>();
  row[size_t(ReduceOperation::kMax)] = entry<Format, Partial, Max>();
}

/// Only order and division depend on the sign; the rest is computed without, where overflow is defined.
template <class T, class Unsigned>
constexpr void fill_integer(ReduceKernels (&row)[kReduceOperations]) {
  using Signless = Plain<Unsigned>;
  row[size_t(ReduceOperation::kSum)] = entry<Signless, Signless, Sum>();
  row[size_t(ReduceOperation::kAverage)] = entry_of<Signless, Signless, IntegerAverage<T, Signless>>();
  row[size_t(ReduceOperation::kProduct)] = entry<Signless, Signless, Product>();
  row[size_t(ReduceOperation::kMin)] = entry<Plain<T>, Plain<T>, Min>();
  row[size_t(ReduceOperation::kMax)] = entry<Plain<T>, Plain<T>, Max>();
  row[size_t(ReduceOperation::kBitAnd)] = entry<Signless, Signless, And>();
  row[size_t(ReduceOperation::kBitOr)] = entry<Signless, Signless, Or>();
  row[size_t(ReduceOperation::kBitXor)] = entry<Signless, Signless, Xor>();
}

constexpr void fill_bool(ReduceKernels (&row)[kReduceOperations]) {
  row[size_t(ReduceOperation::kSum)] = entry<Bool, Bool, Or>();
  row[size_t(ReduceOperation::kMax)] = entry<Bool, Bool, Or>();
  row[size_t(ReduceOperation::kBitOr)] = entry<Bool, Bool, Or>();
  row[size_t(ReduceOperation::kProduct)] = entry<Bool, Bool, And>();
  row[size_t(ReduceOperation::kMin)] = entry<Bool, Bool, And>();
  row[size_t(ReduceOperation::kBitAnd)] = entry<Bool, Bool, And>();
  row[size_t(ReduceOperation::kBitXor)] = entry<Bool, Bool, Xor>();
}

constexpr ReduceTable make_table() {
  ReduceTable table{};
  fill_bool(table.entries[size_t(ReduceElement::kBool)]);
  fill_integer<int8_t, uint8_t>(table.entries[size_t(ReduceElement::kInt8)]);
  fill_integer<int16_t, uint16_t>(table.entries[size_t(ReduceElement::kInt16)]);
  fill_integer<int32_t, uint32_t>(table.entries[size_t(ReduceElement::kInt32)]);
  fill_integer<int64_t, uint64_t>(table.entries[size_t(ReduceElement::kInt64)]);
  fill_integer<uint8_t, uint8_t>(table.entries[size_t(ReduceElement::kUInt8)]);
  fill_integer<uint16_t, uint16_t>(table.entries[size_t(ReduceElement::kUInt16)]);
  fill_integer<uint32_t, uint32_t>(table.entries[size_t(ReduceElement::kUInt32)]);
  fill_integer<uint64_t, uint64_t>(table.entries[size_t(ReduceElement::kUInt64)]);
  fill_floating<Float16, Floating<float>>(table.entries[size_t(ReduceElement::kFloat16)]);
  fill_floating<BFloat16, Floating<float>>(table.entries[size_t(ReduceElement::kBFloat16)]);
  fill_floating<Floating<float>, Floating<float>>(table.entries[size_t(ReduceElement::kFloat32)]);
  fill_floating<Floating<double>, Floating<double>>(table.entries[size_t(ReduceElement::kFloat64)]);
  return table;
}

}  // namespace

// Made at compile time: no code of this file runs before the table is chosen.
constinit const ReduceTable LOCKSTEP_REDUCE_TABLE = make_table();

}  // namespace lockstep::collectives::internal

#undef LOCKSTEP_UNROLL
#undef LOCKSTEP_INLINE
