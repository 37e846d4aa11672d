#include <algorithm>
#include <numeric>
#include <sstream>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/ddp/bucket_assignment.h>
#include <lockstep/ddp/reducer.h>

namespace lockstep {
namespace {

constexpr double kMiB = 1 << 20;

/// The gradient's place has the parameter's own memory order where that has no gaps, else it is contiguous.
/// It shares the bucket's storage but is no view in autograd's books: LibTorch's Optimizer::zero_grad() calls
/// detach_() on gradients, which views refuse.
at::Tensor view_of(const at::Tensor& buffer, int64_t offset, const at::Tensor& parameter) {
  at::AutoDispatchBelowADInplaceOrView no_view_tracking;
  if (parameter.is_non_overlapping_and_dense()) {
    return buffer.as_strided(parameter.sizes(), parameter.strides(), offset);
  }
  return buffer.narrow(0, offset, parameter.numel()).view(parameter.sizes());
}

at::Tensor allocate_bucket(const ProcessGroup& group, int64_t numel, const at::TensorOptions& options) {
  auto backend = group->getBackend(options.device().type());
  if (!backend->supportsTensorAlloc(options.device().index())) return at::empty({numel}, options).zero_();
  // Zeroing touches the pages now instead of in the first step.
  return backend->allocateTensor(numel, options).zero_();
}

}  // namespace

/// Called by autograd after a parameter's gradient was accumulated.
struct Reducer::Hook : torch::autograd::FunctionPostHook {
  Hook(std::weak_ptr<Reducer> reducer, size_t index) : reducer_(std::move(reducer)), index_(index) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    if (auto reducer = reducer_.lock()) reducer->on_gradient(index_);
    return outputs;
  }

 private:
  std::weak_ptr<Reducer> reducer_;
  size_t index_;
};

std::shared_ptr<Reducer> Reducer::create(std::vector<NamedTensor> parameters,
                                         const DistributedDataParallelOptions& options) {
  std::shared_ptr<Reducer> reducer(new Reducer(std::move(parameters), options));
  reducer->add_hooks();
  return reducer;
}

Reducer::Reducer(std::vector<NamedTensor> parameters, const DistributedDataParallelOptions& options)
    : parameters_(std::move(parameters)),
      options_(options),
      group_(options.process_group),
      divisor_(group_->getSize()),
      has_gradient_(parameters_.size(), false) {
  std::vector<size_t> order(parameters_.size());
  std::iota(order.rbegin(), order.rend(), 0);  // gradients come in about the reverse order of definition
  build_buckets(order);
}

Reducer::~Reducer() = default;

void Reducer::add_hooks() {
  for (size_t index = 0; index < parameters_.size(); ++index) {
    // An intrusive_ptr since torch 2.13, a shared_ptr before: the type is deduced.
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[index].second);
    TORCH_INTERNAL_ASSERT(accumulator);
    auto* node = accumulator.get();
    auto key = node->add_post_hook(std::make_unique<Hook>(weak_from_this(), index));
    // A hook lives as long as its node, so the node is held; both go with the reducer.
    accumulators_.push_back(std::make_shared<decltype(accumulator)>(std::move(accumulator)));
    hook_removers_.push_back(std::shared_ptr<void>(
        nullptr, [node, key, keep = accumulators_.back()](void*) { node->del_post_hook(key); }));
  }
}

void Reducer::build_buckets(const std::vector<size_t>& order) {
  std::vector<ParameterSize> sizes;
  for (const auto& [name, parameter] : parameters_) {
    sizes.push_back({parameter.nbytes(), static_cast<int>(parameter.scalar_type())});
  }
  auto assignment = assign_buckets(sizes, order, static_cast<size_t>(options_.first_bucket_cap_mb * kMiB),
                                   static_cast<size_t>(options_.bucket_cap_mb * kMiB));
  std::vector<Bucket> buckets;
  places_.resize(parameters_.size());
  at::NoGradGuard no_grad;
  for (auto& members : assignment) {
    Bucket bucket;
    int64_t numel = 0;
    for (size_t index : members) numel += parameters_[index].second.numel();
    bucket.buffer =
        allocate_bucket(group_, numel, parameters_[members.front()].second.options().requires_grad(false));
    int64_t offset = 0;
    for (size_t index : members) {
      at::Tensor parameter = parameters_[index].second;
      at::Tensor view = view_of(bucket.buffer, offset, parameter);
      // Gradients that lie in the old buckets (not zeroed, accumulated under no_sync) move along.
      if (!buckets_.empty() && parameter.grad().defined()) {
        const Place old = places_[index];
        if (parameter.grad().data_ptr() == buckets_[old.bucket].views[old.position].data_ptr()) {
          view.copy_(parameter.grad());
          parameter.mutable_grad() = view;
        }
      }
      offset += parameter.numel();
      bucket.views.push_back(std::move(view));
    }
    bucket.parameters = std::move(members);
    buckets.push_back(std::move(bucket));
  }
  buckets_ = std::move(buckets);
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    for (size_t position = 0; position < buckets_[bucket].parameters.size(); ++position) {
      places_[buckets_[bucket].parameters[position]] = {bucket, position};
    }
  }
  begin_round();
}

void Reducer::rebuild_buckets() {
  rebuilt_ = true;
  at::Tensor order = at::empty({static_cast<int64_t>(parameters_.size())}, at::kLong);
  std::copy(arrival_order_.begin(), arrival_order_.end(), order.mutable_data_ptr<int64_t>());
  std::vector<at::Tensor> tensors{order};
  group_->broadcast(tensors)->wait();
  const auto* indices = order.const_data_ptr<int64_t>();
  std::vector<size_t> agreed(indices, indices + order.numel());
  std::vector<size_t> current;
  for (const Bucket& bucket : buckets_) {
    current.insert(current.end(), bucket.parameters.begin(), bucket.parameters.end());
  }
  if (agreed != current) build_buckets(agreed);
}

void Reducer::prepare_forward() {
  std::unique_lock lock(mutex_);
  if (round_open_ && next_bucket_ == buckets_.size())
    finish_round();  // its callback was lost to another's exception
  TORCH_CHECK(
      !round_open_,
      "Expected to have finished reduction in the prior iteration before starting a new one. These "
      "parameters "
      "received no gradient: ",
      names_without_gradient(),
      ". They were not used in producing the loss, or backward() ended with an exception. Every parameter "
      "must take "
      "part in every iteration (an option for unused parameters is not there yet); wrap iterations that are "
      "not to be reduced in no_sync()");
  if (!rebuilt_ && arrival_order_.size() == parameters_.size()) rebuild_buckets();
}

void Reducer::expect_backward(bool synchronise) {
  std::lock_guard lock(mutex_);
  synchronise_ = synchronise;
}

void Reducer::begin_round() {
  std::fill(has_gradient_.begin(), has_gradient_.end(), false);
  for (Bucket& bucket : buckets_) {
    bucket.pending = bucket.parameters.size();
    bucket.work.reset();
  }
  next_bucket_ = 0;
  round_open_ = false;
}

void Reducer::on_gradient(size_t index) {
  std::lock_guard lock(mutex_);
  if (!synchronise_) return;
  TORCH_CHECK(!has_gradient_[index], "Expected to mark a variable ready only once. Parameter '",
              parameters_[index].first,
              "' got a second gradient before the others got their first. It is used in several backward "
              "passes of one "
              "iteration that each cover only a part of the model, or in re-entrant checkpointing");
  round_open_ = true;
  has_gradient_[index] = true;
  if (!rebuilt_ && arrival_order_.size() < parameters_.size()) arrival_order_.push_back(index);
  take_gradient(index);
  --buckets_[places_[index].bucket].pending;
  // Strictly in order, so that all ranks reduce the same buckets one after the other.
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].pending == 0)
    launch(buckets_[next_bucket_++]);
  if (next_bucket_ == buckets_.size()) {
    torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] {
      std::lock_guard callback_lock(self->mutex_);
      self->finish_round();
    });
  }
}

void Reducer::take_gradient(size_t index) {
  const auto& [name, parameter] = parameters_[index];
  const Place place = places_[index];
  const at::Tensor& view = buckets_[place.bucket].views[place.position];
  at::Tensor& gradient = at::Tensor(parameter).mutable_grad();
  TORCH_CHECK(gradient.layout() == c10::kStrided, "the gradient of parameter '", name,
              "' is sparse; sparse gradients are not supported yet: build the embedding with sparse(false)");
  at::NoGradGuard no_grad;
  const at::Scalar factor(1.0 / divisor_);
  if (gradient.data_ptr() == view.data_ptr()) {
    // Accumulated in place, on top of what the last round or no_sync() left there.
    if (divisor_ != 1) gradient.mul_(factor);
    return;
  }
  // One pass: the copy into the bucket and the division.
  at::Tensor destination = view;
  if (divisor_ != 1) {
    at::mul_out(destination, gradient, at::Tensor(at::empty({}, gradient.options()).fill_(factor)));
  } else {
    destination.copy_(gradient);
  }
  gradient = view;
}

void Reducer::launch(Bucket& bucket) {
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::SUM;
  // The end of backward() follows the last bucket at once and runs it itself, which saves waking a thread.
  options.asyncOp = &bucket != &buckets_.back();
  std::vector<at::Tensor> tensors{bucket.buffer};
  bucket.work = group_->allreduce(tensors, options);
}

void Reducer::finish_round() {
  std::exception_ptr error;
  for (Bucket& bucket : buckets_) {
    try {
      bucket.work->wait();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  begin_round();
  if (error) std::rethrow_exception(error);
}

std::string Reducer::names_without_gradient() const {
  std::ostringstream names;
  size_t missing = 0;
  constexpr size_t kShown = 20;
  for (size_t index = 0; index < parameters_.size(); ++index) {
    if (has_gradient_[index]) continue;
    if (++missing <= kShown) names << (missing > 1 ? ", " : "") << parameters_[index].first;
  }
  if (missing > kShown) names << " and " << missing - kShown << " more";
  return names.str();
}

std::vector<size_t> Reducer::bucket_bytes() const {
  std::lock_guard lock(mutex_);
  std::vector<size_t> bytes;
  for (const Bucket& bucket : buckets_) bytes.push_back(bucket.buffer.nbytes());
  return bytes;
}

}  // namespace lockstep
