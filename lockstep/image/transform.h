#pragma once

#include <concepts>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace lockstep::image {

/// Where random transforms draw from. None: torch's default CPU generator, as in Python.
using OptionalGenerator = std::optional<at::Generator>;

/// Something that makes an image of an image, C×H×W: any of this room's transforms, or your own callable that
/// takes (const at::Tensor& image), or (const at::Tensor& image, const OptionalGenerator& generator) if it
/// draws random numbers.
///
/// Thread-safe when the callable is; those of this room are, for different generators. Copies share nothing
/// that changes.
class Transform {
 public:
  /// Does nothing.
  Transform() = default;

  template <class Callable>
  requires(!std::same_as<std::decay_t<Callable>, Transform> &&
           (std::is_invocable_r_v<at::Tensor, const Callable&, const at::Tensor&> ||
            std::is_invocable_r_v<at::Tensor, const Callable&, const at::Tensor&,
                                  const OptionalGenerator&>))
      Transform(Callable callable) {  // implicit, so that lists of transforms read as in Python
    if constexpr (std::is_invocable_v<const Callable&, const at::Tensor&, const OptionalGenerator&>) {
      function_ = std::move(callable);
    } else {
      function_ = [callable = std::move(callable)](const at::Tensor& image,
                                                   const OptionalGenerator& /*generator*/) {
        return callable(image);
      };
    }
  }

  at::Tensor operator()(const at::Tensor& image, const OptionalGenerator& generator = std::nullopt) const {
    return function_ ? function_(image, generator) : image;
  }

 private:
  std::function<at::Tensor(const at::Tensor&, const OptionalGenerator&)> function_;
};

/// One transform after the other; torchvision.transforms.Compose.
///
///     Compose({RandomResizedCrop(224), RandomHorizontalFlip(), ToTensor(), Normalize(mean, std)})
class Compose {
 public:
  explicit Compose(std::vector<Transform> transforms) : transforms_(std::move(transforms)) {}

  at::Tensor operator()(at::Tensor image, const OptionalGenerator& generator = std::nullopt) const {
    for (const Transform& transform : transforms_) image = transform(image, generator);
    return image;
  }

 private:
  std::vector<Transform> transforms_;
};

}  // namespace lockstep::image
