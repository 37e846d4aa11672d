#pragma once

#include <cstdint>
#include <span>

#include <ATen/core/Tensor.h>

namespace lockstep::image::internal {

/// The orientation, 1 to 8, that EXIF data (a TIFF header and what follows) tell; 1, upright, when they tell
/// none or are damaged. EXIF 2.32, 4.6.4 A. Thread-safe.
int exif_orientation(std::span<const uint8_t> tiff);

/// `image` (…×H×W) as a viewer shows it. Orientation 1 returns the image itself.
at::Tensor apply_orientation(const at::Tensor& image, int orientation);

}  // namespace lockstep::image::internal
