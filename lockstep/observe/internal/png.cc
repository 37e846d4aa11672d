#include <array>
#include <cstdint>
#include <png.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <lockstep/observe/internal/png.h>

namespace lockstep::observe::internal {

std::string encode_png(const at::Tensor& image) {
  TORCH_CHECK_VALUE(image.numel() > 0, "an image of shape ", image.sizes(), " has no pixels to show");
  constexpr std::array<png_uint_32, 4> kFormats = {PNG_FORMAT_GRAY, PNG_FORMAT_GA, PNG_FORMAT_RGB,
                                                   PNG_FORMAT_RGBA};
  png_image header{};
  header.version = PNG_IMAGE_VERSION;
  header.height = static_cast<png_uint_32>(image.size(0));
  header.width = static_cast<png_uint_32>(image.size(1));
  header.format = kFormats.at(static_cast<size_t>(image.size(2) - 1));
  const auto* pixels = image.const_data_ptr<uint8_t>();
  png_alloc_size_t size = PNG_IMAGE_PNG_SIZE_MAX(header);
  std::string bytes(size, '\0');
  const bool done = png_image_write_to_memory(&header, bytes.data(), &size, /*convert_to_8bit=*/0, pixels,
                                              /*row_stride=*/0, /*colormap=*/nullptr) != 0;
  TORCH_CHECK(done, "cannot write an image of ", image.size(0), " by ", image.size(1),
              " as PNG: ", header.message);
  bytes.resize(size);
  return bytes;
}

}  // namespace lockstep::observe::internal
