#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/data/data_loader.h>
#include <lockstep/image/image_folder.h>
#include <lockstep/image/random_transforms.h>

/// What bench_data measures of image folders; benchmarks/peers/jpeg_folder.py makes the folder, and does the
/// same with torchvision.
namespace lockstep::benchmarks {

/// The folder that jpeg_folder.make_folder() made.
inline constexpr const char* kJpegFolder = "LOCKSTEP_BENCH_JPEG_FOLDER";

/// The usual way of training on photographs: a random part of each at 224×224, mirrored or not, normalised.
inline image::ImageFolder jpeg_folder() {
  const auto root = environment::text(kJpegFolder);
  TORCH_CHECK(root, kJpegFolder, " should name the folder that benchmarks/peers/jpeg_folder.py makes");
  return image::ImageFolder(
      *root, {.transform = image::Compose({image::RandomResizedCrop(224), image::RandomHorizontalFlip(),
                                           image::ToTensor(),
                                           image::Normalize({0.485, 0.456, 0.406}, {0.229, 0.224, 0.225})})});
}

/// A function that loads one epoch, and answers with the sum of its labels (that of image i is i).
inline std::function<int64_t()> jpeg_epochs(const data::DataLoaderOptions& options) {
  auto loader = std::make_shared<data::DataLoader<image::ImageFolder>>(jpeg_folder(), options);
  return [loader] {
    int64_t sum = 0;
    for (const auto& batch : *loader) {
      const auto* labels = batch.target.const_data_ptr<int64_t>();
      for (int64_t i = 0; i < batch.target.size(0); ++i) sum += labels[i];
      TORCH_CHECK(batch.data.const_data_ptr<float>()[0] < 3, "no such number comes out of Normalize");
    }
    return sum;
  };
}

}  // namespace lockstep::benchmarks
