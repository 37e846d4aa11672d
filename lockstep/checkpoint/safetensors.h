#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <lockstep/base/errors.h>

/// Reading and writing safetensors files, with the names of Python's safetensors.torch, which reads what this
/// writes and writes what this reads. https://github.com/huggingface/safetensors describes the format.
///
/// dtypes: all of the format that torch has: bool, uint8 to uint64, int8 to int64, float16, bfloat16,
/// float32, float64, complex64, the five float8 types and float4_e2m1fn_x2; a bool whose byte is neither 0
/// nor 1 is read as true. Not complex32 and complex128, nor quantized ones.
namespace lockstep::safetensors {

/// Writes a new file, in place of one that is there: under a temporary name that is renamed at the end.
/// Tensors that are not contiguous or not on the CPU are copied; those that share memory are written each,
/// unlike in Python, which refuses them. Throws CheckpointError when the file can't be written;
/// c10::ValueError for a tensor or name that the format doesn't have (a sparse tensor, complex128, a name
/// that is not UTF-8). Thread-safe.
void save_file(const std::map<std::string, at::Tensor>& tensors, const std::filesystem::path& filename,
               const std::map<std::string, std::string>& metadata = {});

/// All tensors of a file, in one piece of memory, which goes with the last of them. Throws as SafeOpen does.
/// Thread-safe.
std::map<std::string, at::Tensor> load_file(const std::filesystem::path& filename,
                                            c10::Device device = c10::kCPU);

/// A file whose tensors are read one by one, when they are asked for: safetensors.safe_open. Thread-safe.
class SafeOpen {
 public:
  /// Reads the header and checks all of it. Throws CheckpointError with the file's name and what is wrong:
  /// it can't be read; truncated; a header over 100 MB or larger than the file; no JSON; fields that are
  /// missing, unknown, twice there or of another kind; names given twice; dtypes that are unknown or not
  /// torch's; shapes that overflow or don't fit the bytes; bytes that are another tensor's too, or no
  /// tensor's, or outside of the file. No memory is taken for what the file can't hold.
  explicit SafeOpen(const std::filesystem::path& filename, c10::Device device = c10::kCPU);
  ~SafeOpen();
  SafeOpen(SafeOpen&&) noexcept;
  SafeOpen& operator=(SafeOpen&&) noexcept;

  /// The names, in the order of their bytes in the file (Python's offset_keys).
  std::vector<std::string> keys() const;
  /// What the writer noted beside the tensors; empty if nothing.
  const std::map<std::string, std::string>& metadata() const;
  /// A new tensor. Throws c10::ValueError for a name that is not in the file.
  at::Tensor get_tensor(const std::string& name) const;

 private:
  struct File;
  std::unique_ptr<File> file_;
  c10::Device device_;
};

}  // namespace lockstep::safetensors
