#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>

#include <lockstep/checkpoint/internal/retention.h>

namespace lockstep::checkpoint::internal {
namespace {

using Order = std::vector<const ManagedCheckpoint*>;

/// The newest first.
template <class Key>
Order sorted(const std::vector<ManagedCheckpoint>& there, const Key& key) {
  Order order;
  for (const ManagedCheckpoint& each : there) order.push_back(&each);
  std::sort(order.begin(), order.end(), [&](const auto* a, const auto* b) { return key(*a) > key(*b); });
  return order;
}

void keep_the_last(const Order& order, const CheckpointManagerOptions& options,
                   const ConditionOf& condition_of, std::set<std::filesystem::path>& keep) {
  int64_t planned = 0;
  int64_t emergencies = 0;
  for (const ManagedCheckpoint* each : order) {
    const bool by_plan = each->info.emergency.empty();
    int64_t& good = by_plan ? planned : emergencies;
    if (good >= (by_plan ? options.keep_last : options.keep_emergency)) continue;
    keep.insert(each->info.directory);
    if (condition_of(each->info) == Condition::kGood) ++good;
  }
}

/// `order`: of equal ones, which comes first.
void keep_the_best(const Order& order, const CheckpointManagerOptions& options,
                   const ConditionOf& condition_of, std::set<std::filesystem::path>& keep) {
  Order measured;
  for (const ManagedCheckpoint* each : order) {
    const auto metric = each->info.metrics.find(options.metric);
    if (metric != each->info.metrics.end() && !std::isnan(metric->second)) measured.push_back(each);
  }
  std::stable_sort(measured.begin(), measured.end(), [&](const auto* a, const auto* b) {
    const double first = a->info.metrics.at(options.metric);
    const double second = b->info.metrics.at(options.metric);
    return options.mode == CheckpointManagerOptions::Mode::min ? first < second : first > second;
  });
  int64_t good = 0;
  for (const ManagedCheckpoint* each : measured) {
    if (good >= options.keep_best) break;
    const Condition condition = condition_of(each->info);
    if (condition == Condition::kDamaged) continue;
    keep.insert(each->info.directory);
    if (condition == Condition::kGood) ++good;
  }
}

bool is_kept_for_ever(const CheckpointInfo& info, const CheckpointManagerOptions& options) {
  return options.keep_period > 0 && info.step % options.keep_period == 0;
}

std::vector<CheckpointInfo> to_remove(const std::vector<ManagedCheckpoint>& there,
                                      const CheckpointManagerOptions& options,
                                      const std::vector<std::filesystem::path>& keep_also,
                                      const ConditionOf& condition_of) {
  const Order by_step = sorted(there, [](const ManagedCheckpoint& each) {
    return std::tie(each.info.step, each.written, each.info.directory);
  });
  const Order by_writing = sorted(there, [](const ManagedCheckpoint& each) {
    return std::tie(each.written, each.info.step, each.info.directory);
  });
  std::set<std::filesystem::path> keep(keep_also.begin(), keep_also.end());
  keep_the_last(by_step, options, condition_of, keep);
  keep_the_last(by_writing, options, condition_of, keep);
  keep_the_best(by_step, options, condition_of, keep);
  std::vector<CheckpointInfo> remove;
  for (const ManagedCheckpoint& each : there) {
    if (keep.contains(each.info.directory) || is_kept_for_ever(each.info, options)) continue;
    remove.push_back(each.info);
  }
  return remove;
}

}  // namespace

std::vector<CheckpointInfo> checkpoints_to_remove(const std::vector<ManagedCheckpoint>& there,
                                                  const CheckpointManagerOptions& options,
                                                  const std::vector<std::filesystem::path>& keep_also,
                                                  const ConditionOf& condition_of) {
  const auto all_good = [](const CheckpointInfo&) { return Condition::kGood; };
  // Reading whole checkpoints to check them is not worth it while there are too few.
  if (to_remove(there, options, keep_also, all_good).empty()) return {};
  return to_remove(there, options, keep_also, condition_of);
}

}  // namespace lockstep::checkpoint::internal
