#include <algorithm>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>

#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/parallel/ddp/delayed_all_reduce.h>
#include <lockstep/parallel/ddp/reducer/bucket_memory.h>
#include <lockstep/parallel/ddp/state_sync.h>

namespace lockstep {

std::shared_ptr<DelayedAllReduce> DelayedAllReduce::create(const std::vector<NamedTensor>& parameters,
                                                           const at::Tensor& trigger,
                                                           const ProcessGroup& group,
                                                           std::optional<HostCompression> between_hosts) {
  std::shared_ptr<DelayedAllReduce> self(new DelayedAllReduce(parameters, group, between_hosts));
  broadcast_coalesced(parameters, group);
  trigger.register_hook([weak = std::weak_ptr(self)](const at::Tensor&) {
    if (auto locked = weak.lock()) locked->start();
  });
  return self;
}

DelayedAllReduce::DelayedAllReduce(const std::vector<NamedTensor>& parameters, const ProcessGroup& group,
                                   std::optional<HostCompression> between_hosts)
    : group_(group), between_hosts_(between_hosts) {
  int64_t numel = 0;
  for (const auto& [name, parameter] : parameters) {
    TORCH_CHECK_VALUE(parameter.scalar_type() == parameters.front().second.scalar_type(), "parameter '", name,
                      "' of delay_all_reduce_named_params is ", parameter.scalar_type(), ", others are ",
                      parameters.front().second.scalar_type(), "; they must have one dtype");
    parameters_.push_back(parameter);
    numel += parameter.numel();
  }
  buffer_ = shared_zeros(group_, numel, parameters_.front().options().requires_grad(false));
  at::AutoDispatchBelowADInplaceOrView no_view_tracking;  // see bucket.cc
  int64_t offset = 0;
  for (const at::Tensor& parameter : parameters_) {
    views_.push_back(buffer_.narrow(0, offset, parameter.numel()).view(parameter.sizes()));
    offset += parameter.numel();
  }
}

void DelayedAllReduce::after_forward() {
  const bool none = std::none_of(parameters_.begin(), parameters_.end(),
                                 [](const at::Tensor& parameter) { return parameter.grad().defined(); });
  at::NoGradGuard no_grad;
  if (none) buffer_.zero_();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& gradient = parameters_[i].mutable_grad();
    if (gradient.defined()) continue;
    gradient = views_[i];
    if (!none) gradient.zero_();
  }
}

void DelayedAllReduce::abandon() {
  const auto work = std::exchange(work_, {});
  if (!work) return;
  try {
    work->wait();
  } catch (...) {  // the caller knows the cause already
  }
}

void DelayedAllReduce::update_process_group(const ProcessGroup& group) {
  abandon();
  group_ = group;
  feedback_ = std::make_shared<ErrorFeedback>();
}

void DelayedAllReduce::start() {
  // Memory of the user's, or a tensor that autograd has made in the place of the view (create_graph): it gets the
  // averages, too.
  std::vector<size_t> elsewhere;
  {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor& gradient = parameters_[i].grad();
      if (!gradient.defined() || gradient.const_data_ptr() == views_[i].const_data_ptr()) continue;
      views_[i].copy_(gradient);
      elsewhere.push_back(i);
    }
  }
  std::vector<at::Tensor> tensors{buffer_};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::AVG;
  const BetweenHosts between_hosts(between_hosts_, feedback_);
  const CallSite site("DDP's delayed parameters");
  work_ = group_->allreduce(tensors, options);
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this(), elsewhere] {
    auto work = std::exchange(self->work_, {});
    if (!work) return;
    work->wait();
    const at::NoGradGuard no_grad;
    for (const size_t i : elsewhere) self->parameters_[i].mutable_grad().detach().copy_(self->views_[i]);
  });
}

}  // namespace lockstep
