#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/parallel/ddp/reducer/bucket_set.h>
#include <lockstep/parallel/ddp/reducer/reducer_settings.h>

namespace lockstep {

/// Which parameters are used: by a forward, by a round on this rank, and on any rank; with a static graph
/// also how often. No thread-safety of its own.
class ParameterUse {
 public:
  explicit ParameterUse(const ReducerSettings& settings);

  /// Those that the forward did not use.
  const std::vector<size_t>& unused() const { return unused_; }
  void set_unused(std::vector<size_t> parameters) { unused_ = std::move(parameters); }
  /// Backward has given the parameter a gradient, if only under no_sync(); or has reached it without one.
  void mark_used(size_t parameter) { used_[parameter] = true; }
  void mark_silent(size_t parameter) { silent_.push_back(parameter); }
  /// What the gradient of an unused parameter was before the round.
  void keep_gradient(size_t parameter, at::Tensor gradient) { before_[parameter] = std::move(gradient); }
  bool all_unused(const Bucket& bucket) const;

  // With a static graph:
  /// One more gradient in the first round. Returns how many there are now.
  int count(size_t parameter) { return ++counts_[parameter]; }
  bool counted(size_t parameter) const { return counts_[parameter] > 0; }
  /// The first round's counts hold from now on: parameters without a gradient there are unused.
  void keep_counts();
  void forget_counts();
  /// One more gradient in a later round. Whether it is the last one; throws if that has come already.
  bool count_down(size_t parameter);

  /// Finds out what any rank used, where that is not known: when unused parameters are looked for, and after
  /// a static graph's first round. Collective then.
  void agree(bool first_static_round);
  /// Whether any rank used it, as far as that was asked.
  bool used_by_any(size_t parameter) const { return anywhere_.empty() || anywhere_[parameter]; }
  /// Parameters without a gradient of their own get the others' average, those that no rank used keep what
  /// they had.
  void give_gradients(BucketSet& buckets) const;
  /// The round is finished.
  void note_round();
  void begin_round();
  /// Forgets what holds for one group: unused parameters, counts, what any rank used.
  void restart();

  /// Whether all rounds so far used the same parameters.
  bool same_graph() const { return same_graph_; }
  size_t unused_bytes() const { return unused_bytes_; }  // in the last round

 private:
  const ReducerSettings& settings_;
  std::vector<size_t> unused_;
  std::vector<bool> used_;          // by parameter, in this round
  std::vector<size_t> silent_;      // in this round
  std::vector<at::Tensor> before_;  // by parameter
  std::vector<int> counts_;         // by parameter, in a static graph's first round
  std::vector<int> counts_left_;    // by parameter, in this round
  std::vector<bool> anywhere_;      // by parameter, in the last round that asked
  std::vector<bool> used_first_;    // by parameter, in the first round
  bool same_graph_ = true;
  size_t unused_bytes_ = 0;
};

}  // namespace lockstep
