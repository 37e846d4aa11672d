#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include <ATen/core/Tensor.h>

#include <lockstep/image/read_image.h>

/// The two formats of decode_image(): what it documents, for bytes that begin as the format does.
/// Thread-safe.
namespace lockstep::image::internal {

at::Tensor decode_jpeg(std::span<const uint8_t> bytes, const ImageReadOptions& options,
                       std::string_view name);
at::Tensor decode_png(std::span<const uint8_t> bytes, const ImageReadOptions& options, std::string_view name);

/// Throws for an image with more pixels than options.max_pixels.
void check_size(int64_t width, int64_t height, const ImageReadOptions& options, std::string_view name);

}  // namespace lockstep::image::internal
