#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/checkpoint/internal/file_io.h>
#include <lockstep/serialization/safetensors_header.h>

/// Safetensors files as a whole: writing tensors with their checksums, and reading them.
namespace lockstep::checkpoint::internal {

/// In bytes: where the tensors of one buffer begin, so that vector instructions and caches like them.
constexpr int64_t kTensorAlignment = 64;

/// A tensor and the name that it gets in its file.
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// What is known of a file once it is written.
struct WrittenFile {
  int64_t bytes = 0;
  std::string checksum;
  std::vector<int64_t> offsets;        ///< where each tensor's bytes begin in the file, in the order given
  std::vector<std::string> checksums;  ///< of each tensor, in the order given
};

struct WriteOptions {
  bool sync = true;
  bool checksums = true;
  /// When it becomes true, writing ends with a CheckpointError. May be null.
  const std::atomic<bool>* cancelled = nullptr;
};

/// The tensor as its bytes lie in a file: on the CPU, contiguous, without gradient; itself if it is so.
at::Tensor as_written(const at::Tensor& tensor);

/// Writes a new file. Throws CheckpointError, and leaves a part of the file then; c10::ValueError for tensors
/// and names that the format doesn't have, and leaves nothing.
WrittenFile write_tensor_file(const std::filesystem::path& path, const std::vector<NamedTensor>& tensors,
                              const std::map<std::string, std::string>& metadata,
                              const WriteOptions& options);

/// The header of an open file, and where its data begin.
struct OpenTensorFile {
  serialization::SafetensorsHeader header;
  int64_t data_begin = 0;
};
/// Throws CheckpointError. Takes no memory for what the file can't hold.
OpenTensorFile read_tensor_header(const InputFile& file);

/// All tensors, by name, in memory that they share until the last one goes; of dtypes and shapes as in the
/// header. With `checksum`, it receives the file's.
std::map<std::string, at::Tensor> read_tensors(const InputFile& file, const OpenTensorFile& open,
                                               std::string* checksum = nullptr);

/// Makes each bool that a file's bytes hold 0 or 1, as memory of bools must be. Does nothing for other
/// dtypes.
void normalize_bools(char* data, size_t bytes, at::ScalarType dtype);

/// The checksum of a part of a file. Throws CheckpointError when there is no such part.
std::string checksum_of_range(const InputFile& file, int64_t offset, int64_t bytes);

}  // namespace lockstep::checkpoint::internal
