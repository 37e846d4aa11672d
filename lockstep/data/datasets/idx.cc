#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <lockstep/data/datasets/idx.h>
#include <lockstep/data/datasets/internal/byte_reader.h>

namespace lockstep::data {
namespace {

constexpr int kMaximumDimensions = 64;  // what ATen's operations can iterate over

at::ScalarType scalar_type(uint8_t code, const std::string& path) {
  switch (code) {
    case 0x08:
      return at::kByte;
    case 0x09:
      return at::kChar;
    case 0x0b:
      return at::kShort;
    case 0x0c:
      return at::kInt;
    case 0x0d:
      return at::kFloat;
    case 0x0e:
      return at::kDouble;
    default:
      TORCH_CHECK(false, path, ": IDX type code ", static_cast<int>(code),
                  " is not supported; known are 8 (uint8), 9 (int8), 11 (int16), 12 (int32), 13 (float32), "
                  "14 (float64)");
  }
}

/// The header's sizes, one per dimension.
std::vector<int64_t> read_sizes(internal::ByteReader& file, int dimensions) {
  TORCH_CHECK(dimensions >= 1 && dimensions <= kMaximumDimensions, file.path(), ": the IDX header tells ",
              dimensions, " dimensions; 1 to ", kMaximumDimensions, " are possible");
  std::vector<int64_t> sizes;
  for (int i = 0; i < dimensions; ++i) {
    std::array<uint8_t, 4> bytes{};
    TORCH_CHECK(file.read(bytes.data(), 4) == 4, file.path(), ": truncated within the IDX header, which has ",
                4 + 4 * dimensions, " bytes");
    sizes.push_back(int64_t{bytes[0]} << 24 | int64_t{bytes[1]} << 16 | int64_t{bytes[2]} << 8 |
                    int64_t{bytes[3]});
  }
  return sizes;
}

void reverse_bytes_of_elements(uint8_t* data, int64_t bytes, int64_t element) {
  for (int64_t at = 0; at < bytes; at += element) std::reverse(data + at, data + at + element);
}

}  // namespace

at::Tensor read_idx(const std::string& path) {
  internal::ByteReader file(path);
  std::array<uint8_t, 4> magic{};
  TORCH_CHECK(file.read(magic.data(), 4) == 4, path,
              ": truncated within the IDX magic number, the first 4 bytes");
  TORCH_CHECK(magic[0] == 0 && magic[1] == 0, path, ": not an IDX file: its first two bytes are ",
              static_cast<int>(magic[0]), " and ", static_cast<int>(magic[1]), ", which should be 0");
  const at::ScalarType type = scalar_type(magic[2], path);
  const std::vector<int64_t> sizes = read_sizes(file, magic[3]);

  const auto element = static_cast<int64_t>(c10::elementSize(type));
  const at::IntArrayRef shape(sizes);
  int64_t bytes = element;
  bool overflow = false;
  // A zero anywhere makes the product zero, whatever the other sizes are.
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) bytes = 0;
  for (const int64_t size : sizes) overflow = __builtin_mul_overflow(bytes, size, &bytes) || overflow;
  TORCH_CHECK(!overflow, path, ": the sizes ", shape,
              " in the IDX header are too large: their product overflows");
  const int64_t header = 4 + 4 * static_cast<int64_t>(sizes.size());
  TORCH_CHECK(bytes <= file.capacity() - header, path, ": truncated: the IDX header promises ", shape,
              ", that is ", bytes, " bytes, and the file can't hold more than ",
              std::max<int64_t>(file.capacity() - header, 0));

  at::Tensor result = at::empty(shape, at::TensorOptions().dtype(type));
  auto* data = static_cast<uint8_t*>(result.mutable_data_ptr());
  const int64_t got = file.read(data, bytes);
  TORCH_CHECK(got == bytes, path, ": truncated: the IDX header promises ", shape, ", that is ", bytes,
              " bytes, and the file holds ", got);
  uint8_t beyond = 0;
  TORCH_CHECK(file.read(&beyond, 1) == 0, path, ": there are bytes after the ", bytes,
              " that the IDX header promises (", shape, ")");
  if constexpr (std::endian::native == std::endian::little) {
    if (element > 1) reverse_bytes_of_elements(data, bytes, element);
  }
  return result;
}

}  // namespace lockstep::data
