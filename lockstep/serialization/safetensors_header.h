#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

/// The header of a safetensors file: its length (8 bytes, little-endian), then JSON, padded with spaces so
/// that the data begin at a multiple of 8. https://github.com/huggingface/safetensors, "Format".
namespace lockstep::serialization {

/// What a header may have, as in the original.
constexpr int64_t kMaxSafetensorsHeader = 100'000'000;

/// One tensor of a file.
struct SafetensorsEntry {
  std::string name;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> shape;  ///< torch's; of F4, which has two elements to a byte, in bytes
  int64_t begin = 0;           ///< first byte, and the one after the last, counted from the end of the header
  int64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> tensors;  ///< in the order of their bytes
  std::map<std::string, std::string> metadata;
};

/// safetensors' name of a dtype, "F32"; nothing for those that it doesn't have.
std::optional<std::string> safetensors_dtype(at::ScalarType dtype);
/// The other way round. "F6_E2M3" and "F6_E3M2" are safetensors', but not torch's.
std::optional<at::ScalarType> torch_dtype(std::string_view name);

/// Throws c10::ValueError that begins with `what` for a tensor that no safetensors file can hold.
void check_can_write(const at::Tensor& tensor, const std::string& what);

/// Bytes of a contiguous tensor; nothing on overflow. Sizes must not be negative.
std::optional<int64_t> bytes_of(const std::vector<int64_t>& shape, at::ScalarType dtype);

/// Sets `begin` and `end` and sorts as the original does: large elements first, so that all are aligned, then
/// by name. Shapes must not overflow. Returns the bytes of all data.
int64_t lay_out(std::vector<SafetensorsEntry>& tensors);

/// The header with its length before it. Throws c10::ValueError for a name that is not UTF-8 or reserved
/// ("__metadata__"), names given twice, a dtype that safetensors doesn't have, and more than
/// kMaxSafetensorsHeader.
std::string make_safetensors_header(const SafetensorsHeader& header);

/// Reads the JSON of a header after which `data_bytes` of data follow. Throws CheckpointError, beginning
/// with `what`, for anything that is not as it should be; as strict as the original, and about duplicate
/// names stricter. Takes memory for a small multiple of `json`, whatever it says. Thread-safe.
SafetensorsHeader parse_safetensors_header(std::string_view json, int64_t data_bytes,
                                           const std::string& what);

}  // namespace lockstep::serialization
