#include <algorithm>
#include <iterator>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/parallel/ddp/reducer/parameter_use.h>

namespace lockstep {

ParameterUse::ParameterUse(const ReducerSettings& settings)
    : settings_(settings),
      used_(settings.size(), false),
      before_(settings.size()),
      counts_(settings.size(), 0) {}

bool ParameterUse::all_unused(const Bucket& bucket) const {
  return std::all_of(bucket.parameters.begin(), bucket.parameters.end(), [&](size_t index) {
    return std::find(unused_.begin(), unused_.end(), index) != unused_.end() ||
           std::find(silent_.begin(), silent_.end(), index) != silent_.end();
  });
}

void ParameterUse::keep_counts() {
  unused_.clear();
  for (size_t index = 0; index < counts_.size(); ++index) {
    if (counts_[index] == 0) unused_.push_back(index);
  }
}

void ParameterUse::forget_counts() {
  std::fill(counts_.begin(), counts_.end(), 0);
}

bool ParameterUse::count_down(size_t index) {
  TORCH_CHECK(counts_left_[index] > 0,
              "Your training graph has changed in this iteration, e.g., one parameter is unused in first "
              "iteration, but then got used in the second iteration, or is used more often: '",
              settings_.names[index], "'. this is not compatible with static_graph set to True.");
  return --counts_left_[index] == 0;
}

void ParameterUse::agree(bool first_static_round) {
  if (!settings_.finds_unused() && !first_static_round) return;
  at::Tensor map = at::empty({static_cast<int64_t>(settings_.size())}, at::kInt);
  // One number tells both: how often a parameter gets a gradient in a static graph's first round, and whether
  // it was used at all, which it may have been under no_sync().
  int* own = map.mutable_data_ptr<int>();
  for (size_t index = 0; index < settings_.size(); ++index) {
    own[index] = 2 * counts_[index] + (used_[index] ? 1 : 0);
  }
  std::vector<at::Tensor> tensors{map};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  options.asyncOp = false;
  const CallSite site("DDP's unused parameters");
  settings_.group()->allreduce(tensors, options)->wait();
  const int* any = map.const_data_ptr<int>();
  anywhere_.assign(any, any + map.numel());
  if (first_static_round && std::count(counts_.begin(), counts_.end(), 0) == std::ssize(counts_)) {
    // A rank without inputs has a shadow round as the first; its own graph will be the others'.
    std::transform(any, any + map.numel(), counts_.begin(), [](int number) { return number / 2; });
    keep_counts();
  }
}

void ParameterUse::give_gradients(BucketSet& buckets) const {
  at::NoGradGuard no_grad;
  auto unused = unused_;
  unused.insert(unused.end(), silent_.begin(), silent_.end());
  for (const size_t index : unused) {
    const bool sparse = settings_.sparse[index];
    at::Tensor& gradient = settings_.tensors[index].mutable_grad();
    if (!used_by_any(index)) {
      if (before_[index].defined()) {
        buckets.put(index, before_[index]);
      } else if (sparse) {
        gradient.reset();
      }
    } else if (!gradient.defined() && !sparse) {
      buckets.give_slot(index);
      if (settings_.reduce_dtype) gradient = gradient.to(settings_.dtypes[index]);
    }
  }
}

void ParameterUse::note_round() {
  if (used_first_.empty()) used_first_ = used_;
  same_graph_ = same_graph_ && used_first_ == used_;
  unused_bytes_ = 0;
  for (const size_t index : unused_) unused_bytes_ += settings_.tensors[index].nbytes();
}

void ParameterUse::begin_round() {
  std::fill(used_.begin(), used_.end(), false);
  for (const size_t index : unused_) before_[index].reset();
  silent_.clear();
  counts_left_ = counts_;
}

void ParameterUse::restart() {
  anywhere_.clear();
  unused_.clear();
  forget_counts();
}

}  // namespace lockstep
