#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <lockstep/image/transform.h>

/// Transforms without chance, after torchvision/transforms/transforms.py: the same names, arguments and
/// defaults. They take C×H×W tensors (Resize, crops and pads: uint8 or floating-point), don't change their
/// input, though the result may be a view of it, and are thread-safe. Wrong arguments are c10::ValueErrors.
namespace lockstep::image {

/// Height and width; one number means a square.
struct Size {
  Size(int64_t edge) : height(edge), width(edge) {}  // implicit: CenterCrop(224)
  Size(int64_t height, int64_t width) : height(height), width(width) {}
  int64_t height;
  int64_t width;
};

/// torchvision.transforms.InterpolationMode, those for tensors.
enum class InterpolationMode : uint8_t { kNearest, kNearestExact, kBilinear, kBicubic };

struct ResizeOptions {
  InterpolationMode interpolation = InterpolationMode::kBilinear;
  /// With one number as size: the longer edge is at most this; the shorter one gives way.
  std::optional<int64_t> max_size = std::nullopt;
  /// Bilinear and bicubic: filter before making smaller, as Pillow always does.
  bool antialias = true;
};

/// Resizes to height and width, or, given one number, so that the shorter edge has that length and the ratio
/// stays. uint8 is computed in integers, as by Pillow and torchvision's v2: within 1 level of Pillow, bicubic
/// within 2.
class Resize {
 public:
  explicit Resize(int64_t shorter_edge, const ResizeOptions& options = {});
  /// Throws when options.max_size is given, too.
  explicit Resize(Size size, const ResizeOptions& options = {});

  at::Tensor operator()(const at::Tensor& image) const;

 private:
  Size size_;
  bool shorter_edge_;
  ResizeOptions options_;
};

/// The middle of the image; where that is smaller than `size`, zeros around it.
class CenterCrop {
 public:
  explicit CenterCrop(Size size);
  at::Tensor operator()(const at::Tensor& image) const;

 private:
  Size size_;
};

/// How Pad and RandomCrop fill: with a value; with the edge's pixels; mirrored at the edge's pixels; mirrored
/// at the edge itself.
enum class PaddingMode : uint8_t { kConstant, kEdge, kReflect, kSymmetric };

/// Pixels on each border, not negative; torchvision's int, (left-right, top-bottom) or (left, top, right,
/// bottom).
struct Padding {
  Padding(int64_t all) : left(all), top(all), right(all), bottom(all) {}
  Padding(int64_t left_right, int64_t top_bottom)
      : left(left_right), top(top_bottom), right(left_right), bottom(top_bottom) {}
  Padding(int64_t left, int64_t top, int64_t right, int64_t bottom)
      : left(left), top(top), right(right), bottom(bottom) {}
  int64_t left;
  int64_t top;
  int64_t right;
  int64_t bottom;
};

/// Puts a border around the image. Reflecting takes at most the image's size less 1 on a side.
class Pad {
 public:
  explicit Pad(Padding padding, double fill = 0, PaddingMode mode = PaddingMode::kConstant);
  at::Tensor operator()(const at::Tensor& image) const;

 private:
  Padding padding_;
  double fill_;
  PaddingMode mode_;
};

/// uint8 in [0, 255] to float32 in [0, 1], contiguous, as torchvision's ToTensor makes of a Pillow image: the
/// byte divided by 255. Other types are refused, for Pillow images have only this one here; see
/// ConvertImageDtype.
class ToTensor {
 public:
  at::Tensor operator()(const at::Tensor& image) const;
};

/// To another type, scaled so that the largest values of integer types and 1.0 correspond. Throws for float
/// types to integer types that can't hold the result exactly (float32 to int32 or int64, float64 to int64).
class ConvertImageDtype {
 public:
  explicit ConvertImageDtype(at::ScalarType dtype);
  at::Tensor operator()(const at::Tensor& image) const;

 private:
  at::ScalarType dtype_;
};

/// (image - mean[channel]) / std[channel] of a floating-point image (one value serves all channels). Throws
/// for integer images: put ToTensor before it.
class Normalize {
 public:
  Normalize(const std::vector<double>& mean, const std::vector<double>& std);
  at::Tensor operator()(const at::Tensor& image) const;

 private:
  at::Tensor mean_;
  at::Tensor std_;
};

/// The rectangle at (top, left); what lies outside the image is 0. torchvision.transforms.functional.crop.
at::Tensor crop(const at::Tensor& image, int64_t top, int64_t left, int64_t height, int64_t width);

}  // namespace lockstep::image
