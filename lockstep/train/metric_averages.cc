#include <set>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/objects.h>
#include <lockstep/train/metric_averages.h>

namespace lockstep {

void MetricAverages::add(const std::string& name, double value, double samples) {
  // No sample counts for nothing, whatever the value: 0 times NaN is NaN.
  if (samples <= 0) return;
  auto& sum = sums_[name];
  sum.values += value * samples;
  sum.samples += samples;
}

void MetricAverages::add(const MetricAverages& other) {
  for (const auto& [name, more] : other.sums_) {
    auto& sum = sums_[name];
    sum.values += more.values;
    sum.samples += more.samples;
  }
}

Metrics MetricAverages::local() const {
  Metrics means;
  for (const auto& [name, sum] : sums_) means[name] = sum.values / sum.samples;
  return means;
}

double MetricAverages::samples(const std::string& name) const {
  const auto found = sums_.find(name);
  return found == sums_.end() ? 0 : found->second.samples;
}

MetricAverages MetricAverages::of_all_ranks(const ProcessGroup& group) const {
  if (!group) return *this;
  std::vector<std::string> own;
  for (const auto& [name, unused] : sums_) own.push_back(name);
  std::set<std::string> names;
  for (const auto& of_rank : all_gather_values(own, group)) names.insert(of_rank.begin(), of_rank.end());
  if (names.empty()) return {};
  at::Tensor sums = at::empty({static_cast<int64_t>(names.size()), 2}, at::kDouble);
  auto* next = sums.mutable_data_ptr<double>();
  for (const auto& name : names) {
    const auto found = sums_.find(name);
    *next++ = found == sums_.end() ? 0 : found->second.values;
    *next++ = found == sums_.end() ? 0 : found->second.samples;
  }
  all_reduce(sums, ReduceOp::SUM, group);
  MetricAverages all;
  const auto* sum = sums.const_data_ptr<double>();
  for (const auto& name : names) {
    all.sums_[name] = {sum[0], sum[1]};
    sum += 2;
  }
  return all;
}

Metrics MetricAverages::reduce(const ProcessGroup& group) const {
  return of_all_ranks(group).local();
}

StateDict MetricAverages::state_dict() const {
  StateDict state;
  for (const auto& [name, sum] : sums_) {
    state[name] = to_object(std::vector<double>{sum.values, sum.samples});
  }
  return state;
}

void MetricAverages::load_state_dict(const StateDict& state) {
  std::map<std::string, Sum> sums;
  for (const auto& [name, unused] : state) {
    const auto pair = state_value<std::vector<double>>(state, name, "MetricAverages");
    TORCH_CHECK_VALUE(pair.size() == 2, "MetricAverages::load_state_dict: '", name, "' has ", pair.size(),
                      " numbers; a sum and a number of samples are 2");
    sums[name] = {pair[0], pair[1]};
  }
  sums_ = std::move(sums);
}

}  // namespace lockstep
