#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <lockstep/ddp/options.h>

namespace lockstep {

/// Averages gradients over a group while backward() is still computing others.
///
/// Parameters are packed into *buckets*: flat tensors in shared memory. When autograd has accumulated a
/// parameter's gradient, a hook divides it by the group's size into its place in the bucket, and makes that
/// place the parameter's gradient. A full bucket is all-reduced at once, strictly in bucket order, by the
/// group's communication thread. The end of backward() waits for the last one; gradients are then the
/// averages, in place.
///
/// The first synchronised iteration uses buckets in reversed definition order and notes the order in which
/// gradients arrive; before the second forward the buckets are built again in rank 0's order. After torch's
/// reducer.cpp, whose errors it repeats with the parameters' names.
///
/// Used by one thread at a time, as a module is; several reducers may work at once, each on a group of its
/// own or in the same order on all ranks. Hooks hold it weakly.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  /// `parameters`: distinct, requiring gradients, dense CPU tensors, the same on all ranks.
  static std::shared_ptr<Reducer> create(std::vector<NamedTensor> parameters,
                                         const DistributedDataParallelOptions& options);
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;
  ~Reducer();

  /// Before a synchronised forward. Throws if the last iteration's reduction is not finished: some parameters
  /// got no gradient; names them. Rebuilds the buckets once. Collective when it does.
  void prepare_forward();
  /// After a forward: whether the backward passes to come are to reduce.
  void expect_backward(bool synchronise);

  /// The buckets' sizes in bytes, in the order of their reduction.
  std::vector<size_t> bucket_bytes() const;

 private:
  struct Bucket {
    at::Tensor buffer;
    std::vector<size_t> parameters;
    std::vector<at::Tensor> views;  // by position in `parameters`; sizes and strides as the parameter's
    size_t pending = 0;             // parameters without a gradient in this round
    c10::intrusive_ptr<c10d::Work> work;
  };
  struct Place {
    size_t bucket = 0;
    size_t position = 0;
  };
  struct Hook;

  Reducer(std::vector<NamedTensor> parameters, const DistributedDataParallelOptions& options);
  void add_hooks();
  void build_buckets(const std::vector<size_t>& order);
  void rebuild_buckets();
  void begin_round();
  void on_gradient(size_t index);
  void take_gradient(size_t index);
  void launch(Bucket& bucket);
  void finish_round();
  std::string names_without_gradient() const;

  std::vector<NamedTensor> parameters_;
  DistributedDataParallelOptions options_;
  ProcessGroup group_;
  double divisor_ = 1;
  std::vector<std::shared_ptr<void>> accumulators_;  // keep the hooks' nodes alive
  std::vector<std::shared_ptr<void>> hook_removers_;

  mutable std::mutex mutex_;
  std::vector<Bucket> buckets_;
  std::vector<Place> places_;  // by parameter
  bool synchronise_ = false;
  bool round_open_ = false;         // some gradients of this round have arrived, the round is not finished
  std::vector<bool> has_gradient_;  // in this round
  size_t next_bucket_ = 0;          // the first that is not launched
  bool rebuilt_ = false;
  std::vector<size_t> arrival_order_;
};

}  // namespace lockstep
