#pragma once

#include <cstdint>
#include <optional>

namespace lockstep::data {

/// What to do with what the ranks don't divide.
enum class Rounding {
  kRefuse,  ///< an error
  kUneven,  ///< the first ranks get one more; the sum is exact
  kDown,    ///< all ranks get less; the sum is smaller
  kUp,      ///< all ranks get more; the sum is larger
};

struct RankShareOptions {
  /// Samples of a step over all ranks.
  int64_t global_batch_size = 1;
  /// Loading threads over all ranks.
  int64_t global_num_workers = 0;
  Rounding batch_rounding = Rounding::kRefuse;
  Rounding worker_rounding = Rounding::kRefuse;
  std::optional<int64_t> num_replicas = std::nullopt;  ///< the default group's world size unless told
  std::optional<int64_t> rank = std::nullopt;          ///< the default group's rank unless told
};

/// For DataLoaderOptions of one rank.
struct RankShare {
  int64_t batch_size = 1;
  int num_workers = 0;
};

/// One rank's share of a batch size and a number of workers that are meant for the whole job:
///
///     const auto share = rank_share({.global_batch_size = 256, .global_num_workers = 8});
///     DataLoader loader(train, {.batch_size = share.batch_size, .num_workers = share.num_workers});
///
/// Throws c10::ValueError that names what does not divide and the nearest numbers that do, unless the options
/// say how to round; and when a rank would get no sample. With workers asked for each rank gets at least one
/// (except with kUneven, which keeps the sum). With kUneven batches the mean over ranks of their mean losses
/// is not the mean over samples. Throws as DistributedSampler does for the rank.
RankShare rank_share(const RankShareOptions& options);

}  // namespace lockstep::data
