#include <algorithm>
#include <cmath>

#include <ATen/ops/_upsample_bicubic2d_aa.h>
#include <ATen/ops/_upsample_bilinear2d_aa.h>
#include <ATen/ops/_upsample_nearest_exact2d.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/pad.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/upsample_bicubic2d.h>
#include <ATen/ops/upsample_bilinear2d.h>
#include <ATen/ops/upsample_nearest2d.h>
#include <c10/util/Exception.h>

#include <lockstep/image/transforms.h>

namespace lockstep::image {
namespace {

void check_image(const at::Tensor& image, const char* who) {
  TORCH_CHECK_VALUE(image.defined() && image.dim() == 3, who, " takes an image of shape (C, H, W), not ",
                    image.defined() ? image.sizes() : at::IntArrayRef());
}

void check_positive(Size size, const char* who) {
  TORCH_CHECK_VALUE(size.height > 0 && size.width > 0, who, ": the size is ", size.height, "×", size.width,
                    "; both should be at least 1");
}

/// torchvision's _compute_resized_output_size for one number.
Size keep_ratio(int64_t height, int64_t width, int64_t shorter_edge, const std::optional<int64_t>& max_size) {
  const int64_t old_short = std::min(height, width);
  const int64_t old_long = std::max(height, width);
  int64_t new_short = shorter_edge;
  // Python's int(a * b / c) of integers: a correctly rounded division, then truncation.
  auto new_long =
      static_cast<int64_t>(static_cast<double>(shorter_edge * old_long) / static_cast<double>(old_short));
  if (max_size && new_long > *max_size) {
    new_short =
        static_cast<int64_t>(static_cast<double>(*max_size * new_short) / static_cast<double>(new_long));
    new_long = *max_size;
  }
  return width <= height ? Size(new_long, new_short) : Size(new_short, new_long);
}

at::Tensor interpolate(const at::Tensor& batch, Size size, const ResizeOptions& options) {
  const std::array<int64_t, 2> sizes = {size.height, size.width};
  switch (options.interpolation) {
    case InterpolationMode::kNearest:
      return at::upsample_nearest2d(batch, sizes);
    case InterpolationMode::kNearestExact:
      return at::_upsample_nearest_exact2d(batch, sizes);
    case InterpolationMode::kBilinear:
      return options.antialias ? at::_upsample_bilinear2d_aa(batch, sizes, /*align_corners=*/false)
                               : at::upsample_bilinear2d(batch, sizes, /*align_corners=*/false);
    case InterpolationMode::kBicubic:
      return options.antialias ? at::_upsample_bicubic2d_aa(batch, sizes, /*align_corners=*/false)
                               : at::upsample_bicubic2d(batch, sizes, /*align_corners=*/false);
  }
  TORCH_CHECK_VALUE(false, "an InterpolationMode that does not exist");
}

/// np.pad's "symmetric" indices along one edge: …1 0 | 0 1 2 … n-1 | n-1 n-2…, as often as needed.
at::Tensor symmetric_indices(int64_t size, int64_t before, int64_t after) {
  at::Tensor indices = at::arange(-before, size + after, at::TensorOptions().dtype(at::kLong));
  auto* index = indices.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < indices.numel(); ++i) {
    const int64_t phase = ((index[i] % (2 * size)) + 2 * size) % (2 * size);
    index[i] = phase < size ? phase : 2 * size - 1 - phase;
  }
  return indices;
}

/// How many bits of an integer type hold a value: the largest is 2^bits - 1.
int value_bits(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte:
      return 8;
    case at::kChar:
      return 7;
    case at::kUInt16:
      return 16;
    case at::kShort:
      return 15;
    case at::kInt:
      return 31;
    case at::kLong:
      return 63;
    default:
      TORCH_CHECK_VALUE(false,
                        "ConvertImageDtype knows uint8, int8, uint16, int16, int32, int64 and floating-point "
                        "types, not ",
                        dtype);
  }
}

/// torchvision's float(_max_value(dtype))
double max_value(at::ScalarType dtype) {
  return std::exp2(value_bits(dtype)) - 1;
}

}  // namespace

Resize::Resize(int64_t shorter_edge, const ResizeOptions& options)
    : size_(shorter_edge), shorter_edge_(true), options_(options) {
  check_positive(size_, "Resize");
  TORCH_CHECK_VALUE(
      !options.max_size || *options.max_size > shorter_edge, "max_size = ", *options.max_size,
      " must be strictly greater than the requested size for the smaller edge size = ", shorter_edge);
}

Resize::Resize(Size size, const ResizeOptions& options)
    : size_(size), shorter_edge_(false), options_(options) {
  check_positive(size_, "Resize");
  TORCH_CHECK_VALUE(!options.max_size,
                    "max_size should only be passed if size specifies the length of the smaller edge, i.e. "
                    "size should be one number");
}

at::Tensor Resize::operator()(const at::Tensor& image) const {
  check_image(image, "Resize");
  const Size size =
      shorter_edge_ ? keep_ratio(image.size(1), image.size(2), size_.height, options_.max_size) : size_;
  if (size.height == image.size(1) && size.width == image.size(2)) return image;
  TORCH_CHECK_VALUE(size.height > 0 && size.width > 0, "Resize: an image of ", image.size(1), "×",
                    image.size(2), " pixels would become ", size.height, "×", size.width);
  return interpolate(image.unsqueeze(0), size, options_).squeeze(0);
}

at::Tensor crop(const at::Tensor& image, int64_t top, int64_t left, int64_t height, int64_t width) {
  check_image(image, "crop");
  const int64_t bottom = top + height;
  const int64_t right = left + width;
  // The part of the rectangle that lies in the image, and what is missing around it.
  const int64_t first_row = std::clamp<int64_t>(top, 0, image.size(1));
  const int64_t last_row = std::clamp<int64_t>(bottom, first_row, image.size(1));
  const int64_t first_column = std::clamp<int64_t>(left, 0, image.size(2));
  const int64_t last_column = std::clamp<int64_t>(right, first_column, image.size(2));
  at::Tensor part = image.slice(1, first_row, last_row).slice(2, first_column, last_column);
  if (part.size(1) == height && part.size(2) == width) return part;
  const int64_t above = std::clamp<int64_t>(-top, 0, height);
  const int64_t before = std::clamp<int64_t>(-left, 0, width);
  return at::constant_pad_nd(part,
                             {before, width - before - part.size(2), above, height - above - part.size(1)});
}

CenterCrop::CenterCrop(Size size) : size_(size) {
  check_positive(size, "CenterCrop");
}

at::Tensor CenterCrop::operator()(const at::Tensor& image) const {
  check_image(image, "CenterCrop");
  // As Python's: padded first, half of it (rounded down) before the image; then int(round(x / 2)), which
  // rounds a half to even, as nearbyint() does.
  const auto offset = [](int64_t have, int64_t want) {
    if (want > have) return -((want - have) / 2);
    return static_cast<int64_t>(std::nearbyint(static_cast<double>(have - want) / 2));
  };
  return crop(image, offset(image.size(1), size_.height), offset(image.size(2), size_.width), size_.height,
              size_.width);
}

Pad::Pad(Padding padding, double fill, PaddingMode mode) : padding_(padding), fill_(fill), mode_(mode) {
  TORCH_CHECK_VALUE(padding.left >= 0 && padding.top >= 0 && padding.right >= 0 && padding.bottom >= 0,
                    "Pad: a border can't be negative: left ", padding.left, ", top ", padding.top, ", right ",
                    padding.right, ", bottom ", padding.bottom, "; crop() takes pixels away");
}

at::Tensor Pad::operator()(const at::Tensor& image) const {
  check_image(image, "Pad");
  const std::array<int64_t, 4> sides = {padding_.left, padding_.right, padding_.top, padding_.bottom};
  if (mode_ == PaddingMode::kConstant) return at::constant_pad_nd(image, sides, fill_);
  TORCH_CHECK_VALUE(image.size(1) > 0 && image.size(2) > 0, "Pad: an image of shape ", image.sizes(),
                    " has no pixels to repeat");
  if (mode_ == PaddingMode::kSymmetric) {
    return image.index_select(1, symmetric_indices(image.size(1), padding_.top, padding_.bottom))
        .index_select(2, symmetric_indices(image.size(2), padding_.left, padding_.right));
  }
  // ATen mirrors and repeats floating-point numbers only.
  const at::Tensor numbers = image.is_floating_point() ? image : image.to(at::kFloat);
  return at::pad(numbers, sides, mode_ == PaddingMode::kEdge ? "replicate" : "reflect")
      .to(image.scalar_type());
}

at::Tensor ToTensor::operator()(const at::Tensor& image) const {
  check_image(image, "ToTensor");
  TORCH_CHECK_VALUE(image.scalar_type() == at::kByte, "ToTensor takes uint8 images, not ",
                    image.scalar_type(), "; use ConvertImageDtype(at::kFloat)");
  // 256 quotients instead of one per pixel: the same values, and no conversion that strides would slow down.
  static const std::array<float, 256> quotients = [] {
    std::array<float, 256> table{};
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<float>(i) / 255.0F;
    return table;
  }();
  const int64_t height = image.size(1);
  const int64_t width = image.size(2);
  const int64_t step = image.stride(2);
  at::Tensor result = at::empty(image.sizes(), at::TensorOptions().dtype(at::kFloat));
  auto* out = result.mutable_data_ptr<float>();
  const auto* pixels = image.const_data_ptr<uint8_t>();
  for (int64_t channel = 0; channel < image.size(0); ++channel) {
    for (int64_t row = 0; row < height; ++row) {
      const uint8_t* pixel = pixels + channel * image.stride(0) + row * image.stride(1);
      for (int64_t column = 0; column < width; ++column, pixel += step) *out++ = quotients[*pixel];
    }
  }
  return result;
}

ConvertImageDtype::ConvertImageDtype(at::ScalarType dtype) : dtype_(dtype) {
  if (!at::isFloatingType(dtype)) value_bits(dtype);  // throws for what can't be converted to
}

at::Tensor ConvertImageDtype::operator()(const at::Tensor& image) const {
  const at::ScalarType from = image.scalar_type();
  if (from == dtype_) return image;
  if (at::isFloatingType(from)) {
    if (at::isFloatingType(dtype_)) return image.to(dtype_);
    TORCH_CHECK(!(from == at::kFloat && (dtype_ == at::kInt || dtype_ == at::kLong)) &&
                    !(from == at::kDouble && dtype_ == at::kLong),
                "The cast from ", from, " to ", dtype_, " cannot be performed safely.");
    constexpr double kEpsilon = 1e-3;  // so that each integer gets an equal share of [0, 1]
    return image.mul(max_value(dtype_) + 1.0 - kEpsilon).to(dtype_);
  }
  if (at::isFloatingType(dtype_)) return image.to(dtype_).div(max_value(from));
  const int lost_bits = value_bits(from) - value_bits(dtype_);
  // ATen hardly computes with uint16.
  const at::Tensor numbers = from == at::kUInt16 ? image.to(at::kInt) : image;
  if (lost_bits > 0) return numbers.floor_divide(int64_t{1} << lost_bits).to(dtype_);
  return numbers.to(dtype_).mul(int64_t{1} << -lost_bits);
}

Normalize::Normalize(const std::vector<double>& mean, const std::vector<double>& std)
    : mean_(at::tensor(mean, at::kDouble).view({-1, 1, 1})),
      std_(at::tensor(std, at::kDouble).view({-1, 1, 1})) {
  TORCH_CHECK_VALUE(!mean.empty() && !std.empty(),
                    "Normalize: mean and std need a value, or one per channel");
  TORCH_CHECK_VALUE(std::find(std.begin(), std.end(), 0.0) == std.end(),
                    "std evaluated to zero, leading to division by zero.");
}

at::Tensor Normalize::operator()(const at::Tensor& image) const {
  TORCH_CHECK_TYPE(image.is_floating_point(), "Input tensor should be a float tensor. Got ",
                   image.scalar_type(), ". Put ToTensor() before Normalize");
  TORCH_CHECK_VALUE(
      image.dim() >= 3,
      "Expected tensor to be a tensor image of size (..., C, H, W). Got tensor.size() = ", image.sizes());
  const auto fits = [&](const at::Tensor& values) {
    return values.size(0) == 1 || values.size(0) == image.size(-3);
  };
  TORCH_CHECK_VALUE(fits(mean_) && fits(std_), "Normalize has ", mean_.size(0), " means and ", std_.size(0),
                    " standard deviations, and the image ", image.size(-3), " channels");
  return image.sub(mean_.to(image.scalar_type())).div_(std_.to(image.scalar_type()));
}

}  // namespace lockstep::image
