#include <c10/util/Exception.h>

#include <lockstep/image/internal/exif.h>

namespace lockstep::image::internal {
namespace {

constexpr uint32_t kOrientationTag = 0x0112;
constexpr uint32_t kShort = 3;  // the type of a 16-bit number
constexpr size_t kEntryBytes = 12;

/// Numbers of a TIFF structure, in its byte order. Beyond the end they are 0.
class Tiff {
 public:
  explicit Tiff(std::span<const uint8_t> bytes) : bytes_(bytes), little_(!bytes.empty() && bytes[0] == 'I') {}

  uint32_t number(size_t at, size_t count) const {
    if (at > bytes_.size() || count > bytes_.size() - at) return 0;
    uint32_t value = 0;
    for (size_t i = 0; i < count; ++i) value = value << 8 | bytes_[little_ ? at + count - 1 - i : at + i];
    return value;
  }

 private:
  std::span<const uint8_t> bytes_;
  bool little_;
};

}  // namespace

int exif_orientation(std::span<const uint8_t> bytes) {
  const Tiff tiff(bytes);
  if (tiff.number(2, 2) != 42) return 1;  // the mark of TIFF
  const size_t directory = tiff.number(4, 4);
  const size_t entries = tiff.number(directory, 2);
  for (size_t i = 0; i < entries; ++i) {
    const size_t entry = directory + 2 + i * kEntryBytes;
    if (entry >= bytes.size()) break;
    if (tiff.number(entry, 2) != kOrientationTag || tiff.number(entry + 2, 2) != kShort) continue;
    const uint32_t orientation = tiff.number(entry + 8, 2);
    return orientation >= 1 && orientation <= 8 ? static_cast<int>(orientation) : 1;
  }
  return 1;
}

at::Tensor apply_orientation(const at::Tensor& image, int orientation) {
  switch (orientation) {
    case 1:
      return image;
    case 2:
      return image.flip({-1});
    case 3:
      return image.flip({-1, -2});
    case 4:
      return image.flip({-2});
    case 5:
      return image.transpose(-1, -2);
    case 6:
      return image.transpose(-1, -2).flip({-1});
    case 7:
      return image.transpose(-1, -2).flip({-1, -2});
    case 8:
      return image.transpose(-1, -2).flip({-2});
    default:
      TORCH_CHECK_VALUE(false, "an EXIF orientation is 1 to 8, not ", orientation);
  }
}

}  // namespace lockstep::image::internal
