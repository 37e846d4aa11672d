#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <lockstep/data/samplers/sampler.h>

namespace lockstep::data {

struct DistributedSamplerOptions {
  /// Number of ranks that share the data set; the default group's world size unless told.
  std::optional<int64_t> num_replicas = std::nullopt;
  /// This process among them; the default group's rank unless told.
  std::optional<int64_t> rank = std::nullopt;
  /// A new permutation per epoch (see set_epoch), or the data set's own order.
  bool shuffle = true;
  /// Must be the same on all ranks.
  int64_t seed = 0;
  /// When the ranks don't divide the data set: leave out the last samples (true), or repeat the first
  /// (false).
  bool drop_last = false;
};

/// One rank's share of a data set: every num_replicas-th index, from `rank`, of a permutation that all ranks
/// compute alike. All ranks get equally many. Gives exactly the indices of
/// torch.utils.data.DistributedSampler (torch/utils/data/distributed.py) for the same arguments.
///
///     DistributedSampler sampler(train.size());
///     for (int epoch = 0; epoch < 5; ++epoch) {
///       sampler.set_epoch(epoch);      // without it every epoch has the same order
///       for (auto& batch : loader) { … }
///     }
///
/// Padding shows some samples twice and drop_last hides some, so neither suits an exact validation: see
/// DistributedEvalSampler. Not thread-safe. Independent of the process group once made.
class DistributedSampler final : public Sampler {
 public:
  /// `size`: the data set's; 0 gives no indices. Throws c10::ValueError when it is negative, when the rank
  /// lies outside [0, num_replicas - 1], and when rank or num_replicas are not told and there is no default
  /// process group.
  explicit DistributedSampler(int64_t size, DistributedSamplerOptions options = {});
  /// The same in Python's order of arguments.
  DistributedSampler(int64_t size, int64_t num_replicas, int64_t rank, bool shuffle = true, int64_t seed = 0,
                     bool drop_last = false);

  /// Chooses the permutation of the following indices() calls: its generator is seeded with seed + epoch,
  /// modulo 2^64.
  void set_epoch(int64_t epoch) override {
    if (epoch != epoch_) latest_start_.reset();
    epoch_ = epoch;
  }
  /// Always true. The samples at `position` and after it in the epoch's permutation are assigned as those
  /// of a whole epoch are: rank 0 gets the first. When N ranks have seen b samples each, that is at N·b.
  /// Throws c10::ValueError when it is negative; at the data set's end and beyond it nothing is left.
  bool start_at(int64_t position) override;

  /// Python's num_samples: how many indices this rank gets per epoch. After start_at(), of what is left.
  int64_t size() const override { return samples_from(start_); }
  std::vector<int64_t> indices() override;

  /// {"epoch"}, and {"start"} where the latest order did not begin at 0; the rest is said when a sampler is
  /// made.
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& state) override;

  /// num_replicas × size(): with padding, without dropped samples.
  int64_t total_size() const { return num_samples_ * num_replicas_; }
  int64_t num_replicas() const { return num_replicas_; }
  int64_t rank() const { return rank_; }
  int64_t epoch() const { return epoch_; }

 private:
  int64_t samples_from(int64_t start) const;

  int64_t dataset_size_;
  int64_t num_replicas_ = 0;
  int64_t rank_ = 0;
  int64_t num_samples_ = 0;
  bool shuffle_;
  bool drop_last_;
  int64_t seed_;
  int64_t epoch_ = 0;
  int64_t start_ = 0;                    // of the next indices()
  std::optional<int64_t> latest_start_;  // of the latest, until something else is chosen
};

struct DistributedEvalSamplerOptions {
  std::optional<int64_t> num_replicas = std::nullopt;  ///< as DistributedSamplerOptions
  std::optional<int64_t> rank = std::nullopt;          ///< as DistributedSamplerOptions
};

/// One rank's share of a data set that is to be seen exactly once, for validation: indices rank,
/// rank + num_replicas, …, in every epoch. Nothing is repeated and nothing left out, so the first ranks may
/// get one more than the others, and ranks may get none: average over sums and counts that are all-reduced
/// after the loop, and call no collective in it (DistributedDataParallel's forward in evaluation mode calls
/// none).
class DistributedEvalSampler final : public Sampler {
 public:
  /// Throws as DistributedSampler does.
  explicit DistributedEvalSampler(int64_t size, const DistributedEvalSamplerOptions& options = {});
  int64_t size() const override;
  std::vector<int64_t> indices() override;
  int64_t num_replicas() const { return num_replicas_; }
  int64_t rank() const { return rank_; }

 private:
  int64_t dataset_size_;
  int64_t num_replicas_;
  int64_t rank_;
};

}  // namespace lockstep::data
