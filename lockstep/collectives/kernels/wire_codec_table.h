#pragma once

#include <cstddef>

#include <lockstep/collectives/host_compression.h>

/// What wire_codec.h and the files compiled for one instruction set share; reduce_kernels_table.h says why those files
/// see no other header.
namespace lockstep {

/// The functions for one HostCompression. Counts are in elements. All functions are pure and thread-safe, take pointers
/// of any alignment, and accept a count of zero (pointers may then be null); buffers don't overlap. An encoded range
/// is encoded_bytes() long. Its bits, and those of what it is decoded to, depend on neither the instruction set nor on
/// alignment; every NaN that is written is 0x7fc00000, except that kNone passes the bytes on.
///
/// kBf16 rounds to nearest even; beyond the largest bfloat16 it is infinite, as a cast.
///
/// kInt8 encodes blocks of kCodecBlock elements, each by itself: what is cut between blocks encodes to the same bytes as
/// the whole. A block is its scale s (float32, largest magnitude / 127) and an int8_t q per element, which stands for
/// q · s; q is the nearest one, to even. Two exceptions: a block with an element that is NaN or infinite is NaN as a
/// whole, so that no such element is lost; a block whose scale would be denormal (below 1.5e-36 all over) is zero.
struct WireCodec {
  /// kInt8: what is encoded is v = values[i] + residual[i], and residual[i] becomes v less what is decoded from it. A
  /// block that is NaN keeps its residual: the step is lost, and what was left to add before it is still to be added.
  /// `residual` may be null (zero then, and not kept), and must be for other codecs.
  void (*encode)(void* encoded, const float* values, float* residual, size_t count);
  void (*decode_into)(float* values, const void* encoded, size_t count);
  /// values[i] += what is decoded.
  void (*decode_add)(float* values, const void* encoded, size_t count);
};

/// Elements with one scale.
inline constexpr size_t kCodecBlock = 256;

namespace collectives::internal {

inline constexpr size_t kWireCodecs = 3;

/// Indexed by HostCompression.
struct WireCodecTable {
  WireCodec entries[kWireCodecs];
};

// One table per instruction set; only the first exists on machines that are not x86-64.
extern const WireCodecTable kWireCodecsDefault;
extern const WireCodecTable kWireCodecsAvx2;
extern const WireCodecTable kWireCodecsAvx512;

}  // namespace collectives::internal
}  // namespace lockstep
