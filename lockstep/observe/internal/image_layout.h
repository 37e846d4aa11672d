#pragma once

#include <string>

namespace at {
class Tensor;
}

namespace lockstep::observe::internal {

/// An image, or a grid of a batch of images, as contiguous uint8 of shape (height, width, channels), from a
/// tensor whose dimensions are the letters of `dataformats` (CHW, HWC, HW, NCHW and so on; any case).
/// Anything but uint8 lies in [0, 1] and is clipped there; NaN is black. Gray becomes RGB, and a batch
/// becomes rows of eight. As torch/utils/tensorboard/_utils.py and summary.py. Throws c10::ValueError when
/// shape and format don't fit.
at::Tensor to_image(const at::Tensor& tensor, const std::string& dataformats);

}  // namespace lockstep::observe::internal
