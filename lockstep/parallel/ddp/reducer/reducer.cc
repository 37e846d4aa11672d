#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/training/training_phases.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/nn/current_backward.h>
#include <lockstep/parallel/ddp/reducer/reducer.h>
#include <lockstep/parallel/ddp/reducer/used_parameters.h>

namespace lockstep {

std::shared_ptr<Reducer> Reducer::create(const std::vector<Parameter>& parameters,
                                         const DistributedDataParallelOptions& options,
                                         std::function<void()> on_failure) {
  std::shared_ptr<Reducer> reducer(new Reducer(parameters, options, std::move(on_failure)));
  reducer->hooks_.attach(reducer, reducer->settings_.tensors);
  return reducer;
}

Reducer::Reducer(const std::vector<Parameter>& parameters, const DistributedDataParallelOptions& options,
                 std::function<void()> on_failure)
    : settings_(parameters, options),
      on_failure_(std::move(on_failure)),
      buckets_(settings_),
      sizes_(settings_),
      use_(settings_) {
  build_buckets();
  initial_bucket_bytes_ = buckets_.bytes();
}

std::vector<std::shared_ptr<void>> Reducer::watch_current_accumulators() {
  std::lock_guard lock(mutex_);
  return hooks_.attach_to_current(settings_.tensors);
}

void Reducer::register_comm_hook(CommunicationHook hook, const std::string& name) {
  std::lock_guard lock(mutex_);
  TORCH_CHECK_TYPE(hook, "Communication hook must be callable.");
  TORCH_CHECK(!settings_.hook || hook_of_old_group_, "register_comm_hook can only be called once; '",
              settings_.hook_name, "' is registered");
  TORCH_CHECK(as_new(), "register_comm_hook must be called before the first backward");
  settings_.hook = std::move(hook);
  hook_of_old_group_ = false;
  settings_.hook_name = name;
  build_buckets();
}

void Reducer::set_static_graph() {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(as_new(), "set_static_graph() must be called before the first backward");
  settings_.options.static_graph = true;
}

void Reducer::set_divisor(int64_t ranks) {
  std::lock_guard lock(mutex_);
  settings_.divisor = ranks;
}

void Reducer::set_on_backward_end(std::function<void()> callback) {
  std::lock_guard lock(mutex_);
  on_backward_end_ = std::move(callback);
}

void Reducer::set_reduce_dtype(at::ScalarType reduce) {
  std::lock_guard lock(mutex_);
  settings_.reduce_dtype = reduce;
  build_buckets();
}

void Reducer::add_post_backward_futures(const std::vector<HookFuture>& futures) {
  std::lock_guard lock(mutex_);
  post_backward_.insert(post_backward_.end(), futures.begin(), futures.end());
}

// ---- Around forward

void Reducer::prepare_forward() {
  std::lock_guard lock(mutex_);
  // Its callback was lost to another's exception.
  if (round_.phase() == RoundPhase::kLaunched) finish_round();
  TORCH_CHECK(!round_.open(), unfinished_text());
  clock_.begin_forward();
}

void Reducer::rebuild_buckets() {
  std::lock_guard lock(mutex_);
  if (round_.open()) return;             // gradients of an unfinished round lie in them
  if (settings_.finds_unused()) return;  // the order may change from round to round
  if (rounds_ == rounds_at_restart_) return;
  if (rebuilt_) {
    if (sizes_.tune(rounds_ - rounds_at_restart_)) build_buckets();
    return;
  }
  rebuilt_ = true;
  std::vector<size_t> order = arrival_order_;
  for (size_t index = 0; index < settings_.size(); ++index) {
    if (std::find(order.begin(), order.end(), index) == order.end()) order.push_back(index);
  }
  at::Tensor agreed = at::empty({static_cast<int64_t>(order.size())}, at::kLong);
  std::copy(order.begin(), order.end(), agreed.mutable_data_ptr<int64_t>());
  std::vector<at::Tensor> tensors{agreed};
  const CallSite site("DDP's order of buckets");
  settings_.group()->broadcast(tensors)->wait();
  const auto* indices = agreed.const_data_ptr<int64_t>();
  buckets_.build({indices, indices + agreed.numel()}, sizes_.limits());
  begin_round();
}

/// In the order that they have.
void Reducer::build_buckets() {
  if (rebuilt_) {
    buckets_.build(buckets_.order(), sizes_.limits());
  } else {
    buckets_.build_initial(sizes_.initial_limits());
  }
  begin_round();
}

void Reducer::force_caps(const BucketCaps& caps) {
  std::lock_guard lock(mutex_);
  sizes_.force(caps);
  if (rebuilt_) build_buckets();
}

void Reducer::prepare_backward(bool synchronise, const std::vector<at::Tensor>& outputs) {
  std::lock_guard lock(mutex_);
  synchronise_ = synchronise;
  if (!settings_.options.static_graph) {
    use_.set_unused(synchronise && settings_.finds_unused()
                        ? find_unused_parameters(outputs, hooks_.accumulators())
                        : std::vector<size_t>{});
  }
  watching_outputs_ = false;
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.requires_grad() || output.is_leaf()) continue;
    watching_outputs_ = true;
    output.register_hook([reducer = weak_from_this()](const at::Tensor&) {
      if (auto self = reducer.lock()) {
        std::lock_guard backward_lock(self->mutex_);
        self->begin_backward();
      }
    });
  }
}

// ---- During backward

void Reducer::begin_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  const auto& slots = buckets_.slots();
  if (task == slots->graph_task()) return;
  slots->begin(task);
  clock_.begin_backward();
  enter_backward_phase(/*from_any_thread=*/!settings_.on_cpu);
  // Autograd computes a CPU graph, and runs this callback, in the thread that called backward(). Those of
  // other devices it computes in threads of its own, whose memory is not for us to give.
  std::shared_ptr<MemorySource> before;
  if (settings_.on_cpu) before = exchange_memory_source(slots);
  // Another reducer's belongs to this very backward, or to one that an exception ended.
  if (std::dynamic_pointer_cast<GradientSlots>(before)) before = nullptr;
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this(), before] {
    if (self->settings_.on_cpu) {
      if (auto current = exchange_memory_source(before); current != self->buckets_.slots())
        exchange_memory_source(current);
    }
    std::lock_guard lock(self->mutex_);
    if (self->on_backward_end_) self->on_backward_end_();
    if (self->synchronise_ && self->round_.phase() == RoundPhase::kCounting) self->queue_everything();
  });
}

void Reducer::before_gradient(size_t index) {
  std::lock_guard lock(mutex_);
  if (!watching_outputs_) begin_backward();
  buckets_.before_gradient(index);
}

void Reducer::on_gradient(size_t index, const at::Tensor& incoming) {
  std::lock_guard lock(mutex_);
  const bool static_graph = settings_.options.static_graph;
  if (!settings_.tensors[index].grad().defined()) {
    if (!synchronise_ || static_graph) return;
    open_round();
    if (buckets_.ready(index)) return;
    use_.mark_silent(index);
    mark_ready(index, /*used=*/false);
    return;
  }
  use_.mark_used(index);
  buckets_.after_gradient(index);
  if (!synchronise_) {
    if (settings_.reduce_dtype) {
      at::NoGradGuard no_grad;
      at::Tensor& gradient = settings_.tensors[index].mutable_grad();
      gradient = gradient.to(settings_.dtypes[index]);
    }
    return;
  }
  open_round();
  if (is_first_static_round()) {
    if (use_.count(index) == 1) round_.arrivals().push_back({index, 0});
    return;
  }
  if (static_graph && !use_.count_down(index)) return;
  TORCH_CHECK(
      !buckets_.ready(index), "Expected to mark a variable ready only once. Parameter at index ", index,
      " with name '", settings_.names[index],
      "' has been marked as ready twice. This means that it got a second gradient before all others got "
      "their first: it is used in several backward passes of one iteration that each cover only a part of "
      "the model (re-entrant checkpointing, say), or outside of forward(), or was taken for unused. Try "
      "static_graph = true if the graph does not change between iterations");
  mark_ready(index, /*used=*/true, incoming);
}

void Reducer::open_round() {
  if (round_.open()) return;
  const bool counts = is_first_static_round();
  round_.enter(counts ? RoundPhase::kCounting : RoundPhase::kCollecting);
  if (counts) return;
  for (const size_t index : use_.unused()) mark_ready(index, /*used=*/false);
}

void Reducer::mark_ready(size_t index, bool used, const at::Tensor& incoming) {
  if (used) {
    buckets_.take(index, incoming, clock_);
    round_.arrivals().push_back({index, std::chrono::duration<double>(clock_.since_backward()).count()});
  } else {
    take_nothing(index);
  }
  buckets_.mark_ready(index);
  launch_full();
  if (round_.phase() == RoundPhase::kLaunched && !is_first_static_round()) queue_finish();
}

/// An unused parameter adds nothing to the others' sum, but what earlier iterations left.
void Reducer::take_nothing(size_t index) {
  at::NoGradGuard no_grad;
  const at::Tensor& gradient = settings_.tensors[index].grad();
  if (gradient.defined()) use_.keep_gradient(index, gradient.clone());
  if (gradient.defined() && !settings_.sparse[index]) {
    buckets_.take(index, /*incoming=*/{}, clock_);
  } else {
    buckets_.take_nothing(index);
  }
}

/// Static graph: all gradients of the first round are there, however often each was added to.
void Reducer::queue_everything() {
  round_.enter(RoundPhase::kCollecting);
  use_.keep_counts();
  for (const auto& arrival : std::exchange(round_.arrivals(), {}))
    mark_ready(arrival.parameter, /*used=*/true);
  for (const size_t index : use_.unused()) mark_ready(index, /*used=*/false);
  finish_round();
}

void Reducer::launch_full() {
  // Strictly in order, so that all ranks reduce the same buckets one after the other.
  auto& buckets = buckets_.all();
  while (round_.phase() == RoundPhase::kCollecting && buckets[round_.next_bucket()].pending == 0) {
    launch(round_.launch_next());
    if (round_.next_bucket() == buckets.size()) round_.enter(RoundPhase::kLaunched);
  }
}

void Reducer::launch(size_t index) {
  Bucket& bucket = buckets_.all()[index];
  if (settings_.options.skip_all_reduce_unused_params && use_.all_unused(bucket)) return;
  clock_.launch();
  const CallSite site(bucket.purpose);
  try {
    launch_reduction(bucket, index, /*last=*/index + 1 == buckets_.all().size(), settings_);
  } catch (...) {
    fail_round(std::current_exception());
  }
}

// ---- The end of a round

void Reducer::queue_finish() {
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] {
    std::lock_guard lock(self->mutex_);
    if (self->round_.phase() == RoundPhase::kLaunched) self->finish_round();
  });
}

void Reducer::finish_round() {
  try {
    const WaitingPhase waiting;  // for a hook's futures, too
    std::exception_ptr error;
    for (Bucket& bucket : buckets_.all()) {
      try {
        await_reduction(bucket, settings_);
      } catch (...) {
        if (!error) error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
    for (const HookFuture& future : std::exchange(post_backward_, {})) future->waitAndThrow();
    use_.agree(is_first_static_round());
  } catch (...) {
    fail_round(std::current_exception());
  }
  std::chrono::nanoseconds reducing{};
  for (Bucket& bucket : buckets_.all()) {
    if (bucket.work) reducing += duration_of(bucket.work);
    buckets_.give_results(bucket);
  }
  use_.give_gradients(buckets_);
  clock_.finish(rounds_, reducing);
  use_.note_round();
  ++rounds_;
  shadowed_rounds_ = 0;
  fingerprint_.take(settings_.tensors);
  arrival_order_.clear();
  for (const auto& arrival : round_.arrivals()) arrival_order_.push_back(arrival.parameter);
  if (rebuilt_) sizes_.measure(round_, buckets_.all());
  begin_round();
}

void Reducer::begin_round() {
  buckets_.begin_round();
  use_.begin_round();
  if (round_.open()) round_.enter(RoundPhase::kIdle);
}

void Reducer::abandon_round() {
  post_backward_.clear();
  for (Bucket& bucket : buckets_.all()) {
    try {
      if (bucket.work) bucket.work->wait();
      if (bucket.future) bucket.future->wait();
    } catch (...) {  // who asks for this knows the cause already
    }
  }
  if (is_first_static_round()) use_.forget_counts();
  begin_round();
  clock_.reset();
}

void Reducer::fail_round(std::exception_ptr error) {
  error_ = text_of(error);
  abandon_round();
  if (on_backward_end_) on_backward_end_();  // the exception ends backward before its callback
  if (on_failure_) on_failure_();
  std::rethrow_exception(error);
}

void Reducer::reset() {
  std::lock_guard lock(mutex_);
  abandon_round();
}

// ---- Another group, and ranks without inputs

void Reducer::update_process_group(const ProcessGroup& group) {
  std::lock_guard lock(mutex_);
  abandon_round();
  settings_.options.process_group = group;
  rebuilt_ = synchronise_ = false;
  hook_of_old_group_ = true;
  sizes_.restart();
  use_.restart();
  rounds_at_restart_ = rounds_;
  arrival_order_.clear();
  build_buckets();
}

void Reducer::shadow_backward() {
  std::lock_guard lock(mutex_);
  at::NoGradGuard no_grad;
  synchronise_ = true;
  if (round_.phase() < RoundPhase::kCollecting) round_.enter(RoundPhase::kCollecting);
  buckets_.take_zeros();
  launch_full();
  try {
    for (Bucket& bucket : buckets_.all()) await_reduction(bucket, settings_);
    use_.agree(is_first_static_round());
  } catch (...) {
    fail_round(std::current_exception());
  }
  // For an optimizer that steps on, on this rank, too: a ZeroRedundancyOptimizer beside the model in a Join.
  for (const Bucket& bucket : buckets_.all()) {
    for (size_t position = 0; position < bucket.parameters.size(); ++position) {
      const size_t index = bucket.parameters[position];
      if (!use_.used_by_any(index)) {
        buckets_.drop_gradient(index);
        continue;
      }
      buckets_.put(index, bucket.sparse ? bucket.sparse_gradient : bucket.views[position]);
    }
  }
  ++rounds_;
  ++shadowed_rounds_;
  begin_round();
}

}  // namespace lockstep
