#include <algorithm>
#include <limits>

#include <c10/util/Exception.h>

#include <lockstep/base/place_in_world.h>
#include <lockstep/data/samplers/rank_share.h>

namespace lockstep::data {
namespace {

int64_t share_of(const char* what, const char* option, int64_t total, Rounding rounding,
                 const PlaceInWorld& place) {
  const int64_t ranks = place.num_replicas;
  const int64_t rest = total % ranks;
  switch (rounding) {
    case Rounding::kRefuse:
      TORCH_CHECK_VALUE(rest == 0, what, "=", total, " can't be shared evenly by ", ranks, " ranks; take ",
                        total - rest > 0 ? std::to_string(total - rest) + " or " : "", total - rest + ranks,
                        ", or say with .", option, " how to round: kUneven, kDown or kUp");
      return total / ranks;
    case Rounding::kUneven:
      return total / ranks + (place.rank < rest ? 1 : 0);
    case Rounding::kDown:
      return total / ranks;
    case Rounding::kUp:
      return total / ranks + (rest > 0 ? 1 : 0);
  }
  TORCH_CHECK_VALUE(false, option, " is ", static_cast<int>(rounding), ", which is no Rounding");
}

}  // namespace

RankShare rank_share(const RankShareOptions& options) {
  const auto place = place_in_world("rank_share", options.num_replicas, options.rank);
  TORCH_CHECK_VALUE(options.global_batch_size > 0, "global_batch_size=", options.global_batch_size,
                    "; it should be at least 1");
  TORCH_CHECK_VALUE(options.global_num_workers >= 0, "global_num_workers=", options.global_num_workers,
                    "; it should be 0 or more");
  const int64_t batch_size = share_of("global_batch_size", "batch_rounding", options.global_batch_size,
                                      options.batch_rounding, place);
  TORCH_CHECK_VALUE(batch_size > 0, "global_batch_size=", options.global_batch_size, " leaves rank ",
                    place.rank, " of ", place.num_replicas, " without a sample; take at least ",
                    place.num_replicas);
  int64_t num_workers = share_of("global_num_workers", "worker_rounding", options.global_num_workers,
                                 options.worker_rounding, place);
  if (options.worker_rounding == Rounding::kDown && options.global_num_workers > 0) {
    num_workers = std::max<int64_t>(num_workers, 1);
  }
  TORCH_CHECK_VALUE(num_workers <= std::numeric_limits<int>::max(),
                    "global_num_workers=", options.global_num_workers, " is too many");
  return {batch_size, static_cast<int>(num_workers)};
}

}  // namespace lockstep::data
