#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <numeric>
#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <lockstep/base/errors.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/nn/current_backward.h>
#include <lockstep/parallel/fsdp/internal/gradient_reduction.h>

namespace lockstep::fsdp::internal {
namespace {

/// How long to wait for a reduction that other ranks have perhaps not started; once in a backward.
constexpr std::chrono::milliseconds kPatience(100);

struct WhenAccumulated final : torch::autograd::PostAccumulateGradHook {
  explicit WhenAccumulated(std::function<void()> action) : action_(std::move(action)) {}
  void operator()(const torch::autograd::Variable& /*weight*/) override { action_(); }

 private:
  std::function<void()> action_;
};

/// Stands for a gradient that was taken away.
at::Tensor taken_gradient(const at::Tensor& parameter) {
  return at::empty(parameter.sizes(), parameter.options().device(at::kMeta).requires_grad(false));
}

/// Undefined for one that was taken away.
at::Tensor gradient_of(const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  return gradient.defined() && !gradient.is_meta() ? gradient : at::Tensor();
}

}  // namespace

std::atomic<int64_t> GradientReduction::made_ = 0;
std::atomic<int64_t> GradientReduction::attached_ = 0;

/// Of the models that one backward reaches. All wait for other ranks there, so they do it in one order on all ranks.
class GradientReduction::EndsOfBackward {
 public:
  /// Of the backward that this thread runs. Autograd's callbacks have it; a backward that fails drops them.
  static std::shared_ptr<EndsOfBackward> current() {
    static std::mutex mutex;
    static std::unordered_map<int, std::weak_ptr<EndsOfBackward>> by_task;
    const std::lock_guard lock(mutex);
    std::erase_if(by_task, [](const auto& item) { return item.second.expired(); });
    std::weak_ptr<EndsOfBackward>& known = by_task[torch::autograd::get_current_graph_task_id()];
    auto ends = known.lock();
    if (!ends) known = ends = std::make_shared<EndsOfBackward>();
    return ends;
  }

  void add(GradientReduction& reduction) {
    const std::lock_guard lock(mutex_);  // devices have threads of their own
    reductions_.emplace(reduction.number_, reduction.weak_from_this());
  }
  /// Once for each of them, after the last gradient.
  void call() {
    if (++called_ < reductions_.size()) return;
    for (const auto& item : reductions_) {
      if (const auto reduction = item.second.lock()) reduction->end();
    }
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, std::weak_ptr<GradientReduction>> reductions_;
  size_t called_ = 0;
};

GradientReduction::GradientReduction(ShardedWeights& weights, WeightWindows& windows,
                                     std::vector<std::vector<size_t>> groups,
                                     const FullyShardedDataParallelOptions& options)
    : weights_(weights),
      windows_(windows),
      keep_low_precision_(options.mixed_precision.keep_low_precision_grads),
      between_hosts_(options.between_hosts),
      group_of_(weights.all().size(), groups.size()),
      schedule_({}, 0),
      used_(weights.all().size()) {
  const int ranks = weights.group()->getSize();
  std::vector<size_t> parts;
  int64_t most_bytes = 0;
  for (auto& members : groups) {
    std::vector<RowShape> shapes;
    for (const size_t weight : members) {
      group_of_[weight] = groups_.size();
      shapes.push_back(weights.all()[weight].shape);
    }
    const at::ScalarType dtype = weights.all()[members.front()].dtypes.reduced;
    const auto element_size = static_cast<int64_t>(at::elementSize(dtype));
    PieceLayout layout(std::move(shapes), ranks,
                       most_part_numel(options.gradient_buffer_cap_mb, ranks, element_size));
    most_bytes = std::max(most_bytes, layout.buffer_numel() * element_size);
    parts.push_back(layout.parts());
    groups_.push_back({.weights = std::move(members), .layout = std::move(layout), .dtype = dtype});
  }
  const size_t reductions = std::accumulate(parts.begin(), parts.end(), size_t{0});
  const size_t slots = std::min(reductions, static_cast<size_t>(options.gradient_buffers));
  for (size_t slot = 0; slot < slots; ++slot) {
    ring_.push_back(
        {.buffer = weights.device().is_cpu()
                       ? empty_shared({most_bytes}, at::kByte, weights.group()).zero_()
                       : at::zeros({most_bytes}, at::TensorOptions(at::kByte).device(weights.device()))});
  }
  schedule_ = ReductionSchedule(std::move(parts), slots);
  streams_.note(weights.device());
}

GradientReduction::~GradientReduction() {
  if (!hooks_.empty()) --attached_;
  for (auto& [parameter, hook] : hooks_) {
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, nullptr);
    parameter.remove_hook(hook);
    parameter.mutable_grad() = gradient_of(parameter);
  }
}

void GradientReduction::attach() {
  for (const Group& group : groups_) {
    for (const size_t weight : group.weights) {
      const at::Tensor& parameter = weights_.all()[weight].parameter;
      const unsigned hook =
          parameter.register_hook([self = weak_from_this(), weight](const at::Tensor& /*gradient*/) {
            if (const auto reduction = self.lock()) reduction->before_gradient(weight);
          });
      hooks_.emplace_back(parameter, hook);
      torch::autograd::impl::set_post_acc_grad_hooks(
          parameter, std::make_unique<WhenAccumulated>([self = weak_from_this(), weight] {
            if (const auto reduction = self.lock()) reduction->on_gradient(weight);
          }));
    }
  }
  if (!hooks_.empty()) ++attached_;
}

void GradientReduction::check_ended() const {
  const std::thread::id thread = backward_.load();
  const bool concerns_this_thread = !weights_.device().is_cpu() || thread == std::this_thread::get_id();
  // Within a backward forward is computed again (activation checkpoints).
  const bool did_not_end = thread != std::thread::id() && concerns_this_thread && !is_in_backward();
  TORCH_CHECK(!did_not_end,
              "FullyShardedDataParallel: the last backward did not end, for it or a reduction has failed; "
              "what was averaged of its gradients is lost, and the ranks may be at different places: make "
              "the model anew, from a "
              "checkpoint");
}

void GradientReduction::drop_sum(size_t weight) {
  at::Tensor& gradient = weights_.all()[weight].parameter.mutable_grad();
  if (gradient.defined() && !gradient.is_meta()) gradient = at::Tensor();
}

/// Autograd would add to what stands for the last one.
void GradientReduction::before_gradient(size_t weight) {
  const at::Tensor& parameter = weights_.all()[weight].parameter;
  parameter.mutable_grad() = gradient_of(parameter);
}

void GradientReduction::on_gradient(size_t weight) {
  const at::Tensor& gradient = weights_.all()[weight].parameter.grad();
  TORCH_CHECK_NOT_IMPLEMENTED(
      gradient.layout() == c10::kStrided, "FullyShardedDataParallel: the gradient of parameter '",
      weights_.all()[weight].name,
      "' is sparse; only dense ones can be sharded, so make an Embedding without sparse");
  streams_.note(weights_.device());
  if (backward_.load() == std::thread::id() && synchronising_) begin();
  enter_backward_phase(/*from_any_thread=*/!weights_.device().is_cpu());  // under no_sync(), too
  if (backward_.load() == std::thread::id()) return;
  Group& group = groups_[group_of_[weight]];
  TORCH_CHECK(!used_[weight], "FullyShardedDataParallel: parameter '", weights_.all()[weight].name,
              "' got a gradient twice in one backward, as by a backward within backward; use "
              "activation_checkpoint(), which has "
              "none");
  used_[weight] = true;
  if (--group.missing == 0) {
    schedule_.arrived(group_of_[weight]);
    if (when_complete_) when_complete_(weight);
    weights_.groups().spread_failures([this] { start_what_can_start(); });
  }
}

void GradientReduction::begin() {
  reading_.emplace(windows_);
  backward_ = std::this_thread::get_id();
  std::fill(used_.begin(), used_.end(), false);
  for (Group& group : groups_) group.missing = group.weights.size();
  gave_up_ = false;
  schedule_.begin();
  const auto ends = EndsOfBackward::current();
  ends->add(*this);
  torch::autograd::Engine::get_default_engine().queue_callback([ends] { ends->call(); });
  // The others wait for the reductions that this rank does not come to then.
  on_failed_backward([self = weak_from_this()](const std::string& text) {
    if (const auto reduction = self.lock()) {
      reduction->weights_.groups().fail("failed in backward: " + text);
    }
  });
}

void GradientReduction::start_what_can_start() {
  for (;;) {
    while (const auto next = schedule_.next()) start(*next);
    // Gradients that wait for a buffer take more memory than the buffers.
    const auto oldest = schedule_.oldest();
    if (!oldest || !schedule_.waits_for_a_slot()) return;
    if (!comes_to_an_end(*oldest)) return;
    finish(*oldest);
  }
}

/// Or come to it without this rank.
bool GradientReduction::all_have_started_oldest() const {
  if (!progress_.all) return attached_ == 1;
  return progress_.own - static_cast<int64_t>(ring_.size()) < *progress_.all;
}

/// False if this rank must not wait any longer for the oldest reduction: a rank that lacks gradients may start it after operations
/// that need this rank, which are gathers, or reductions of another model. Most often all ranks start it soon. Without waiting,
/// the gradients of the whole model would be in memory where backward gathers nothing (SHARD_GRAD_OP), and those of most parts
/// where groups are larger than the ring.
bool GradientReduction::comes_to_an_end(size_t oldest) {
  if (all_have_started_oldest()) return true;
  const Slot& slot = ring_[oldest];
  const Work& work = slot.started_everywhere ? slot.started_everywhere : slot.work;
  if (gave_up_ || work->isCompleted()) return work->isCompleted();
  try {
    work->wait(kPatience);
  } catch (const DistTimeoutError&) {
    gave_up_ = !work->isCompleted();  // else finish() throws its error
  }
  return !gave_up_;
}

/// Takes the gradients of the group's weights from where autograd has put them.
void GradientReduction::take_gradients(Group& group) {
  for (const size_t weight : group.weights) {
    const at::Tensor& parameter = weights_.all()[weight].parameter;
    const at::Tensor gradient = gradient_of(parameter);
    use_on_current_stream(gradient);
    group.gradients.push_back(gradient.defined() ? gradient.contiguous().view({-1}) : at::Tensor());
    // Also one that has added up under no_sync(), and is none of this backward's.
    if (gradient.defined()) used_[weight] = true;
    parameter.mutable_grad() = taken_gradient(parameter);
  }
  group.averages =
      at::empty({group.layout.piece_numel()}, at::TensorOptions(group.dtype).device(weights_.device()));
}

void GradientReduction::start(const ReductionSchedule::Start& next) {
  const at::NoGradGuard no_grad;
  streams_.join(weights_.device());
  streams_.note(weights_.device());
  Group& group = groups_[next.group];
  if (next.part == 0) take_gradients(group);
  for (const at::Tensor& gradient : group.gradients) use_on_current_stream(gradient);
  use_on_current_stream(group.averages);
  Slot& slot = ring_[next.slot];
  const int ranks = weights_.group()->getSize();
  const int64_t part_numel = group.layout.part_numel(next.part);
  const int64_t bytes = ranks * part_numel * static_cast<int64_t>(at::elementSize(group.dtype));
  at::Tensor buffer = slot.buffer.narrow(0, 0, bytes).view(group.dtype);
  for (size_t i = 0; i < group.weights.size(); ++i) {
    for (int rank = 0; rank < ranks; ++rank) {
      const auto run = group.layout.run(i, rank, next.part);
      if (run.numel == 0) continue;
      at::Tensor place = buffer.narrow(0, run.place, run.numel);
      if (group.gradients[i].defined()) {
        place.copy_(group.gradients[i].narrow(0, run.source, run.numel));
      } else {
        place.zero_();
      }
    }
  }
  slot.is_last_part = next.part + 1 == group.layout.parts();
  if (slot.is_last_part) group.gradients.clear();
  slot.group = next.group;
  at::Tensor averages = group.averages.narrow(0, group.layout.part_begin(next.part), part_numel);
  ++progress_.own;
  slot.work = reduce_scatter_tensor(averages, buffer, ReduceOp::AVG, weights_.group(), /*async_op=*/true);
  if (!weights_.device().is_cpu()) {
    slot.started_everywhere =
        all_reduce(at::zeros({1}, at::kByte), ReduceOp::MAX, weights_.group(), /*async_op=*/true);
  }
}

void GradientReduction::finish(size_t slot) {
  const at::NoGradGuard no_grad;
  if (const Work started = std::exchange(ring_[slot].started_everywhere, {})) started->wait();
  std::exchange(ring_[slot].work, {})->wait();
  streams_.note(weights_.device());
  schedule_.finished(slot);
  const ProcessGroup& replicas = weights_.groups().replicas();
  if (!replicas || !ring_[slot].is_last_part) return;
  Group& group = groups_[ring_[slot].group];
  // What follows this rank's rows in the buffer is old, and would be rounded together with them.
  const int rank = weights_.group()->getRank();
  for (size_t i = 0; i < group.weights.size(); ++i) {
    const int64_t begin = group.layout.offset(i) + group.layout.numel(i, rank);
    const bool last = i + 1 == group.weights.size();
    const int64_t end = last ? group.layout.piece_numel() : group.layout.offset(i + 1);
    group.averages.narrow(0, begin, end - begin).zero_();
  }
  const BetweenHosts scope(between_hosts_, group.feedback);
  group.between_hosts = all_reduce(group.averages, ReduceOp::AVG, replicas, /*async_op=*/true);
}

void GradientReduction::reduce_the_rest() {
  schedule_.end();
  start_what_can_start();
  while (const auto oldest = schedule_.oldest()) {
    finish(*oldest);
    start_what_can_start();
  }
  for (Group& group : groups_) {
    if (const Work work = std::exchange(group.between_hosts, {})) work->wait();
  }
  agree_on_used();
  if (!order_is_known_) agree_on_order();
}

void GradientReduction::end() {
  weights_.groups().spread_failures([this] { reduce_the_rest(); });
  give_to_shards();
  backward_ = std::thread::id();
  ++reduced_;
  reading_.reset();
  if (when_reduced_) when_reduced_();
}

/// A weight has a gradient if any rank has one for it.
void GradientReduction::agree_on_used() {
  std::vector<at::Tensor> tensors{at::empty({static_cast<int64_t>(used_.size())}, at::kByte)};
  auto* const flags = tensors[0].mutable_data_ptr<uint8_t>();
  std::copy(used_.begin(), used_.end(), flags);
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  options.asyncOp = false;
  const CallSite site("FSDP's unused parameters");
  weights_.groups().all()->allreduce(tensors, options)->wait();
  for (size_t i = 0; i < used_.size(); ++i) used_[i] = flags[i] != 0;
}

/// The order in which rank 0's gradients came holds for all, from now on.
void GradientReduction::agree_on_order() {
  const auto own = schedule_.order_of_arrival();
  std::vector<at::Tensor> tensors{at::empty({static_cast<int64_t>(own.size())}, at::kLong)};
  auto* const groups = tensors[0].mutable_data_ptr<int64_t>();
  std::copy(own.begin(), own.end(), groups);
  const CallSite site("FSDP's order of reductions");
  weights_.groups().all()->broadcast(tensors)->wait();
  schedule_.set_order(std::vector<size_t>(groups, groups + own.size()));
  order_is_known_ = true;
}

void GradientReduction::give_to_shards() {
  const at::NoGradGuard no_grad;
  const int rank = weights_.group()->getRank();
  streams_.join(weights_.device());
  for (Group& group : groups_) {
    use_on_current_stream(group.averages);
    for (size_t i = 0; i < group.weights.size(); ++i) {
      if (!used_[group.weights[i]]) continue;
      at::Tensor shard = weights_.all()[group.weights[i]].shard;
      at::Tensor average =
          group.averages.narrow(0, group.layout.offset(i), group.layout.numel(i, rank)).view(shard.sizes());
      average = average.to(shard.device());
      if (!keep_low_precision_) average = average.to(shard.scalar_type());
      average = average.detach();  // an optimizer's zero_grad() takes no views
      if (shard.grad().defined()) {
        shard.mutable_grad().add_(average);
      } else {
        shard.mutable_grad() = average;
      }
    }
    group.averages = at::Tensor();
  }
}

}  // namespace lockstep::fsdp::internal
