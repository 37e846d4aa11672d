#include <cmath>

#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <lockstep/image/random_transforms.h>

namespace lockstep::image {
namespace {

// Draws are ATen's, so that each takes from the generator what Python's takes.

/// torch.randint(0, below, size=(1,)).item()
int64_t draw_integer(int64_t below, const OptionalGenerator& generator) {
  return at::randint(0, below, {1}, generator, at::TensorOptions().dtype(at::kLong)).item<int64_t>();
}

/// torch.empty(1).uniform_(low, high)
at::Tensor draw_uniform(double low, double high, const OptionalGenerator& generator) {
  return at::empty({1}, at::TensorOptions().dtype(at::kFloat)).uniform_(low, high, generator);
}

/// torch.rand(1) < p, in float32 as there
bool draw_chance(double p, const OptionalGenerator& generator) {
  return at::rand({1}, generator, at::TensorOptions().dtype(at::kFloat)).item<float>() <
         static_cast<float>(p);
}

/// Python's int(round(x)): a half goes to even.
int64_t rounded(double x) {
  return static_cast<int64_t>(std::nearbyint(x));
}

void check_probability(double p, const char* who) {
  TORCH_CHECK_VALUE(p >= 0 && p <= 1, who, ": p is a probability, and ", p, " is outside of [0, 1]");
}

void check_bounds(const std::array<double, 2>& bounds, const char* what) {
  TORCH_CHECK_VALUE(0 < bounds[0] && bounds[0] <= bounds[1] && std::isfinite(bounds[1]),
                    "RandomResizedCrop: ", what, " is (", bounds[0], ", ", bounds[1],
                    "); it should be of kind (min, max), above 0");
}

/// torch.log(torch.tensor(bounds)): in float32, and by ATen, for the last bit's sake.
std::array<double, 2> log_of(const std::array<double, 2>& bounds) {
  const at::Tensor logarithms = at::tensor(at::ArrayRef<double>(bounds), at::kFloat).log_();
  return {logarithms[0].item<float>(), logarithms[1].item<float>()};
}

}  // namespace

RandomCrop::RandomCrop(Size size, const RandomCropOptions& options) : size_(size), options_(options) {
  TORCH_CHECK_VALUE(size.height > 0 && size.width > 0, "RandomCrop: the size is ", size.height, "×",
                    size.width, "; both should be at least 1");
}

at::Tensor RandomCrop::operator()(const at::Tensor& image, const OptionalGenerator& generator) const {
  const auto pad = [this](const at::Tensor& smaller, Padding padding) {
    return Pad(padding, options_.fill, options_.padding_mode)(smaller);
  };
  at::Tensor from = options_.padding ? pad(image, *options_.padding) : image;
  TORCH_CHECK_VALUE(from.dim() == 3, "RandomCrop takes an image of shape (C, H, W), not ", from.sizes());
  if (options_.pad_if_needed && from.size(2) < size_.width) from = pad(from, {size_.width - from.size(2), 0});
  if (options_.pad_if_needed && from.size(1) < size_.height) {
    from = pad(from, {0, size_.height - from.size(1)});
  }
  const int64_t height = from.size(1);
  const int64_t width = from.size(2);
  TORCH_CHECK_VALUE(height >= size_.height && width >= size_.width, "Required crop size (", size_.height,
                    ", ", size_.width, ") is larger than input image size (", height, ", ", width,
                    "); pad_if_needed pads such images");
  if (height == size_.height && width == size_.width) return from;
  const int64_t top = draw_integer(height - size_.height + 1, generator);
  const int64_t left = draw_integer(width - size_.width + 1, generator);
  return crop(from, top, left, size_.height, size_.width);
}

RandomResizedCrop::RandomResizedCrop(Size size, const RandomResizedCropOptions& options)
    : options_(options),
      log_ratio_(log_of(options.ratio)),
      resize_(size, {.interpolation = options.interpolation, .antialias = options.antialias}) {
  check_bounds(options.scale, "scale");
  check_bounds(options.ratio, "ratio");
}

RandomResizedCrop::Box RandomResizedCrop::get_params(Size image, const OptionalGenerator& generator) const {
  constexpr int kAttempts = 10;
  const auto area = static_cast<double>(image.height * image.width);
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const double target_area =
        area * draw_uniform(options_.scale[0], options_.scale[1], generator).item<float>();
    const double aspect_ratio = draw_uniform(log_ratio_[0], log_ratio_[1], generator).exp_().item<float>();
    const int64_t width = rounded(std::sqrt(target_area * aspect_ratio));
    const int64_t height = rounded(std::sqrt(target_area / aspect_ratio));
    if (0 < width && width <= image.width && 0 < height && height <= image.height) {
      const int64_t top = draw_integer(image.height - height + 1, generator);
      const int64_t left = draw_integer(image.width - width + 1, generator);
      return {top, left, height, width};
    }
  }
  // As much of the middle as the bounds of the ratio allow.
  const double ratio = static_cast<double>(image.width) / static_cast<double>(image.height);
  int64_t height = image.height;
  int64_t width = image.width;
  if (ratio < options_.ratio[0]) {
    height = rounded(static_cast<double>(width) / options_.ratio[0]);
  } else if (ratio > options_.ratio[1]) {
    width = rounded(static_cast<double>(height) * options_.ratio[1]);
  }
  return {(image.height - height) / 2, (image.width - width) / 2, height, width};
}

at::Tensor RandomResizedCrop::operator()(const at::Tensor& image, const OptionalGenerator& generator) const {
  TORCH_CHECK_VALUE(image.dim() == 3 && image.size(1) > 0 && image.size(2) > 0,
                    "RandomResizedCrop takes an image of shape (C, H, W) with pixels, not ", image.sizes());
  const Box box = get_params({image.size(1), image.size(2)}, generator);
  return resize_(crop(image, box.top, box.left, box.height, box.width));
}

RandomHorizontalFlip::RandomHorizontalFlip(double p) : p_(p) {
  check_probability(p, "RandomHorizontalFlip");
}

at::Tensor RandomHorizontalFlip::operator()(const at::Tensor& image,
                                            const OptionalGenerator& generator) const {
  return draw_chance(p_, generator) ? image.flip({-1}) : image;
}

RandomVerticalFlip::RandomVerticalFlip(double p) : p_(p) {
  check_probability(p, "RandomVerticalFlip");
}

at::Tensor RandomVerticalFlip::operator()(const at::Tensor& image, const OptionalGenerator& generator) const {
  return draw_chance(p_, generator) ? image.flip({-2}) : image;
}

}  // namespace lockstep::image
