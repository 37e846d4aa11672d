#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace lockstep::data {

/// Reads an IDX file, the format of the MNIST family: two zero bytes, a type byte, the number of dimensions,
/// each dimension's size as a 32-bit big-endian number, then the elements, big-endian, row by row. Plain, or
/// compressed with gzip; which of the two is told by the first two bytes.
///
/// Returns a CPU tensor of the header's shape; dtype uint8, int8, int16, int32, float32 or float64 by the
/// type byte.
///
/// Throws c10::Error, always with the file's name and what is wrong with it: it can't be read; no IDX magic;
/// unknown type; no or more than 64 dimensions; sizes whose product overflows or exceeds what the file can
/// hold (seen before memory is reserved); truncated; bytes after the last element; a gzip stream that is
/// truncated, corrupt (its checksum is verified) or followed by something else. Thread-safe.
at::Tensor read_idx(const std::string& path);

}  // namespace lockstep::data
