#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <lockstep/data/samplers/sampler.h>
#include <lockstep/parquet/parquet_dataset.h>

namespace lockstep::data {

struct RowGroupSamplerOptions {
  /// Number of ranks that share the data set; the default group's world size unless told.
  std::optional<int64_t> num_replicas = std::nullopt;
  /// This process among them; the default group's rank unless told.
  std::optional<int64_t> rank = std::nullopt;
  /// A new order of row groups in each epoch (see set_epoch), or the data set's own.
  bool shuffle = true;
  /// With shuffle: a new order of the rows within each row group, too.
  bool shuffle_rows = true;
  /// Must be the same on all ranks.
  int64_t seed = 0;
};

/// One rank's share of a data set's row groups: each row group belongs to exactly one rank in each epoch.
///
/// All ranks compute the same permutation (that of torch.utils.data.DistributedSampler for one replica) and
/// assign it alike: each row group goes to the rank that has the fewest rows so far, the lowest of several.
/// Row groups of one size are thus assigned in turns. Otherwise ranks get different numbers of rows, so a
/// training loop needs ParquetBatchesOptions::even_batches, or DDP's join(). Nothing is repeated and nothing
/// left out, so it suits a validation, too.
///
/// Not thread-safe. Independent of the data set and the process group once made; copies are independent.
class RowGroupSampler final : public Sampler {
 public:
  /// Throws c10::ValueError when the rank lies outside [0, num_replicas - 1], and when rank or num_replicas
  /// are not told and there is no default process group.
  explicit RowGroupSampler(const ParquetDataset& dataset, const RowGroupSamplerOptions& options = {});
  /// Row groups with these numbers of rows.
  explicit RowGroupSampler(std::vector<int64_t> row_counts, const RowGroupSamplerOptions& options = {});

  /// Chooses the order of the following calls; without it every epoch has the same. Not while a loader's
  /// epoch is under way.
  void set_epoch(int64_t epoch) override { epoch_ = epoch; }

  /// How many row groups this rank has in this epoch, which may be others in the next.
  int64_t size() const override;
  std::vector<int64_t> indices() override;
  /// How many rows this rank has in this epoch.
  int64_t num_rows() const;
  /// How many rows the rank with the fewest has in this epoch. The same on all ranks.
  int64_t fewest_rows() const;

  /// The order in which to visit the rows of a row group in this epoch, a permutation of 0 to rows - 1 that
  /// seed, epoch and row group decide; empty: their own order, for rows are not shuffled. RowGroupCollate
  /// takes it for several row groups together, too.
  std::vector<int64_t> row_order(int64_t row_group, int64_t rows) const;

  int64_t num_replicas() const { return num_replicas_; }
  int64_t rank() const { return rank_; }
  int64_t epoch() const { return epoch_; }

 private:
  /// What one rank reads.
  struct Share {
    std::vector<int64_t> row_groups;
    int64_t rows = 0;
  };
  std::vector<Share> assign() const;
  Share mine() const;

  std::vector<int64_t> row_counts_;
  int64_t num_replicas_ = 0;
  int64_t rank_ = 0;
  bool shuffle_;
  bool shuffle_rows_;
  int64_t seed_;
  int64_t epoch_ = 0;
};

}  // namespace lockstep::data
