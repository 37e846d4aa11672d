#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/ddp/reducer/reducer.h>
#include <lockstep/parallel/ddp/reducer/used_parameters.h>

namespace lockstep {
/// Called by autograd before a parameter's gradient is accumulated.
struct Reducer::PreHook : torch::autograd::FunctionPreHook {
  PreHook(std::weak_ptr<Reducer> reducer, size_t index) : reducer_(std::move(reducer)), index_(index) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& inputs) override {
    if (auto reducer = reducer_.lock()) reducer->before_gradient(index_);
    return inputs;
  }

 private:
  std::weak_ptr<Reducer> reducer_;
  size_t index_;
};

/// And after it was.
struct Reducer::Hook : torch::autograd::FunctionPostHook {
  Hook(std::weak_ptr<Reducer> reducer, size_t index) : reducer_(std::move(reducer)), index_(index) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    if (auto reducer = reducer_.lock()) {
      reducer->on_gradient(index_, inputs.empty() ? at::Tensor() : inputs.front());
    }
    return outputs;
  }

 private:
  std::weak_ptr<Reducer> reducer_;
  size_t index_;
};

std::shared_ptr<Reducer> Reducer::create(std::vector<Parameter> parameters,
                                         const DistributedDataParallelOptions& options,
                                         std::function<void()> on_failure) {
  std::shared_ptr<Reducer> reducer(new Reducer(std::move(parameters), options, std::move(on_failure)));
  reducer->add_hooks();
  return reducer;
}

Reducer::Reducer(std::vector<Parameter> parameters, const DistributedDataParallelOptions& options,
                 std::function<void()> on_failure)
    : parameters_(std::move(parameters)),
      options_(options),
      group_(options.process_group),
      on_failure_(std::move(on_failure)),
      own_storage_(parameters_.size(),
                   c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>())),
      static_graph_(options.static_graph),
      had_gradient_(parameters_.size(), true),
      uses_(parameters_.size(), 0),
      ready_(parameters_.size(), false),
      used_(parameters_.size(), false),
      before_(parameters_.size()) {
  for (const Parameter& parameter : parameters_) {
    tensors_.push_back(parameter.tensor);
    own_dtypes_.push_back(parameter.tensor.scalar_type());
    on_cpu_ = on_cpu_ && parameter.tensor.is_cpu();
  }
  build_initial_buckets();
  initial_bucket_bytes_ = bucket_bytes();
}

Reducer::~Reducer() {
  slots_->disconnect();
  for (Bucket& bucket : buckets_) abandon_memory(bucket);
}

void Reducer::add_hooks() {
  for (size_t index = 0; index < parameters_.size(); ++index) {
    // An intrusive_ptr since torch 2.13, a shared_ptr before: the type is deduced.
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[index].tensor);
    TORCH_INTERNAL_ASSERT(accumulator);
    auto* node = accumulator.get();
    accumulator_index_.emplace(node, index);
    const auto hooks = watch(*node, index);
    // A hook lives as long as its node, so the node is held; both go with the reducer.
    accumulators_.push_back(std::make_shared<decltype(accumulator)>(std::move(accumulator)));
    hook_removers_.push_back(
        std::shared_ptr<void>(nullptr, [node, hooks, keep = accumulators_.back()](void*) {
          std::erase_if(node->pre_hooks(), [&](const auto& hook) { return hook.get() == hooks.first; });
          node->del_post_hook(hooks.second);
        }));
  }
}

/// Hooks this accumulator of the parameter. Returns what tells the hooks from others on it.
std::pair<const void*, uintptr_t> Reducer::watch(torch::autograd::Node& accumulator, size_t index) {
  auto before = std::make_unique<PreHook>(weak_from_this(), index);
  const torch::autograd::FunctionPreHook* pre_hook = before.get();
  accumulator.add_pre_hook(std::move(before));
  return {pre_hook, accumulator.add_post_hook(std::make_unique<Hook>(weak_from_this(), index))};
}

std::vector<std::shared_ptr<void>> Reducer::watch_current_accumulators() {
  std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<void>> kept;
  accumulator_index_.clear();
  for (size_t index = 0; index < tensors_.size(); ++index) {
    auto accumulator = torch::autograd::impl::grad_accumulator(tensors_[index]);
    accumulator_index_.emplace(accumulator.get(), index);
    watch(*accumulator, index);
    kept.push_back(std::make_shared<decltype(accumulator)>(std::move(accumulator)));
  }
  return kept;
}

void Reducer::register_comm_hook(CommunicationHook hook, const std::string& name) {
  std::lock_guard lock(mutex_);
  TORCH_CHECK_TYPE(hook, "Communication hook must be callable.");
  TORCH_CHECK(!hook_ || hook_of_old_group_, "register_comm_hook can only be called once; '", hook_name_,
              "' is registered");
  TORCH_CHECK(!round_.open() && rounds_ == rounds_at_reset_,
              "register_comm_hook must be called before the first backward");
  hook_ = std::move(hook);
  hook_of_old_group_ = false;
  hook_name_ = name;
  build_buckets_again();
}

void Reducer::set_static_graph() {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(rounds_ == rounds_at_reset_ && !round_.open(),
              "set_static_graph() must be called before the first backward");
  static_graph_ = true;
}

void Reducer::set_divisor(int64_t ranks) {
  std::lock_guard lock(mutex_);
  divisor_ = ranks;
}

void Reducer::set_on_backward_end(std::function<void()> callback) {
  std::lock_guard lock(mutex_);
  on_backward_end_ = std::move(callback);
}

void Reducer::set_reduce_dtype(at::ScalarType reduce) {
  std::lock_guard lock(mutex_);
  reduce_dtype_ = reduce;
  build_buckets_again();
}

void Reducer::add_post_backward_futures(const std::vector<HookFuture>& futures) {
  std::lock_guard lock(mutex_);
  post_backward_.insert(post_backward_.end(), futures.begin(), futures.end());
}

// ---- Around forward

void Reducer::prepare_forward() {
  std::lock_guard lock(mutex_);
  if (round_.phase() == RoundPhase::kLaunched)
    finish_round();  // its callback was lost to another's exception
  TORCH_CHECK(!round_.open(), unfinished_text());
  clock_.begin_forward();
}

void Reducer::prepare_backward(bool synchronise, const std::vector<at::Tensor>& outputs) {
  std::lock_guard lock(mutex_);
  synchronise_ = synchronise;
  if (!static_graph_) {
    unused_.clear();
    if (synchronise && options_.find_unused_parameters) {
      unused_ = find_unused_parameters(outputs, accumulator_index_);
    }
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
  if (task == graph_task_) return;
  graph_task_ = task;
  slots_->begin(task);
  clock_.begin_backward();
  // Autograd computes a CPU graph, and runs this callback, in the thread that called backward(). Those of
  // other devices it computes in threads of its own, whose memory is not for us to give.
  std::shared_ptr<MemorySource> before;
  if (on_cpu_) before = exchange_memory_source(slots_);
  // Another reducer's belongs to this very backward, or to one that an exception ended.
  if (std::dynamic_pointer_cast<GradientSlots>(before)) before = nullptr;
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this(), before] {
    if (self->on_cpu_) {
      if (auto current = exchange_memory_source(before); current != self->slots_)
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
  had_gradient_[index] = tensors_[index].grad().defined();
}

/// `incoming`: what autograd has added to the gradient, or made it of, and still holds.
void Reducer::on_gradient(size_t index, const at::Tensor& incoming) {
  std::lock_guard lock(mutex_);
  if (!tensors_[index].grad().defined()) {
    if (!synchronise_ || is_first_static_round() || static_graph_) return;
    open_round();
    if (ready_[index]) return;
    silent_.push_back(index);
    mark_ready(index, /*used=*/false);
    return;
  }
  used_[index] = true;
  if (!had_gradient_[index]) note_new_gradient(index);
  if (!synchronise_) {
    if (reduce_dtype_) {
      at::NoGradGuard no_grad;
      tensors_[index].mutable_grad() = tensors_[index].grad().to(own_dtypes_[index]);
    }
    return;
  }
  open_round();
  if (is_first_static_round()) {
    if (++uses_[index] == 1) round_.arrivals().push_back({index, 0});
    return;
  }
  if (static_graph_) {
    TORCH_CHECK(uses_left_[index] > 0,
                "Your training graph has changed in this iteration, e.g., one parameter is unused in first "
                "iteration, but then got used in the second iteration, or is used more often: '",
                parameters_[index].name, "'. this is not compatible with static_graph set to True.");
    if (--uses_left_[index] > 0) return;
  }
  TORCH_CHECK(
      !ready_[index], "Expected to mark a variable ready only once. Parameter at index ", index,
      " with name '", parameters_[index].name,
      "' has been marked as ready twice. This means that it got a second gradient before all others got "
      "their first: it is used in several backward passes of one iteration that each cover only a part of "
      "the model (re-entrant checkpointing, say), or outside of forward(), or was taken for unused. Try "
      "static_graph = true if the graph does not change between iterations");
  mark_ready(index, /*used=*/true, incoming);
}

/// Autograd has made the gradient: nothing of the user's lies in its memory, and its kernel may write the
/// next one into the slot.
void Reducer::note_new_gradient(size_t index) {
  const at::Tensor& gradient = tensors_[index].grad();
  if (gradient.layout() != c10::kStrided) return;
  own_storage_[index] = gradient.storage().getWeakStorageImpl();
  // Nested passes get no slots.
  if (parameters_[index].sparse || reduce_dtype_ ||
      graph_task_ != torch::autograd::get_current_graph_task_id()) {
    return;
  }
  const Place place = places_[index];
  slots_->arrived(index, gradient.const_data_ptr(),
                  lies_in_slot(buckets_[place.bucket], place.position, gradient));
}

void Reducer::open_round() {
  if (round_.open()) return;
  const bool counts = is_first_static_round();
  round_.enter(counts ? RoundPhase::kCounting : RoundPhase::kCollecting);
  if (counts) return;
  for (const size_t index : unused_) mark_ready(index, /*used=*/false);
}

void Reducer::mark_ready(size_t index, bool used, const at::Tensor& incoming) {
  if (used) {
    take_gradient(index, incoming);
    round_.arrivals().push_back({index, std::chrono::duration<double>(clock_.since_backward()).count()});
  } else {
    take_nothing(index);
  }
  ready_[index] = true;  // only now: what is ready moves along when its bucket gets other memory
  Bucket& bucket = buckets_[places_[index].bucket];
  --bucket.pending;
  bucket.streams.note(tensors_[index].device());
  launch_full();
  if (round_.phase() == RoundPhase::kLaunched && !is_first_static_round()) queue_finish();
}

/// Static graph: all gradients of the first round are there, however often each was added to.
void Reducer::queue_everything() {
  round_.enter(RoundPhase::kCollecting);
  unused_.clear();
  for (const auto& arrival : std::exchange(round_.arrivals(), {}))
    mark_ready(arrival.parameter, /*used=*/true);
  for (size_t index = 0; index < parameters_.size(); ++index) {
    if (uses_[index] > 0) continue;
    unused_.push_back(index);
    mark_ready(index, /*used=*/false);
  }
  finish_round();
}

/// Whether the user may see the gradient's memory otherwise than through the parameter: a tensor shows it, or
/// it is not what autograd or the reducer made, but a buffer of the user's.
bool Reducer::known_to_others(size_t index, const at::Tensor& incoming) const {
  const at::Tensor& gradient = tensors_[index].grad();
  return held_by_others(gradient, incoming) ||
         own_storage_[index]._unsafe_get_target() != gradient.storage().unsafeGetStorageImpl();
}

/// Makes a tensor in the parameter's slot its gradient.
void Reducer::give_slot(size_t index) {
  const Place place = places_[index];
  Bucket& bucket = buckets_[place.bucket];
  at::Tensor& gradient = tensors_[index].mutable_grad();
  gradient =
      options_.gradient_as_bucket_view ? bucket.views[place.position] : slot_tensor(bucket, place.position);
  own_storage_[index] = gradient.storage().getWeakStorageImpl();
}

void Reducer::take_gradient(size_t index, const at::Tensor& incoming) {
  const Place place = places_[index];
  Bucket& bucket = buckets_[place.bucket];
  if (bucket.sparse) return take_sparse_gradient(bucket, index);
  at::Tensor& gradient = tensors_[index].mutable_grad();
  TORCH_CHECK(gradient.layout() == c10::kStrided, "the gradient of parameter '", parameters_[index].name,
              "' is sparse, which its module did not tell: only Embedding and EmbeddingBag modules with "
              "sparse(true) may have sparse gradients");
  const at::Tensor& view = bucket.views[place.position];
  const bool in_slot = lies_in_slot(bucket, place.position, gradient);
  clock_.gradient(view.nbytes(), in_slot);
  at::NoGradGuard no_grad;
  if (!in_slot) {
    if (bucket.memory->taken(place.position)) move_to_new_memory(bucket, index);
    const at::Tensor& slot = bucket.views[place.position];
    slot.copy_(gradient);
    // A gradient with a history (create_graph) keeps its identity; one of lower precision its type; one that
    // others may know (a hook has kept it, say) its memory, except as a bucket view, as in PyTorch.
    const bool stays = !options_.gradient_as_bucket_view && known_to_others(index, incoming);
    if (stays || gradient.requires_grad() || gradient.scalar_type() != slot.scalar_type() || reduce_dtype_) {
      bucket.copy_back.push_back(place.position);
      return;
    }
    give_slot(index);
  } else if (options_.gradient_as_bucket_view) {
    gradient = view;
  }
}

void Reducer::take_sparse_gradient(Bucket& bucket, size_t index) {
  const at::Tensor& gradient = tensors_[index].grad();
  TORCH_CHECK(gradient.is_sparse(), "the gradient of parameter '", parameters_[index].name,
              "' is dense, although its module has sparse(true)");
  if (gradient.use_count() > 1) bucket.copy_back.push_back(0);
  bucket.sparse_gradient = gradient;
  clock_.gradient(gradient._values().nbytes(), false);
}

/// An unused parameter adds nothing to the others' sum, but what earlier iterations left.
void Reducer::take_nothing(size_t index) {
  const Place place = places_[index];
  Bucket& bucket = buckets_[place.bucket];
  const at::Tensor& parameter = tensors_[index];
  at::NoGradGuard no_grad;
  if (parameter.grad().defined()) {
    before_[index] = parameter.grad().clone();
    if (!bucket.sparse) take_gradient(index, {});
  } else if (!bucket.sparse) {
    if (bucket.memory->taken(place.position)) move_to_new_memory(bucket, index);
    bucket.views[place.position].zero_();
  }
  if (bucket.sparse) {
    bucket.sparse_gradient = parameter.grad().defined() ? parameter.grad() : empty_sparse_gradient(parameter);
    if (parameter.grad().defined()) bucket.copy_back.push_back(0);
  }
}

bool Reducer::all_unused(const Bucket& bucket) const {
  return std::all_of(bucket.parameters.begin(), bucket.parameters.end(), [&](size_t index) {
    return std::find(unused_.begin(), unused_.end(), index) != unused_.end() ||
           std::find(silent_.begin(), silent_.end(), index) != silent_.end();
  });
}

void Reducer::launch_full() {
  // Strictly in order, so that all ranks reduce the same buckets one after the other.
  while (round_.phase() == RoundPhase::kCollecting && buckets_[round_.next_bucket()].pending == 0) {
    launch(round_.launch_next());
    if (round_.next_bucket() == buckets_.size()) round_.enter(RoundPhase::kLaunched);
  }
}

void Reducer::launch(size_t index) {
  Bucket& bucket = buckets_[index];
  if (options_.skip_all_reduce_unused_params && all_unused(bucket)) return;
  clock_.launch();
  const bool last = index + 1 == buckets_.size();
  const c10::Device device = tensors_[bucket.parameters.front()].device();
  try {
    // The gradient that completed the bucket may be another device's, and come on another stream.
    const c10::OptionalDeviceGuard guard(device);
    bucket.streams.join(device);
    if (hook_) {
      std::vector<at::Tensor> members;
      for (const size_t parameter : bucket.parameters) members.push_back(tensors_[parameter]);
      GradBucket grad_bucket(index, bucket.sparse ? bucket.sparse_gradient : bucket.memory->buffer(),
                             std::move(members), last);
      bucket.future = hook_(grad_bucket);
      TORCH_CHECK(bucket.future, "the communication hook ", hook_name_, " returned no future");
    } else if (bucket.sparse) {
      bucket.sparse_gradient = bucket.sparse_gradient / divisor();
      bucket.work = all_reduce(bucket.sparse_gradient, ReduceOp::SUM, group_, /*async_op=*/true);
    } else {
      c10d::AllreduceOptions options;
      options.reduceOp = divisor_ > 0 || reduce_dtype_ ? c10d::ReduceOp::SUM : c10d::ReduceOp::AVG;
      // The end of backward() follows the last bucket at once and runs it itself, which saves waking a
      // thread. On a device its stream goes on meanwhile.
      options.asyncOp = !last || !device.is_cpu();
      std::vector<at::Tensor> tensors{bucket.memory->buffer()};
      bucket.work = group_->allreduce(tensors, options);
    }
  } catch (...) {
    fail_round(std::current_exception());
  }
}

}  // namespace lockstep
