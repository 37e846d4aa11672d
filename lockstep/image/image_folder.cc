#include <algorithm>
#include <filesystem>
#include <sys/stat.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <lockstep/base/mix_bits.h>
#include <lockstep/base/rethrow_with_context.h>
#include <lockstep/base/text/lower_case.h>
#include <lockstep/image/image_folder.h>
#include <lockstep/image/read_image.h>

namespace lockstep::image {
namespace {

namespace fs = std::filesystem;

struct Listing {
  std::vector<std::string> folders;  // names
  std::vector<std::string> files;
};

/// What a folder holds, sorted. Links count as what they lead to.
Listing list(const std::string& folder) {
  std::error_code error;
  Listing listing;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    std::error_code ignored;  // a link to nothing is a file, as for Python's os.walk
    auto& names = entry->is_directory(ignored) ? listing.folders : listing.files;
    names.push_back(entry->path().filename().string());
  }
  TORCH_CHECK(!error, "cannot read the folder ", folder, ": ", error.message());
  std::sort(listing.folders.begin(), listing.folders.end());
  std::sort(listing.files.begin(), listing.files.end());
  return listing;
}

std::string join(const std::string& folder, const std::string& name) {
  return folder.ends_with('/') ? folder + name : folder + "/" + name;
}

/// All folders at and below `folder`, with their files, sorted by path: Python's sorted(os.walk(folder,
/// followlinks=True)).
class Walk {
 public:
  explicit Walk(const std::string& folder) {
    visit(folder);
    std::sort(found_.begin(), found_.end());
  }
  const std::vector<std::pair<std::string, std::vector<std::string>>>& found() const { return found_; }

 private:
  void visit(const std::string& folder) {
    struct stat status {};
    TORCH_CHECK(::stat(folder.c_str(), &status) == 0, "cannot read the folder ", folder);
    const std::pair<uint64_t, uint64_t> identity(status.st_dev, status.st_ino);
    TORCH_CHECK(std::find(above_.begin(), above_.end(), identity) == above_.end(), "the folder ", folder,
                " is a link to a folder that it lies in, so the walk would never end; remove the link");
    above_.push_back(identity);
    Listing listing = list(folder);
    for (const std::string& name : listing.folders) visit(join(folder, name));
    found_.emplace_back(folder, std::move(listing.files));
    above_.pop_back();
  }

  std::vector<std::pair<std::string, std::vector<std::string>>> found_;
  std::vector<std::pair<uint64_t, uint64_t>> above_;  // the folders on the way down: device and inode
};

bool has_extension(const std::string& file, const std::vector<std::string>& extensions) {
  const std::string name = lower_case(file);
  return std::any_of(extensions.begin(), extensions.end(),
                     [&](const std::string& extension) { return name.ends_with(extension); });
}

at::Generator sample_generator(uint64_t seed, int64_t epoch, int64_t index) {
  uint64_t mixed = mix_bits(seed);
  mixed = mix_bits(mixed + static_cast<uint64_t>(epoch));
  mixed = mix_bits(mixed + static_cast<uint64_t>(index));
  return at::make_generator<at::CPUGeneratorImpl>(mixed);
}

}  // namespace

std::vector<std::string> image_extensions() {
  return {".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"};
}

at::Tensor default_loader(const std::string& path) {
  return read_image(path, {.mode = ImageReadMode::kRgb, .eight_bit = true});
}

ImageFolder::ImageFolder(const std::string& root, ImageFolderOptions options) : options_(std::move(options)) {
  TORCH_CHECK_VALUE(options_.extensions.empty() || !options_.is_valid_file,
                    "ImageFolder: extensions and is_valid_file cannot both be given; leave one out");
  TORCH_CHECK_VALUE(options_.loader != nullptr,
                    "ImageFolder: the loader is empty; leave it out to have default_loader");
  const bool by_extension = !options_.is_valid_file;
  if (by_extension && options_.extensions.empty()) options_.extensions = image_extensions();

  classes_ = list(root).folders;
  TORCH_CHECK(!classes_.empty(), "Couldn't find any class folder in ", root,
              ": its folders are the classes, and hold the images");
  std::vector<std::string> empty;
  for (const std::string& name : classes_) {
    const auto target = static_cast<int64_t>(class_to_idx_.size());
    class_to_idx_[name] = target;
    const size_t before = samples_.size();
    const Walk walk(join(root, name));
    for (const auto& [folder, files] : walk.found()) {
      for (const std::string& file : files) {
        std::string path = join(folder, file);
        const bool valid =
            by_extension ? has_extension(file, options_.extensions) : options_.is_valid_file(path);
        if (valid) samples_.emplace_back(std::move(path), target);
      }
    }
    if (samples_.size() == before) empty.push_back(name);
  }
  TORCH_CHECK(empty.empty() || options_.allow_empty, "Found no valid file for the classes ",
              c10::Join(", ", empty), " in ", root, ". ",
              by_extension ? "Supported extensions are: " + c10::Join(", ", options_.extensions)
                           : std::string("is_valid_file refused all"),
              "; allow_empty permits such classes");
}

data::Example ImageFolder::get(int64_t index) const {
  TORCH_CHECK_INDEX(index >= 0 && index < size(), "index ", index,
                    " is out of range for an ImageFolder with ", size(), " samples");
  const auto& [path, class_index] = samples_[static_cast<size_t>(index)];
  at::Tensor image = options_.loader(path);
  try {
    image = options_.transform(
        image, sample_generator(options_.seed, epoch_->load(std::memory_order_relaxed), index));
  } catch (...) {
    rethrow_with_context("while transforming " + path);
  }
  const int64_t target = options_.target_transform ? options_.target_transform(class_index) : class_index;
  return {std::move(image), at::scalar_tensor(target, at::TensorOptions().dtype(at::kLong))};
}

std::vector<int64_t> ImageFolder::targets() const {
  std::vector<int64_t> targets;
  targets.reserve(samples_.size());
  for (const Sample& sample : samples_) targets.push_back(sample.second);
  return targets;
}

}  // namespace lockstep::image
