#pragma once

#include <string>

namespace at {
class Tensor;
}

namespace lockstep::observe::internal {

/// An image as a PNG file's bytes. `image`: contiguous uint8 of shape (height, width, channels) with 1
/// (gray), 2 (gray, alpha), 3 (RGB) or 4 (RGBA) channels. Throws c10::Error with libpng's text when that
/// fails.
std::string encode_png(const at::Tensor& image);

}  // namespace lockstep::observe::internal
