#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <lockstep/parallel/ddp/reducer/bucket.h>
#include <lockstep/parallel/ddp/reducer/bucket_assignment.h>
#include <lockstep/parallel/ddp/reducer/gradient_slots.h>
#include <lockstep/parallel/ddp/reducer/reducer_settings.h>
#include <lockstep/parallel/ddp/reducer/step_times.h>

namespace lockstep {

/// All buckets of a reducer, and the ways of gradients into their slots and back. No thread-safety of its
/// own, but for tensors in slots, which any thread may free.
class BucketSet {
 public:
  explicit BucketSet(const ReducerSettings& settings);
  BucketSet(const BucketSet&) = delete;
  BucketSet& operator=(const BucketSet&) = delete;
  ~BucketSet();

  /// Makes them anew, for parameters in this order; see assign_buckets(). Gradients in old buckets move
  /// along.
  void build(const std::vector<size_t>& order, const std::vector<size_t>& limits);
  /// The same with torch's first buckets: in the order of definition, the last ones first.
  void build_initial(const std::vector<size_t>& limits);

  /// In the order of their reduction.
  std::vector<Bucket>& all() { return buckets_; }
  const std::vector<Bucket>& all() const { return buckets_; }
  std::vector<size_t> order() const;  // of parameters
  std::vector<size_t> bytes() const;
  /// The slots of these buckets; a thread may still have those of earlier ones as its source of memory.
  const std::shared_ptr<GradientSlots>& slots() const { return slots_; }

  void begin_round();
  /// Whether all that this rank adds to the parameter's gradient is in its bucket, in this round.
  bool ready(size_t parameter) const { return ready_[parameter]; }
  /// After take() and its like, for what is ready moves along when its bucket gets other memory.
  void mark_ready(size_t parameter);

  /// Autograd is about to accumulate a gradient, and has done so.
  void before_gradient(size_t parameter);
  void after_gradient(size_t parameter);
  /// Copies the gradient into its bucket, unless it lies there, and makes a tensor there the gradient if it
  /// may. `incoming`: see held_by_others().
  void take(size_t parameter, const at::Tensor& incoming, StepClock& clock);
  /// The parameter adds nothing; or, if sparse, what it has had.
  void take_nothing(size_t parameter);
  /// None of the parameters adds anything.
  void take_zeros();

  /// Results into the gradients that are not in the bucket.
  void give_results(Bucket& bucket);
  /// Gives a parameter's gradient these values. One that is there stays the same tensor, for the user may
  /// know it, unless it has another type than its parameter.
  void put(size_t parameter, const at::Tensor& values);
  /// Forgets a gradient of an earlier step, as zero_grad() does; in memory of the user's it becomes zeros.
  void drop_gradient(size_t parameter);
  /// Makes a tensor in the parameter's slot its gradient.
  void give_slot(size_t parameter);

 private:
  struct Place {
    size_t bucket = 0;
    size_t position = 0;
  };

  std::vector<ParameterSize> sizes() const;
  void make(std::vector<std::vector<size_t>> assignment);
  void move_to_new_memory(Bucket& bucket, size_t needed);
  void keep_gradient(size_t parameter, const Bucket& old, size_t old_position);
  void take_sparse(Bucket& bucket, size_t parameter, StepClock& clock);
  bool known_to_others(size_t parameter, const at::Tensor& incoming) const;

  const ReducerSettings& settings_;
  std::vector<Bucket> buckets_;
  std::vector<Place> places_;  // by parameter
  std::vector<bool> ready_;    // by parameter
  std::shared_ptr<GradientSlots> slots_;
  /// By parameter: the memory that autograd or the reducer last made for its gradient. Weak pointers keep
  /// addresses from being used again.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> own_storage_;
  std::vector<bool> had_gradient_;  // by parameter: when autograd last came to add to it
  int moves_ = 0;                   // of buckets to new memory
};

}  // namespace lockstep
