#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace lockstep::checkpoint::internal {

/// A tensor that a rank has: its part, its name, its bytes.
using TensorOffer = std::tuple<std::string, std::string, int64_t>;

/// What is shared out is worth it from so many bytes on.
constexpr int64_t kLeastAssigned = int64_t{64} << 10;

/// A file that a rank is to write, of which part, and which of its offers go into it.
using FileTask = std::tuple<std::string, std::string, std::vector<int64_t>>;

/// Who writes what: `offers` and the result are by rank. Every tensor is written once, by a rank that has it:
/// the lowest, or when `sharded` the one that has least to write so far, the largest tensors first. Those
/// under `least_assigned` bytes are always the lowest's: buffers of BatchNorm, which may differ from rank to
/// rank and belong together. The tensors of a part that one rank writes go into PART.safetensors, those that
/// K ranks write into PART-00001-of-K.safetensors and so on. A pure function. Throws c10::ValueError for
/// parts whose names make the same file.
std::vector<std::vector<FileTask>> assign_files(const std::vector<std::vector<TensorOffer>>& offers,
                                                bool sharded, int64_t least_assigned = kLeastAssigned);

/// The part's name as a file's: letters, digits, '_', '-' and '.' stay, but for a '.' at the front; other
/// bytes become %XX. Throws c10::ValueError for more than 200 characters, and for none.
std::string file_stem(const std::string& part);

}  // namespace lockstep::checkpoint::internal
