#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <torch/data/samplers/base.h>

#include <lockstep/data/samplers/sampler.h>

namespace lockstep::data {

/// A sampler of ours in the place of one of LibTorch's, for torch::data::make_data_loader:
///
///     DistributedSampler sampler(dataset.size().value());
///     auto loader = torch::data::make_data_loader(std::move(dataset), TorchSampler(sampler),
///     /*batch_size=*/64); for (int epoch = 0; epoch < 5; ++epoch) {
///       sampler.set_epoch(epoch);
///       for (auto& batch : *loader) { … }       // this rank's share, in the order of sampler.indices()
///     }
///
/// Each begin() of the loader (a `for` loop) is an epoch. Copies share the sampler below them, each at its
/// own place. Not thread-safe; a loader asks only from the thread that iterates.
// (`Sampler` alone would be the base class's name inside of it.)
class TorchSampler final : public torch::data::samplers::Sampler<> {
 public:
  /// Over a sampler that outlives this object, the loader that it is moved into, and their copies.
  explicit TorchSampler(lockstep::data::Sampler& sampler) : sampler_(std::shared_ptr<void>(), &sampler) {}
  /// Over a sampler that is kept alive. Throws c10::ValueError for null.
  explicit TorchSampler(std::shared_ptr<lockstep::data::Sampler> sampler);

  /// A new epoch: asks the sampler for its indices. After load(), the first time, the loaded epoch goes on
  /// instead, so a loader that is made with a loaded sampler begins where the saved one was. Throws
  /// c10::ValueError for a new size, since a lockstep sampler has the size that it was made with.
  void reset(std::optional<size_t> new_size = std::nullopt) override;
  /// The next at most `batch_size` indices; nothing at the end of the epoch. Throws c10::ValueError for 0.
  std::optional<std::vector<size_t>> next(size_t batch_size) override;

  /// The epoch's indices and the place in it, as torch::data::samplers::RandomSampler saves them. With
  /// workers, a loader has asked for some batches more than it has handed out.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

  /// How many indices of the epoch were handed out.
  size_t index() const noexcept { return index_; }

 private:
  std::shared_ptr<lockstep::data::Sampler> sampler_;
  std::optional<std::vector<int64_t>> indices_;  // nothing before the first epoch
  size_t index_ = 0;
  bool loaded_ = false;  // load() was the last call
};

}  // namespace lockstep::data
