#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include <ATen/core/Generator.h>

#include <lockstep/data/data_loader_options.h>
#include <lockstep/data/internal/batch_pipeline.h>
#include <lockstep/serialization/state_dict.h>

namespace lockstep::data::internal {

/// What a loader knows without its data set's type: the checked options, the order of the epochs, how far the
/// latest has come, and the workers where they are persistent.
class EpochPlanner {
 public:
  /// `dataset_size`: none for an iterable data set.
  EpochPlanner(std::optional<int64_t> dataset_size, const DataLoaderOptions& options);

  /// Batches per epoch of a data set with that many samples.
  int64_t batches() const;
  int64_t batches_of(int64_t samples) const;
  const DataLoaderOptions& options() const { return options_; }
  double waited() const { return 1e-9 * static_cast<double>(waited_->load(std::memory_order_relaxed)); }

  /// A new epoch, or the rest of a loaded one.
  std::unique_ptr<BatchPipeline> start_epoch(BatchRecipe recipe);
  /// Samples of the epoch that the next start_epoch() continues, which were seen before; 0 for a new one.
  int64_t seen_before() const { return loaded() ? progress_->samples : 0; }

  StateDict state_dict(int64_t unseen_batches, bool end_unseen) const;
  void load_state_dict(const StateDict& state);

  void set_epoch(int64_t epoch);
  bool start_at(int64_t position);

 private:
  bool iterable() const { return !dataset_size_; }
  bool loaded() const { return progress_->phase == EpochPhase::kLoaded; }
  Sampler& sampler() const { return options_.sampler != nullptr ? *options_.sampler : *own_sampler_; }
  StateDict sampler_state() const;
  void load_sampler(const StateDict& state);
  int64_t new_base_seed() const;
  void ask_for_order(EpochPlan& plan) const;
  void go_on(EpochPlan& plan, const EpochProgress& loaded) const;

  std::optional<int64_t> dataset_size_;
  DataLoaderOptions options_;
  std::optional<at::Generator> generator_;  // of options_.seed
  std::unique_ptr<Sampler> own_sampler_;    // when options_ has none
  std::shared_ptr<WorkerPool> pool_;        // of persistent workers, once there was an epoch
  std::shared_ptr<std::atomic<int64_t>> waited_;

  // The latest epoch.
  std::shared_ptr<const EpochProgress> progress_ = std::make_shared<EpochProgress>();
  std::shared_ptr<const EpochPlan> plan_;  // of one that was begun here
  std::optional<int64_t> base_seed_;       // none before the first
  StateDict sampler_state_;                // from which its order came
  int64_t loaded_order_ = 0;               // of one that is loaded: what order_of() was
};

}  // namespace lockstep::data::internal
