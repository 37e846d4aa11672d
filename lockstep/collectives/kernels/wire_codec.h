#pragma once

#include <cstddef>

#include <c10/core/ScalarType.h>

#include <lockstep/collectives/kernels/cpu_capability.h>
#include <lockstep/collectives/kernels/reduce_kernels_table.h>
#include <lockstep/collectives/kernels/wire_codec_table.h>

/// The forms in which float32 numbers travel between hosts, vectorised for the machine. Thread-safe.
///
/// Rounding must not make ranks differ, so a number that travelled is used in its decoded form by its sender, too:
///
/// - Direct exchange (two hosts or few): each host encodes its partial sum, with its own residual. Every host decodes the
///   partials of all hosts, its own among them, and adds them in the order of hosts: decode_into() the first one,
///   decode_add() the others. All compute the same sum from the same bytes.
/// - Reduce-scatter and all-gather between hosts: partial sums on their way to the slice's owner are encoded by their
///   senders; the owner adds the decoded ones and its own, encodes the result once, and takes the decoded result, as
///   all others do. Each encoding has a residual with the rank that encodes. Partial sums that are passed on and added to
///   (ring, recursive halving) would be rounded anew by each rank on the way; encoded reductions don't take those ways.
///
/// An average divides after the last addition, before a result is encoded.
namespace lockstep {

/// The codec for the best instruction set of this machine; see cpu_capability(). The reference stays valid for ever.
const WireCodec& wire_codec(HostCompression compression);
/// For tests and benchmarks.
const WireCodec& wire_codec_for(CpuCapability capability, HostCompression compression);

/// Bytes of `count` encoded float32 elements.
size_t encoded_bytes(HostCompression compression, size_t count);

/// Whether a reduction is encoded between hosts: sums and averages of float32 from 16 KiB on. Smaller ones take no less
/// time for fewer bytes, and among them are the few numbers that programs add up beside gradients (losses, counts), in
/// which one scale would wipe out the small ones. A program that chose float64 wants its precision; float16 and
/// bfloat16 are short already.
bool is_encoded(HostCompression compression, at::ScalarType type, ReduceOperation operation, size_t count);

}  // namespace lockstep
