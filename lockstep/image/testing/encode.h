#pragma once

#include <cstdlib>
#include <cstring>
#include <jpeglib.h>
#include <png.h>
#include <string>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

/// For the tests of this room: images as files. Not installed.
namespace lockstep::image {

/// Waves, H×W×C uint8.
inline at::Tensor waves(int64_t height, int64_t width, int64_t channels) {
  at::Tensor image = at::empty({height, width, channels}, at::TensorOptions().dtype(at::kByte));
  auto* value = image.mutable_data_ptr<uint8_t>();
  for (int64_t i = 0; i < image.numel(); ++i) {
    value[i] = static_cast<uint8_t>(i / channels * (3 + i % channels) + i / (width * channels) * 7);
  }
  return image;
}

/// Encodes H×W×1 or H×W×3 uint8. libjpeg ends the process on an error, which a test may.
inline std::string encode_jpeg(const at::Tensor& image, int quality = 90, bool progressive = false) {
  jpeg_compress_struct info{};
  jpeg_error_mgr errors{};
  info.err = ::jpeg_std_error(&errors);
  jpeg_create_compress(&info);
  unsigned char* buffer = nullptr;
  unsigned long size = 0;
  ::jpeg_mem_dest(&info, &buffer, &size);
  info.image_height = static_cast<JDIMENSION>(image.size(0));
  info.image_width = static_cast<JDIMENSION>(image.size(1));
  info.input_components = static_cast<int>(image.size(2));
  info.in_color_space = image.size(2) == 1 ? JCS_GRAYSCALE : JCS_RGB;
  ::jpeg_set_defaults(&info);
  ::jpeg_set_quality(&info, quality, TRUE);
  if (progressive) ::jpeg_simple_progression(&info);
  ::jpeg_start_compress(&info, TRUE);
  for (int64_t row = 0; row < image.size(0); ++row) {
    auto* pixels = const_cast<uint8_t*>(image[row].const_data_ptr<uint8_t>());
    ::jpeg_write_scanlines(&info, &pixels, 1);
  }
  ::jpeg_finish_compress(&info);
  ::jpeg_destroy_compress(&info);
  std::string bytes(reinterpret_cast<const char*>(buffer), size);
  std::free(buffer);
  return bytes;
}

/// Encodes H×W×C uint8, C from 1 to 4.
inline std::string encode_png(const at::Tensor& image) {
  constexpr png_uint_32 kFormats[] = {PNG_FORMAT_GRAY, PNG_FORMAT_GA, PNG_FORMAT_RGB, PNG_FORMAT_RGBA};
  png_image png{};
  png.version = PNG_IMAGE_VERSION;
  png.height = static_cast<png_uint_32>(image.size(0));
  png.width = static_cast<png_uint_32>(image.size(1));
  png.format = kFormats[image.size(2) - 1];
  png_alloc_size_t size = PNG_IMAGE_PNG_SIZE_MAX(png);
  std::string bytes(size, '\0');
  TORCH_CHECK(::png_image_write_to_memory(&png, bytes.data(), &size, 0, image.const_data_ptr<uint8_t>(), 0,
                                          nullptr) != 0,
              png.message);
  bytes.resize(size);
  return bytes;
}

inline at::Tensor to_bytes(const std::string& content) {
  at::Tensor bytes = at::empty({static_cast<int64_t>(content.size())}, at::TensorOptions().dtype(at::kByte));
  if (!content.empty()) std::memcpy(bytes.mutable_data_ptr(), content.data(), content.size());
  return bytes;
}

}  // namespace lockstep::image
