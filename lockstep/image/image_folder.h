#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/data/example.h>
#include <lockstep/image/transform.h>

namespace lockstep::image {

/// What torchvision's ImageFolder takes for an image, so that both find the same samples. Only JPEG and PNG
/// can be read here; the others are errors when they are asked for, not silently left out.
std::vector<std::string> image_extensions();

/// 3×H×W uint8, as torchvision's pil_loader: gray, palette and CMYK become RGB, alpha is dropped, of 16 bits
/// the high 8 stay, and EXIF's orientation is passed over. Throws as read_image(). Thread-safe.
at::Tensor default_loader(const std::string& path);

struct ImageFolderOptions {
  /// Changes the image; none: it stays as the loader returns it.
  Transform transform = {};
  /// Changes the class index; none: it stays.
  std::function<int64_t(int64_t)> target_transform = nullptr;
  /// Reads an image; called by several threads at once. For example one that calls read_image() with
  /// minimum_size, or with apply_exif_orientation.
  std::function<at::Tensor(const std::string&)> loader = default_loader;
  /// Endings of the files that are samples, in lower case; their names' case doesn't matter. Not together
  /// with is_valid_file.
  std::vector<std::string> extensions = {};
  /// Says of a path whether it is a sample; then extensions are not asked. Without both, image_extensions().
  std::function<bool(const std::string&)> is_valid_file = nullptr;
  /// A class may be without samples.
  bool allow_empty = false;
  /// The seed of the random transforms.
  uint64_t seed = 0;
};

/// Images in folders, a folder for each class; torchvision/datasets/folder.py:
///
///     root/cat/1.jpg  root/cat/deeper/2.png  root/dog/3.jpg
///
///     ImageFolder train("root", {.transform = Compose({RandomResizedCrop(224), ToTensor()})});
///
/// A data set for DataLoader. The classes are sorted by name, and a class's samples by folder and name, in
/// the order of their bytes (for UTF-8, Python's order); links are followed.
///
/// Random transforms draw from a generator of their own for each sample, seeded by (seed, epoch, index): what
/// a sample becomes depends neither on the number of workers nor on the order. Call set_epoch() before each
/// epoch, or every epoch has the same crops.
///
/// Thread-safe but for construction and assignment, when the loader and the transforms are. Copies share the
/// epoch.
class ImageFolder {
 public:
  using Sample = std::pair<std::string, int64_t>;  // path and class index

  /// Looks through the folders; reads no image.
  /// Throws c10::ValueError when extensions and is_valid_file are both given, and c10::Error naming the
  /// folder when it can't be read, has no class folder, or (unless allow_empty) a class has no sample.
  explicit ImageFolder(const std::string& root, ImageFolderOptions options = {});

  int64_t size() const { return static_cast<int64_t>(samples_.size()); }
  /// The transformed image and its class, a scalar int64. Throws c10::IndexError when the index lies outside
  /// [0, size()), and c10::Error that names the file when it can't be read or transformed.
  data::Example get(int64_t index) const;

  void set_epoch(int64_t epoch) { epoch_->store(epoch, std::memory_order_relaxed); }

  const std::vector<std::string>& classes() const { return classes_; }
  const std::map<std::string, int64_t>& class_to_idx() const { return class_to_idx_; }
  const std::vector<Sample>& samples() const { return samples_; }
  /// The class index of each sample.
  std::vector<int64_t> targets() const;

 private:
  ImageFolderOptions options_;
  std::vector<std::string> classes_;
  std::map<std::string, int64_t> class_to_idx_;
  std::vector<Sample> samples_;
  std::shared_ptr<std::atomic<int64_t>> epoch_ = std::make_shared<std::atomic<int64_t>>(0);
};

}  // namespace lockstep::image
