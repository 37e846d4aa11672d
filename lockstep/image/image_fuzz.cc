// Any bytes as an image, with any options: a tensor within the limits, or a c10::Error that is not about
// memory.
#include <cstdint>
#include <cstdlib>
#include <string>

#include <c10/util/Exception.h>

#include <lockstep/image/read_image.h>
#include <lockstep/image/testing/encode.h>
#include <lockstep/testing/fuzz_driver.h>

namespace lockstep::image::image_fuzz {
namespace {

constexpr int64_t kMostPixels = 1 << 16;

/// APP1 with a TIFF header, one entry, orientation 6; goes after a JPEG's first marker.
std::string with_exif(const std::string& jpeg) {
  const std::string tiff("II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0", 26);
  const std::string body = std::string("Exif\0\0", 6) + tiff;
  const auto length = static_cast<char>(body.size() + 2);
  return jpeg.substr(0, 2) + std::string("\xff\xe1\0", 3) + length + body + jpeg.substr(2);
}

/// The first byte chooses the options.
ImageReadOptions options_of(uint8_t choice) {
  return {.mode = static_cast<ImageReadMode>(choice % 5),
          .apply_exif_orientation = (choice & 8) != 0,
          .max_pixels = kMostPixels,
          .minimum_size = (choice & 16) != 0 ? 4 : 0,
          .eight_bit = (choice & 32) != 0,
          .strict = (choice & 64) != 0};
}

std::vector<std::string> seeds() {
  std::vector<std::string> seeds;
  for (const int64_t channels : {1, 3}) {
    for (const bool progressive : {false, true}) {
      seeds.push_back('\x03' + encode_jpeg(waves(17, 20, channels), 75, progressive));
    }
  }
  seeds.push_back('\x18' + with_exif(encode_jpeg(waves(16, 9, 3))));
  for (int64_t channels = 1; channels <= 4; ++channels) {
    for (const char choice : {'\x00', '\x01', '\x29', '\x03'}) {
      seeds.push_back(choice + encode_png(waves(5, 6, channels)));
    }
  }
  return seeds;
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(image, seeds) {
  if (size == 0) return 0;
  const std::string content(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    const at::Tensor image = decode_image(to_bytes(content), options_of(data[0]));
    if (image.dim() != 3 || image.size(0) < 1 || image.size(0) > 4) std::abort();
    if (image.size(1) * image.size(2) < 1 || image.size(1) * image.size(2) > kMostPixels) std::abort();
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error&) {
    // what is documented
  }
  return 0;
}

}  // namespace lockstep::image::image_fuzz
