#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <lockstep/data/internal/random.h>
#include <lockstep/serialization/state_dict.h>

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

  /// Which epoch the next indices() is for. Samplers whose order depends on it override this.
  virtual void set_epoch(int64_t /*epoch*/) {}
  /// The next indices(), and it alone, leaves out the first `position` samples of the order over all ranks,
  /// and assigns the rest: to go on with an epoch that another number of ranks began. False, and nothing
  /// changes, for a sampler that can't.
  virtual bool start_at(int64_t /*position*/) { return false; }

  /// What another sampler, made in the same way, needs to give once more the order of the latest indices()
  /// (before the first: of the next), and then those that follow it. Nothing, unless a sampler says
  /// otherwise: right for one whose order depends on nothing but how it was made.
  virtual StateDict state_dict() const { return {}; }
  /// Takes what state_dict() of the same class returned. Throws c10::ValueError for anything else.
  virtual void load_state_dict(const StateDict& /*state*/) {}
};

/// The batches of one epoch, as indices: DataLoader's batch_sampler. Otherwise like Sampler.
class SamplerOfBatches {
 public:
  virtual ~SamplerOfBatches() = default;
  /// How many batches batches() returns.
  virtual int64_t size() const = 0;
  /// The batches of the next epoch, in order; none of them empty.
  virtual std::vector<std::vector<int64_t>> batches() = 0;
  virtual void set_epoch(int64_t /*epoch*/) {}
  virtual bool start_at(int64_t /*position*/) { return false; }
  virtual StateDict state_dict() const { return {}; }
  virtual void load_state_dict(const StateDict& /*state*/) {}
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

// The samplers below draw from a CPU generator that is shared with its other holders. Without one they draw
// from torch's default CPU generator, as Python's do, so torch::manual_seed() decides the order. Their state
// is the generator's before the latest order: 5 KB. Loading sets a generator that was given; the default one
// is left alone, and the order that was saved comes once from a copy.

struct RandomSamplerOptions {
  /// Draw each index from all, so that an epoch may have one several times and another not at all.
  bool replacement = false;
  /// Indices per epoch, the data set's size unless told. Without replacement: so many permutations after one
  /// another, the last one cut off.
  std::optional<int64_t> num_samples = std::nullopt;
  std::optional<at::Generator> generator = std::nullopt;
};

/// A new random order in each epoch: the indices of Python's RandomSampler (torch/utils/data/sampler.py) from
/// the same generator state.
///
/// Ranks that must not see the same samples use DistributedSampler instead.
class RandomSampler final : public Sampler {
 public:
  /// Throws c10::ValueError when `size` is negative, when num_samples is not positive, and for samples wanted
  /// from an empty data set. An empty data set alone gives no indices (Python refuses it).
  RandomSampler(int64_t size, RandomSamplerOptions options);
  explicit RandomSampler(int64_t size, std::optional<at::Generator> generator = std::nullopt);
  int64_t size() const override { return num_samples_; }
  std::vector<int64_t> indices() override;
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

 private:
  int64_t size_;
  bool replacement_;
  int64_t num_samples_;
  internal::RandomSource source_;
  bool own_seed_;  // no generator was given: each epoch draws the seed of one of its own, as in Python
};

/// A new permutation of given indices in each epoch. SubsetRandomSampler of torch/utils/data/sampler.py.
class SubsetRandomSampler final : public Sampler {
 public:
  explicit SubsetRandomSampler(std::vector<int64_t> indices,
                               std::optional<at::Generator> generator = std::nullopt);
  int64_t size() const override { return static_cast<int64_t>(subset_.size()); }
  std::vector<int64_t> indices() override;
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

 private:
  std::vector<int64_t> subset_;
  internal::RandomSource source_;
};

/// Index i with a probability in proportion to weights[i], num_samples times. WeightedRandomSampler of
/// torch/utils/data/sampler.py.
class WeightedRandomSampler final : public Sampler {
 public:
  /// `weights`: one dimension, any type that converts to double. Without replacement no index comes twice in
  /// an epoch. Throws c10::ValueError when num_samples is not positive or weights has another number of
  /// dimensions; indices() throws what at::multinomial throws: for negative weights, for a sum of 0, and for
  /// more samples than weights that are not 0 without replacement.
  WeightedRandomSampler(const at::Tensor& weights, int64_t num_samples, bool replacement = true,
                        std::optional<at::Generator> generator = std::nullopt);
  WeightedRandomSampler(const std::vector<double>& weights, int64_t num_samples, bool replacement = true,
                        std::optional<at::Generator> generator = std::nullopt);
  int64_t size() const override { return num_samples_; }
  std::vector<int64_t> indices() override;
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

 private:
  at::Tensor weights_;
  int64_t num_samples_;
  bool replacement_;
  internal::RandomSource source_;
};

/// A sampler's order in batches. BatchSampler of torch/utils/data/sampler.py. DataLoader makes these batches
/// itself from sampler, batch_size and drop_last; this one is for batch samplers that are built of others.
class BatchSampler final : public SamplerOfBatches {
 public:
  /// `sampler` must outlive this object. Throws c10::ValueError when batch_size is not positive.
  BatchSampler(Sampler& sampler, int64_t batch_size, bool drop_last);
  int64_t size() const override;
  std::vector<std::vector<int64_t>> batches() override;
  void set_epoch(int64_t epoch) override { sampler_.set_epoch(epoch); }
  bool start_at(int64_t position) override { return sampler_.start_at(position); }
  StateDict state_dict() const override { return sampler_.state_dict(); }
  void load_state_dict(const StateDict& state) override { sampler_.load_state_dict(state); }

 private:
  Sampler& sampler_;
  int64_t batch_size_;
  bool drop_last_;
};

}  // namespace lockstep::data
