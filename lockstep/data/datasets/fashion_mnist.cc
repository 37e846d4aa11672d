#include <algorithm>
#include <array>
#include <filesystem>
#include <optional>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <lockstep/data/datasets/fashion_mnist.h>
#include <lockstep/data/datasets/idx.h>

namespace lockstep::data {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kPixels = FashionMnist::kRows * FashionMnist::kColumns;

struct Files {
  std::string images;
  std::string labels;
};

std::optional<std::string> plain_or_gzip(const fs::path& folder, const std::string& name) {
  for (const std::string& candidate : {name, name + ".gz"}) {
    std::error_code ignored;  // a folder that may not be entered holds nothing for us
    if (fs::exists(folder / candidate, ignored)) return (folder / candidate).string();
  }
  return std::nullopt;
}

Files find_files(const std::string& directory, bool train) {
  const std::string part = train ? "train" : "t10k";
  const std::string images = part + "-images-idx3-ubyte";
  const std::string labels = part + "-labels-idx1-ubyte";
  for (const char* subfolder : {"", "fashion-mnist", "FashionMNIST/raw"}) {
    const fs::path folder = fs::path(directory) / subfolder;
    auto images_file = plain_or_gzip(folder, images);
    auto labels_file = plain_or_gzip(folder, labels);
    if (images_file && labels_file) return {*images_file, *labels_file};
  }
  TORCH_CHECK(false, "no Fashion-MNIST in directory '", directory,
              "': looked there, in its fashion-mnist and in its ", "FashionMNIST/raw for both ", images,
              "[.gz] and ", labels,
              "[.gz]. scripts/quickstart fetches them, or install Debian's dataset-fashion-mnist, which puts "
              "them into "
              "/usr/share/datasets/fashion-mnist");
}

/// `count` pixels to [0, 1]; the compiler vectorises it. A division, not a product: ToTensor's very bits.
void convert_pixels(const uint8_t* __restrict pixels, float* __restrict out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(pixels[i]) / 255.0F;
}

void check_index(int64_t index, int64_t size) {
  TORCH_CHECK_INDEX(index >= 0 && index < size, "index ", index, " is out of range for FashionMnist with ",
                    size, " images");
}

}  // namespace

FashionMnist::FashionMnist(const std::string& directory, bool train) {
  const Files files = find_files(directory, train);
  images_ = read_idx(files.images);
  TORCH_CHECK(images_.scalar_type() == at::kByte && images_.dim() == 3 && images_.size(1) == kRows &&
                  images_.size(2) == kColumns,
              files.images, " holds ", images_.scalar_type(), " ", images_.sizes(),
              "; images are Byte [N, 28, 28]");
  TORCH_CHECK(size() > 0, files.images, " holds no image");
  labels_ = read_idx(files.labels);
  TORCH_CHECK(labels_.scalar_type() == at::kByte && labels_.dim() == 1, files.labels, " holds ",
              labels_.scalar_type(), " ", labels_.sizes(), "; labels are Byte [N]");
  TORCH_CHECK(labels_.size(0) == size(), files.images, " holds ", size(), " images, but ", files.labels,
              " holds ", labels_.size(0), " labels; fetch both again");
  const uint8_t* first = labels_.const_data_ptr<uint8_t>();
  const uint8_t* wrong = std::find_if(first, first + size(), [](uint8_t label) { return label >= kClasses; });
  TORCH_CHECK(wrong == first + size(), files.labels, ": label ", static_cast<int>(*wrong), " at position ",
              wrong - first, "; labels are 0 to 9");
}

Example FashionMnist::get(int64_t index) const {
  const std::array<int64_t, 1> indices = {index};
  const Example batch = get_batch(indices);
  return {batch.data.squeeze(0), batch.target.squeeze(0)};
}

Example FashionMnist::get_batch(std::span<const int64_t> indices) const {
  const auto count = static_cast<int64_t>(indices.size());
  Example batch{at::empty({count, 1, kRows, kColumns}, at::TensorOptions().dtype(at::kFloat)),
                at::empty({count}, at::TensorOptions().dtype(at::kLong))};
  const uint8_t* pixels = images_.const_data_ptr<uint8_t>();
  const uint8_t* labels = labels_.const_data_ptr<uint8_t>();
  auto* data = batch.data.mutable_data_ptr<float>();
  auto* target = batch.target.mutable_data_ptr<int64_t>();
  for (const int64_t index : indices) {
    check_index(index, size());
    convert_pixels(pixels + index * kPixels, data, kPixels);
    data += kPixels;
    *target++ = labels[index];
  }
  return batch;
}

}  // namespace lockstep::data
