#pragma once

#include <cstdint>
#include <span>
#include <string>

#include <ATen/core/Tensor.h>

#include <lockstep/data/example.h>

namespace lockstep::data {

/// Fashion-MNIST (Xiao, Rasul, Vollgraf 2017; arXiv:1708.07747): grey images of 28×28 pixels in ten classes,
/// 60,000 to train on and 10,000 to test with. MNIST's files have the same form and are read as well.
///
/// A data set for DataLoader. Images stay in memory as bytes (47 MB), and get() and get_batch() convert them
/// as torchvision's ToTensor does: float32 in [0, 1], the byte divided by 255.
///
/// Immutable after construction: any number of threads may read it. Copies share the memory.
class FashionMnist {
 public:
  static constexpr int64_t kRows = 28;
  static constexpr int64_t kColumns = 28;
  static constexpr int64_t kClasses = 10;

  /// Reads {train|t10k}-images-idx3-ubyte and {train|t10k}-labels-idx1-ubyte, plain or with .gz, from
  /// `directory`, its subfolder fashion-mnist, or FashionMNIST/raw (where torchvision puts them): the first
  /// that holds both.
  ///
  /// Throws c10::Error that names what was looked for and which package provides it when files are missing,
  /// and one that names the file when its content is wrong (see read_idx): not N×28×28 bytes and N bytes,
  /// different N, no image, a label > 9.
  explicit FashionMnist(const std::string& directory, bool train = true);

  int64_t size() const { return images_.size(0); }
  /// Image 1×28×28 float32 and label, a scalar int64. Throws c10::IndexError when the index lies outside [0,
  /// size()).
  Example get(int64_t index) const;
  /// Images B×1×28×28 float32 and labels B int64, gathered and converted in one pass. Throws as get() does.
  Example get_batch(std::span<const int64_t> indices) const;

  /// All images as stored, N×28×28 uint8, and all labels, N uint8. Not to be written to.
  const at::Tensor& images() const { return images_; }
  const at::Tensor& labels() const { return labels_; }

 private:
  at::Tensor images_;
  at::Tensor labels_;
};

}  // namespace lockstep::data
