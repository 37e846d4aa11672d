#include <algorithm>
#include <cctype>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <lockstep/observe/internal/image_layout.h>

namespace lockstep::observe::internal {
namespace {

constexpr int64_t kColumns = 8;

/// The dimensions of `tensor`, which are those of `from`, in the order of `to`.
at::Tensor reorder(const at::Tensor& tensor, const std::string& from, const std::string& to) {
  std::vector<int64_t> order;
  for (const char letter : to) {
    const size_t at = from.find(letter);
    TORCH_CHECK_VALUE(at != std::string::npos, "dataformats '", from, "' has no ", letter,
                      "; it takes an order of ", to);
    order.push_back(static_cast<int64_t>(at));
  }
  return tensor.permute(order);
}

/// N images of shape (channels, H, W) in rows, as one of shape (3, rows, columns).
at::Tensor make_grid(at::Tensor images) {
  if (images.size(1) == 1) images = images.expand({-1, 3, -1, -1});
  TORCH_CHECK_VALUE(images.size(1) == 3, "images of shape ", images.sizes(), " (N, C, H, W) have ",
                    images.size(1), " channels; a grid takes 1 or 3");
  const int64_t count = images.size(0);
  const int64_t height = images.size(2);
  const int64_t width = images.size(3);
  const int64_t columns = std::max<int64_t>(1, std::min(count, kColumns));
  const int64_t rows = (count + columns - 1) / columns;
  at::Tensor canvas = at::zeros({3, height * rows, width * columns}, images.options());
  for (int64_t i = 0; i < count; ++i) {
    canvas.narrow(1, i / columns * height, height).narrow(2, i % columns * width, width).copy_(images[i]);
  }
  return canvas;
}

at::Tensor to_hwc(const at::Tensor& tensor, const std::string& format) {
  if (format.size() == 4) return make_grid(reorder(tensor, format, "NCHW")).permute({1, 2, 0});
  if (format.size() == 3) {
    at::Tensor image = reorder(tensor, format, "HWC");
    return image.size(2) == 1 ? image.expand({-1, -1, 3}) : image;
  }
  TORCH_CHECK_VALUE(format.size() == 2, "dataformats '", format, "' names ", format.size(),
                    " dimensions; an image has 2 to 4");
  const at::Tensor image = reorder(tensor, format, "HW");
  return at::stack({image, image, image}, 2);
}

}  // namespace

at::Tensor to_image(const at::Tensor& tensor, const std::string& dataformats) {
  std::string format = dataformats;
  std::transform(format.begin(), format.end(), format.begin(),
                 [](unsigned char c) { return std::toupper(c); });
  std::string sorted = format;
  std::sort(sorted.begin(), sorted.end());
  TORCH_CHECK_VALUE(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(),
                    "You can not use the same dimension shorthand twice. input_format: ", dataformats);
  TORCH_CHECK_VALUE(tensor.dim() == static_cast<int64_t>(format.size()),
                    "size of input tensor and input format are different. tensor shape: ", tensor.sizes(),
                    ", input_format: ", dataformats);
  at::Tensor image = to_hwc(tensor.detach().cpu(), format);
  TORCH_CHECK_VALUE(image.size(2) >= 2 && image.size(2) <= 4, "an image of shape ", tensor.sizes(), " (",
                    format, ") has ", image.size(2),
                    " channels; it takes 1 (gray), 2 (gray, alpha), 3 (RGB) or 4 (RGBA)");
  if (image.scalar_type() == at::kByte) return image.contiguous();
  image = at::nan_to_num(image.to(at::kFloat).mul(255), 0.0).clamp(0, 255);
  return image.to(at::kByte).contiguous();
}

}  // namespace lockstep::observe::internal
