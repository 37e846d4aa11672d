#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

#include <lockstep/checkpoint/internal/retention.h>

namespace lockstep::internal {

std::vector<CheckpointInfo> checkpoints_to_remove(std::vector<CheckpointInfo> there,
                                                  const CheckpointManagerOptions& options,
                                                  const std::vector<std::filesystem::path>& keep_also) {
  std::sort(there.begin(), there.end(), [](const CheckpointInfo& a, const CheckpointInfo& b) {
    return std::tie(a.saved_at, a.step, a.directory) > std::tie(b.saved_at, b.step, b.directory);
  });
  std::set<std::filesystem::path> keep(keep_also.begin(), keep_also.end());
  int64_t planned = 0;
  int64_t emergencies = 0;
  std::vector<const CheckpointInfo*> measured;
  for (const CheckpointInfo& info : there) {
    const bool recent =
        info.emergency.empty() ? planned++ < options.keep_last : emergencies++ < options.keep_emergency;
    if (recent) keep.insert(info.directory);
    const auto metric = info.metrics.find(options.metric);
    if (metric != info.metrics.end() && !std::isnan(metric->second)) measured.push_back(&info);
  }
  std::stable_sort(measured.begin(), measured.end(), [&](const CheckpointInfo* a, const CheckpointInfo* b) {
    const double first = a->metrics.at(options.metric);
    const double second = b->metrics.at(options.metric);
    return options.mode == CheckpointManagerOptions::Mode::min ? first < second : first > second;
  });
  for (size_t i = 0; i < measured.size() && static_cast<int64_t>(i) < options.keep_best; ++i) {
    keep.insert(measured[i]->directory);
  }
  std::erase_if(there, [&](const CheckpointInfo& info) { return keep.contains(info.directory); });
  return there;
}

}  // namespace lockstep::internal
