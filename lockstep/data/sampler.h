#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Generator.h>

namespace lockstep::data {

/// The order in which one epoch visits a data set. What DataLoader asks for at the start of each epoch.
///
/// Not thread-safe; a DataLoader calls it only from the thread that calls begin().
class Sampler {
 public:
  virtual ~Sampler() = default;
  /// How many indices indices() returns.
  virtual int64_t size() const = 0;
  /// The indices of the next epoch, in order.
  virtual std::vector<int64_t> indices() = 0;
};

/// 0, 1, …, size - 1 in every epoch. torch/utils/data/sampler.py.
class SequentialSampler final : public Sampler {
 public:
  /// Throws c10::ValueError when `size` is negative.
  explicit SequentialSampler(int64_t size);
  int64_t size() const override { return size_; }
  std::vector<int64_t> indices() override;

 private:
  int64_t size_;
};

/// A new permutation of 0 … size - 1 in each epoch, the same as Python's RandomSampler without replacement
/// (torch/utils/data/sampler.py) from the same generator state.
///
/// Without a generator each epoch takes its seed from torch's default CPU generator, so torch::manual_seed()
/// decides the order. Ranks that must not see the same samples use DistributedSampler instead.
class RandomSampler final : public Sampler {
 public:
  /// `generator`: a CPU generator, shared with the caller. Throws c10::ValueError when `size` is negative.
  explicit RandomSampler(int64_t size, std::optional<at::Generator> generator = std::nullopt);
  int64_t size() const override { return size_; }
  std::vector<int64_t> indices() override;

 private:
  int64_t size_;
  std::optional<at::Generator> generator_;
};

}  // namespace lockstep::data
