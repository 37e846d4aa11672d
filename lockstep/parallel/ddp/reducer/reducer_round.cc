// The end of the reducer's rounds: waiting, giving gradients, failing.
#include <algorithm>
#include <iterator>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/engine.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/parallel/ddp/reducer/reducer.h>

namespace lockstep {

void Reducer::queue_finish() {
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] {
    std::lock_guard lock(self->mutex_);
    if (self->round_.phase() == RoundPhase::kLaunched) self->finish_round();
  });
}

void Reducer::await(Bucket& bucket) {
  at::NoGradGuard no_grad;
  if (bucket.work) {
    bucket.work->wait();
    // In lower precision the sum is rounded, then the mean, as in PyTorch.
    if ((divisor_ > 0 || reduce_dtype_) && !bucket.sparse)
      at::Tensor(bucket.memory->buffer()).div_(divisor());
    return;
  }
  if (!bucket.future) return;
  bucket.future->waitAndThrow();
  const at::Tensor result = tensor_of(bucket.future->constValue());
  if (bucket.sparse) {
    bucket.sparse_gradient = result;
    return;
  }
  at::Tensor buffer = bucket.memory->buffer();
  TORCH_CHECK(result.numel() == buffer.numel(), "the communication hook ", hook_name_, " gave ",
              result.numel(), " elements for a bucket of ", buffer.numel());
  if (result.data_ptr() != buffer.data_ptr()) buffer.copy_(result.view_as(buffer));
}

void Reducer::finish_round() {
  std::chrono::nanoseconds reducing{};
  std::vector<bool> globally_used;
  try {
    std::exception_ptr error;
    for (Bucket& bucket : buckets_) {
      try {
        await(bucket);
      } catch (...) {
        if (!error) error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
    for (const HookFuture& future : std::exchange(post_backward_, {})) future->waitAndThrow();
    globally_used = agree_on_used();
  } catch (...) {
    fail_round(std::current_exception());
  }
  for (Bucket& bucket : buckets_) {
    if (bucket.work) reducing += duration_of(bucket.work);
    give_gradients(bucket);
  }
  give_gradients_to_unused(globally_used);
  note_round(reducing);
  begin_round();
}

/// Which parameters any rank used; with a static graph the first round tells, and how often.
std::vector<bool> Reducer::agree_on_used() {
  const bool dynamic = options_.find_unused_parameters && !static_graph_;
  if (!dynamic && !is_first_static_round()) return globally_used_;
  at::Tensor map = at::empty({static_cast<int64_t>(parameters_.size())}, at::kInt);
  // One number tells both: how often a parameter gets a gradient in a static graph's first round, and whether
  // it was used at all, which it may have been under no_sync().
  int* own = map.mutable_data_ptr<int>();
  for (size_t index = 0; index < parameters_.size(); ++index) {
    own[index] = 2 * uses_[index] + (used_[index] ? 1 : 0);
  }
  std::vector<at::Tensor> tensors{map};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  options.asyncOp = false;
  group_->allreduce(tensors, options)->wait();
  const int* any = map.const_data_ptr<int>();
  globally_used_.assign(any, any + map.numel());
  if (!dynamic && std::count(uses_.begin(), uses_.end(), 0) == std::ssize(uses_)) {
    // A rank without inputs has a shadow round as the first; its own graph will be the others'.
    for (size_t index = 0; index < uses_.size(); ++index) {
      uses_[index] = any[index] / 2;
      if (uses_[index] == 0) unused_.push_back(index);
    }
  }
  return globally_used_;
}

/// Parameters without a gradient of their own get the others' average, those that nobody used keep what they
/// had.
void Reducer::give_gradients_to_unused(const std::vector<bool>& globally_used) {
  at::NoGradGuard no_grad;
  auto unused = unused_;
  unused.insert(unused.end(), silent_.begin(), silent_.end());
  for (const size_t index : unused) {
    const bool sparse = parameters_[index].sparse;
    at::Tensor& gradient = tensors_[index].mutable_grad();
    if (!globally_used.empty() && !globally_used[index]) {
      if (before_[index].defined()) {
        put_gradient(index, before_[index]);
      } else if (sparse) {
        gradient.reset();
      }
    } else if (!gradient.defined() && !sparse) {
      give_slot(index);
      if (reduce_dtype_) gradient = gradient.to(own_dtypes_[index]);
    }
  }
}

/// Results into the gradients that are not in the bucket.
void Reducer::give_gradients(Bucket& bucket) {
  at::NoGradGuard no_grad;
  if (bucket.sparse && bucket.copy_back.empty() && bucket.sparse_gradient.defined()) {
    tensors_[bucket.parameters[0]].mutable_grad() = bucket.sparse_gradient;
  }
  for (const size_t position : bucket.copy_back) {
    put_gradient(bucket.parameters[position],
                 bucket.sparse ? bucket.sparse_gradient : bucket.views[position]);
  }
}

/// Gives a parameter's gradient these values. One that is there stays the same tensor, for the user may know
/// it, unless it has another type than its parameter.
void Reducer::put_gradient(size_t index, const at::Tensor& values) {
  at::Tensor& gradient = tensors_[index].mutable_grad();
  const bool dense = values.layout() == c10::kStrided;
  if (gradient.defined() && (!reduce_dtype_ || gradient.scalar_type() == own_dtypes_[index])) {
    // What detach() gives shares a dense tensor's memory, but not a sparse one's number of rows.
    (dense ? gradient.detach() : gradient).copy_(values);
  } else {
    gradient = dense ? values.to(own_dtypes_[index], /*non_blocking=*/false, /*copy=*/true) : values;
    if (dense) own_storage_[index] = gradient.storage().getWeakStorageImpl();
  }
}

void Reducer::begin_round() {
  std::fill(ready_.begin(), ready_.end(), false);
  std::fill(used_.begin(), used_.end(), false);
  for (const size_t index : unused_) before_[index].reset();
  silent_.clear();
  for (Bucket& bucket : buckets_) {
    bucket.pending = bucket.parameters.size();
    bucket.work.reset();
    bucket.future.reset();
    bucket.copy_back.clear();
    bucket.streams.clear();
    bucket.sparse_gradient.reset();
  }
  uses_left_ = uses_;
  if (round_.open()) round_.enter(RoundPhase::kIdle);
}

void Reducer::abandon_round() {
  post_backward_.clear();
  for (Bucket& bucket : buckets_) {
    try {
      if (bucket.work) bucket.work->wait();
      if (bucket.future) bucket.future->wait();
    } catch (...) {  // who asks for this knows the cause already
    }
  }
  if (is_first_static_round()) std::fill(uses_.begin(), uses_.end(), 0);
  begin_round();
  clock_.reset();
}

void Reducer::fail_round(std::exception_ptr error) {
  error_ = text_of(error);
  abandon_round();
  if (on_failure_) on_failure_();
  std::rethrow_exception(error);
}

void Reducer::reset() {
  std::lock_guard lock(mutex_);
  abandon_round();
}

}  // namespace lockstep
