#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include <lockstep/image/transform.h>
#include <lockstep/image/transforms.h>

/// Transforms with chance, after torchvision/transforms/transforms.py: the same names, arguments, defaults,
/// and the same draws, so that a generator in the state of Python's gives Python's crops and flips. They take
/// C×H×W tensors and are thread-safe for different generators (the default generator locks itself for each
/// draw).
namespace lockstep::image {

struct RandomCropOptions {
  std::optional<Padding> padding = std::nullopt;
  /// Pad an image that is smaller than the crop, instead of refusing it.
  bool pad_if_needed = false;
  double fill = 0;
  PaddingMode padding_mode = PaddingMode::kConstant;
};

/// A rectangle of this size, anywhere in the padded image. Throws c10::ValueError for a smaller image.
class RandomCrop {
 public:
  explicit RandomCrop(Size size, const RandomCropOptions& options = {});
  at::Tensor operator()(const at::Tensor& image, const OptionalGenerator& generator = std::nullopt) const;

 private:
  Size size_;
  RandomCropOptions options_;
};

struct RandomResizedCropOptions {
  /// Bounds of the crop's share of the image's area.
  std::array<double, 2> scale = {0.08, 1.0};
  /// Bounds of its width divided by its height.
  std::array<double, 2> ratio = {3.0 / 4.0, 4.0 / 3.0};
  InterpolationMode interpolation = InterpolationMode::kBilinear;
  bool antialias = true;
};

/// A random part of the image, resized: Inception's crop.
class RandomResizedCrop {
 public:
  explicit RandomResizedCrop(Size size, const RandomResizedCropOptions& options = {});
  at::Tensor operator()(const at::Tensor& image, const OptionalGenerator& generator = std::nullopt) const;

  struct Box {
    int64_t top;
    int64_t left;
    int64_t height;
    int64_t width;
  };
  /// The part that is taken of an image of this size; torchvision's get_params.
  Box get_params(Size image, const OptionalGenerator& generator = std::nullopt) const;

 private:
  RandomResizedCropOptions options_;
  std::array<double, 2> log_ratio_;
  Resize resize_;
};

/// Mirrors left and right with probability p.
class RandomHorizontalFlip {
 public:
  explicit RandomHorizontalFlip(double p = 0.5);
  at::Tensor operator()(const at::Tensor& image, const OptionalGenerator& generator = std::nullopt) const;

 private:
  double p_;
};

/// Mirrors top and bottom with probability p.
class RandomVerticalFlip {
 public:
  explicit RandomVerticalFlip(double p = 0.5);
  at::Tensor operator()(const at::Tensor& image, const OptionalGenerator& generator = std::nullopt) const;

 private:
  double p_;
};

}  // namespace lockstep::image
