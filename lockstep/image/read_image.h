#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>

namespace lockstep::image {

/// Which channels the decoded image has; torchvision.io.ImageReadMode.
enum class ImageReadMode : uint8_t {
  kUnchanged,  // those of the file; a palette's are indices (1), CMYK as stored (4)
  kGray,       // 1
  kGrayAlpha,  // 2; PNG only
  kRgb,        // 3
  kRgbAlpha,   // 4; PNG only
};

struct ImageReadOptions {
  ImageReadMode mode = ImageReadMode::kUnchanged;
  /// Turn and mirror the image as its EXIF orientation says. Python's ImageFolder doesn't either.
  bool apply_exif_orientation = false;
  /// Larger images are refused before memory is reserved for them. The default is what Pillow refuses.
  int64_t max_pixels = 178'956'970;
  /// JPEG only: 0 decodes in full size. Otherwise by 2, 4 or 8 smaller, the most that leaves both edges at
  /// least this long: much faster when a Resize to about that size follows, with slightly other pixels.
  /// Pillow's draft() with a square.
  int64_t minimum_size = 0;
  /// PNG with 16 bits: keep only the high 8, so that every image is uint8.
  bool eight_bit = false;
  /// JPEG only: damage that a decoder can paint over, which libjpeg calls a warning, is an error. Pillow and
  /// torchvision pass over it, and so does the default here.
  bool strict = false;
};

/// The bytes of a file, uint8 of one dimension; torchvision.io.read_file. Throws c10::Error that names the
/// file when it can't be read or is not a regular file. Thread-safe.
at::Tensor read_file(const std::string& path);

/// Decodes a JPEG or PNG image, told apart by their first bytes; torchvision.io.decode_image.
///
/// `input` holds the file's bytes: uint8, one dimension, contiguous, on the CPU. Returns C×H×W uint8, for a
/// PNG with 16 bits uint16 unless options.eight_bit. The memory is that of torchvision's (H×W×C, so channels
/// last). JPEG pixels are bit-equal to Pillow's and torchvision's for the same libjpeg-turbo algorithms (its
/// defaults: the accurate integer DCT and smooth upsampling); PNG pixels are exact. Alpha is dropped, not
/// blended, where the mode has none. Colour profiles are not applied.
///
/// Throws c10::Error that begins with `name`: neither JPEG nor PNG; truncated; corrupt; more pixels than
/// options.max_pixels; a mode that the format doesn't know; an unusual colour space. Memory is bounded by
/// max_pixels (times 3 or 4 bytes, twice as much for 16 bits; a progressive JPEG's coefficients take up to 8
/// bytes a pixel in addition). Thread-safe.
at::Tensor decode_image(const at::Tensor& input, const ImageReadOptions& options = {},
                        std::string_view name = "the image");

/// decode_image() of read_file(); errors name the file. torchvision.io.read_image. Thread-safe.
at::Tensor read_image(const std::string& path, const ImageReadOptions& options = {});

}  // namespace lockstep::image
