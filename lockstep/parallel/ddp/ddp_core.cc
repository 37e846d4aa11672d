#include <algorithm>
#include <unordered_set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <lockstep/base/training/step_mark.h>
#include <lockstep/base/training/training_phases.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/device/streams.h>
#include <lockstep/nn/current_backward.h>
#include <lockstep/parallel/ddp/ddp_core.h>
#include <lockstep/parallel/ddp/delayed_all_reduce.h>
#include <lockstep/parallel/ddp/hooks/default_hooks.h>
#include <lockstep/parallel/ddp/mixed_precision.h>
#include <lockstep/parallel/ddp/reducer/reducer.h>
#include <lockstep/parallel/ddp/state_sync.h>

namespace lockstep {
namespace {

/// The parameters that are to be reduced: each once, though it may be registered under several names.
std::vector<Reducer::Parameter> reduced_parameters(const std::vector<NamedTensor>& parameters,
                                                   const std::vector<std::string>& sparse) {
  std::vector<Reducer::Parameter> reduced;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& [name, parameter] : parameters) {
    if (!parameter.requires_grad() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    reduced.push_back({name, parameter, std::find(sparse.begin(), sparse.end(), name) != sparse.end()});
  }
  return reduced;
}

void check_positive(const char* name, double mib) {
  TORCH_CHECK_VALUE(mib > 0, name, " is ", mib, "; it must be more than 0");
}

void check_options(const DistributedDataParallelOptions& options) {
  if (options.bucket_cap_mb) check_positive("bucket_cap_mb", *options.bucket_cap_mb);
  if (options.first_bucket_cap_mb) check_positive("first_bucket_cap_mb", *options.first_bucket_cap_mb);
  for (const double mib : options.bucket_cap_mb_list) check_positive("an element of bucket_cap_mb_list", mib);
  TORCH_CHECK_VALUE(options.bucket_cap_mb_list.empty() || !options.bucket_cap_mb,
                    "bucket_cap_mb and bucket_cap_mb_list can't both be given");
  TORCH_CHECK_VALUE(
      options.delay_all_reduce_named_params.empty() == !options.param_to_hook_all_reduce.defined(),
      "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.");
  TORCH_CHECK_VALUE(options.device_ids.size() <= 1,
                    "device_ids can only be None or contain a single element; it has ",
                    options.device_ids.size());
  if (options.between_hosts) checked_compression(*options.between_hosts, "between_hosts");
  if (options.mixed_precision) {
    for (const auto& dtype : {options.mixed_precision->param_dtype, options.mixed_precision->reduce_dtype,
                              options.mixed_precision->buffer_dtype}) {
      TORCH_CHECK_VALUE(!dtype || c10::isFloatingType(*dtype), "mixed_precision: ", *dtype,
                        " is no floating-point type");
    }
  }
}

std::string names_of(const std::vector<NamedTensor>& tensors) {
  std::string names;
  for (const auto& [name, tensor] : tensors) names += (names.empty() ? "" : ", ") + name;
  return names.empty() ? "none" : names;
}

std::vector<NamedTensor> without_undefined(std::vector<NamedTensor> tensors) {
  std::erase_if(tensors, [](const NamedTensor& tensor) { return !tensor.second.defined(); });
  return tensors;
}

}  // namespace

DdpCore::DdpCore(Model model, DistributedDataParallelOptions options, const Joinable& owner)
    : model_(std::move(model)),
      options_(std::move(options)),
      owner_(owner),
      snapshot_(std::make_shared<StepSnapshot>()) {  // another one once the devices are known
  check_options(options_);
  if (!options_.process_group) options_.process_group = default_group();
  TORCH_CHECK_VALUE(is_member(options_.process_group),
                    "DistributedDataParallel: this rank is not in the process group");
  forward_sync_buffers_ = options_.forward_sync_buffers.value_or(options_.broadcast_buffers.value_or(true));
  init_sync_buffers_ = options_.forward_sync_buffers || options_.broadcast_buffers.value_or(true);
  if (options_.broadcast_buffers) {
    TORCH_WARN_ONCE(
        "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead; unlike "
        "`broadcast_buffers = false`, `forward_sync_buffers = false` still syncs buffers at init.");
  }
  model_.parameters = without_undefined(std::move(model_.parameters));
  const auto all = model_.parameters;
  for (const auto& [name, parameter] : all) {
    all_parameters_.push_back(parameter);
    if (!ignored(name)) averaged_.push_back(parameter);
  }
  for (const auto& [name, parameter] : options_.delay_all_reduce_named_params) {
    options_.parameters_to_ignore.push_back(name);
  }
  std::erase_if(model_.parameters, [this](const NamedTensor& parameter) { return ignored(parameter.first); });
  check_parameters();
  choose_devices(all);
  if (!options_.delay_all_reduce_named_params.empty()) {
    delayed_ =
        DelayedAllReduce::create(options_.delay_all_reduce_named_params, options_.param_to_hook_all_reduce,
                                 options_.process_group, options_.between_hosts);
  }
  const auto reduced = reduced_parameters(model_.parameters, model_.sparse);
  if (reduced.empty()) return;  // all are delayed
  if (options_.init_sync) sync_initial_state();
  reducer_ = Reducer::create(reduced, options_, [snapshot = snapshot_] { snapshot->restore(); });
  if (options_.mixed_precision) {
    mixed_precision_ = std::make_unique<MixedPrecisionParameters>(
        *options_.mixed_precision, model_.parameters, current_buffers(), reducer_);
  }
}

DdpCore::~DdpCore() = default;

bool DdpCore::ignored(const std::string& name) const {
  const auto& names = options_.parameters_to_ignore;
  return std::find(names.begin(), names.end(), name) != names.end();
}

void DdpCore::check_parameters() {
  const bool any = std::any_of(model_.parameters.begin(), model_.parameters.end(),
                               [](const NamedTensor& parameter) { return parameter.second.requires_grad(); });
  TORCH_CHECK(any || !options_.delay_all_reduce_named_params.empty(),
              "DistributedDataParallel is not needed when a module doesn't have any parameter that requires "
              "a gradient.");
  for (const auto& [name, parameter] : model_.parameters) {
    TORCH_CHECK_VALUE(parameter.layout() == c10::kStrided, "parameter '", name,
                      "' is sparse; sparse parameters can't be synchronised");
  }
}

/// Where the module is, and device_ids' rules. torch/nn/parallel/distributed.py,
/// DistributedDataParallel.__init__.
void DdpCore::choose_devices(const std::vector<NamedTensor>& parameters) {
  std::vector<at::Device> devices;
  for (const auto& [name, parameter] : parameters) {
    const bool delayed = std::any_of(options_.delay_all_reduce_named_params.begin(),
                                     options_.delay_all_reduce_named_params.end(),
                                     [&](const NamedTensor& each) { return each.first == name; });
    if (ignored(name) && !delayed) continue;
    if (std::find(devices.begin(), devices.end(), parameter.device()) == devices.end()) {
      devices.push_back(parameter.device());
    }
  }
  TORCH_CHECK_VALUE(
      !devices.empty(),
      "DistributedDataParallel: parameters_to_ignore leaves nothing of the module, which has no "
      "parameter by a name in delay_all_reduce_named_params (",
      names_of(options_.delay_all_reduce_named_params),
      "); give names as in its named_parameters(): ", names_of(parameters));
  device_ = devices.front();
  for (const at::Device& device : devices) {
    TORCH_CHECK_VALUE(device.type() == device_.type(),
                      "DistributedDataParallel's input module must be on the same type of devices, but input "
                      "module parameters locate in ",
                      at::ArrayRef<at::Device>(devices), ".");
  }
  is_multi_device_module_ = devices.size() > 1;
  if (!device_.is_cpu()) snapshot_ = std::make_shared<StepSnapshot>(devices);
  const auto& ids = options_.device_ids;
  if (device_.is_cpu() || devices.size() > 1 || ids.empty()) {
    TORCH_CHECK_VALUE(ids.empty() && !options_.output_device,
                      "DistributedDataParallel device_ids and output_device arguments only work with "
                      "single-device/multiple-device GPU modules or CPU modules, but got device_ids ",
                      ids.empty() ? std::string("none") : ids[0].str(), ", output_device ",
                      options_.output_device ? options_.output_device->str() : "none",
                      ", and module parameters ", at::ArrayRef<at::Device>(devices), ": leave both empty",
                      ids.empty() ? ", or give device_ids, too" : "");
    return;
  }
  const auto with_index = [](const at::Device& device) {
    return device.has_index() ? device : c10::impl::VirtualGuardImpl(device.type()).getDevice();
  };
  input_device_ = with_index(ids[0]);
  TORCH_CHECK_VALUE(*input_device_ == device_, "DistributedDataParallel: device_ids names ", *input_device_,
                    ", but the module is on ", device_, "; move it there first (module->to(device))");
  const at::Device output = with_index(options_.output_device.value_or(*input_device_));
  TORCH_CHECK_VALUE(output == *input_device_, "DistributedDataParallel: output_device is ", output,
                    ", but outputs are where the module computes them, on ", *input_device_,
                    "; leave it out, and move the output yourself");
}

void DdpCore::sync_initial_state() {
  std::vector<NamedTensor> reduced;
  for (const auto& parameter : model_.parameters) {
    if (parameter.second.requires_grad()) reduced.push_back(parameter);
  }
  verify_same_model(reduced, options_.process_group);
  auto state = model_.parameters;
  if (init_sync_buffers_) {
    for (auto& buffer : current_buffers()) state.push_back(std::move(buffer));
  }
  broadcast_coalesced(state, options_.process_group);
}

std::vector<NamedTensor> DdpCore::current_buffers() const {
  auto buffers = without_undefined(model_.buffers());
  std::erase_if(buffers, [this](const NamedTensor& buffer) { return ignored(buffer.first); });
  return buffers;
}

// ---- Around forward

void DdpCore::enter() {
  if (!reducer_) return;
  if (at::GradMode::is_enabled()) {
    if (std::exchange(marked_round_, reducer_->rounds()) != reducer_->rounds()) {
      mark_step(StepMark::kForward, this);
    } else if (!is_in_backward()) {
      enter_phase(TrainingPhase::kForward);  // of gradients that are accumulated
    }
  }
  try {
    before_forward();
    if (mixed_precision_) mixed_precision_->before_forward();
  } catch (...) {
    abandon();
    throw;
  }
}

/// Ranks without inputs shadow a forward once, so one that backward computes again (activation checkpoints) takes part in
/// nothing.
bool DdpCore::is_shadowed_already() const {
  return owner_.join_config().enable && is_in_backward();
}

void DdpCore::before_forward() {
  if (is_shadowed_already()) return;
  const bool training = at::GradMode::is_enabled();
  if (training) take_snapshot();
  if (training && synchronise_) reducer_->prepare_forward();
  Join::notify_join_context(owner_);
  set_divisor();
  if (training) reducer_->rebuild_buckets();
  sync_buffers_at(BufferCommHookLocation::kPreForward);
  if (owner_.join_config().enable) agree_on_synchronising(/*joined=*/false);
}

/// On ranks that train and on those that shadow them, for these may have optimizers that step on, too.
void DdpCore::set_divisor() {
  const bool by_training = owner_.join_config().enable && !divide_by_initial_world_size_;
  reducer_->set_divisor(by_training ? Join::training_ranks(owner_) : 0);
}

/// The step begins with its first forward after the last one's round was finished.
void DdpCore::take_snapshot() {
  const int64_t round = reducer_->rounds();
  if (snapshot_->taken() && snapshot_round_ == round) return;
  snapshot_round_ = round;
  snapshot_->take(options_.restore_buffers_on_failure ? current_buffers() : std::vector<NamedTensor>{});
}

void DdpCore::leave(const std::vector<at::Tensor>& outputs, bool searched) {
  const bool training = at::GradMode::is_enabled();
  if (mixed_precision_) mixed_precision_->after_forward(training);
  if (reducer_) {
    if (!is_shadowed_already()) sync_buffers_at(BufferCommHookLocation::kPostForward);
    // As torch does: after a forward that no synchronised backward follows, buffers are not broadcast before
    // the next.
    buffers_may_differ_ = training && synchronise_;
    TORCH_CHECK(searched || !buffers_may_differ_ || !options_.find_unused_parameters,
                "find_unused_parameters: what forward() of ", model_.name,
                " returns can't be searched for tensors: give its type a visit_tensors() (see "
                "lockstep/base/tensor_tree.h)");
    if (training) reducer_->prepare_backward(synchronise_, outputs);
  }
  if (delayed_) delayed_->after_forward();
}

/// A forward after a finished step, such as a validation's, is not a part of that step. Nor does one that backward computes again
/// have an end of its own: an exception ends it where all that backward needs is computed (activation checkpoints).
void DdpCore::abandon() {
  if (is_in_backward()) return;
  if (mixed_precision_ && at::GradMode::is_enabled()) {
    mixed_precision_->restore();
  } else if (mixed_precision_) {
    mixed_precision_->after_forward(/*backward_follows=*/false);
  }
  if (reducer_ && reducer_->rounds() == snapshot_round_) snapshot_->restore();
}

bool DdpCore::joins_outputs() const {
  return reducer_ && at::GradMode::is_enabled() && options_.find_unused_parameters && !options_.static_graph;
}

bool DdpCore::prepares_inputs() const {
  return input_device_ || (options_.mixed_precision && options_.mixed_precision->param_dtype);
}

at::Tensor DdpCore::prepare_input(const at::Tensor& tensor) const {
  at::Tensor prepared = input_device_ ? moved_to(tensor, *input_device_) : tensor;
  if (!options_.mixed_precision || !options_.mixed_precision->param_dtype) return prepared;
  return cast_floating_point(prepared, *options_.mixed_precision->param_dtype);
}

// ---- Buffers

bool DdpCore::will_sync_module_buffers() const {
  return buffers_may_differ_ && forward_sync_buffers_ && !current_buffers().empty();
}

void DdpCore::sync_buffers_at(BufferCommHookLocation location, bool joined) {
  const auto own = buffer_hook_ ? buffer_hook_location_ : BufferCommHookLocation::kPreForward;
  if (own != location || !buffers_may_differ_ || !forward_sync_buffers_) return;
  const auto buffers = current_buffers();
  if (buffers.empty()) return;
  // Under join() rank 0 may have run out of inputs, with buffers from long ago.
  const int source = owner_.join_config().enable ? find_common_rank(options_.process_group, !joined) : 0;
  at::NoGradGuard no_grad;
  if (buffer_hook_) {
    // What the hook does in place is no business of the graph that saved a buffer.
    std::vector<uint64_t> versions;
    for (const auto& [name, buffer] : buffers) versions.push_back(buffer._version());
    reducer_->add_post_backward_futures(buffer_hook_(buffers));
    for (size_t i = 0; i < buffers.size(); ++i) {
      auto counter = buffers[i].second.unsafeGetTensorImpl()->version_counter();
      counter.set_version(static_cast<int64_t>(versions[i]));
    }
  } else {
    broadcast_coalesced(buffers, options_.process_group, source);
  }
}

void DdpCore::register_buffer_comm_hook(BufferCommHook hook, BufferCommHookLocation location) {
  TORCH_CHECK_TYPE(hook, "the buffer communication hook must be callable");
  buffer_hook_ = std::move(hook);
  buffer_hook_location_ = location;
}

// ---- Options that come later

void DdpCore::register_comm_hook(CommunicationHook hook, const std::string& name) {
  TORCH_CHECK(
      !mixed_precision_,
      "register_comm_hook: mixed_precision brings a communication hook of its own; leave out one of them");
  reducer().register_comm_hook(std::move(hook), name);
}

OptimizerPerParameter DdpCore::register_fused_optim(
    const OptimizerPerParameter::Factory& optim, const std::optional<std::vector<at::Tensor>>& optim_params) {
  std::vector<at::Tensor> parameters;
  if (optim_params) {
    parameters = *optim_params;
  } else {
    for (const auto& parameter : reduced_parameters(model_.parameters, {}))
      parameters.push_back(parameter.tensor);
  }
  OptimizerPerParameter optimizers(parameters, optim);
  const auto hook = hook_then_optimizer(allreduce_hook, OptimizerHookState(optimizers, optim_params));
  register_comm_hook([this, hook](GradBucket& bucket) { return hook(options_.process_group, bucket); },
                     "fused optimizer");
  reducer_->set_steps_in_backward();
  return optimizers;
}

Reducer& DdpCore::reducer() const {
  TORCH_CHECK(reducer_, "all parameters are in delay_all_reduce_named_params, so there is no reducer");
  return *reducer_;
}

void DdpCore::set_static_graph() {
  if (options_.static_graph) {
    TORCH_WARN("You've set static_graph to be True, no need to set it again.");
    return;
  }
  options_.static_graph = true;
  if (reducer_) reducer_->set_static_graph();
}

/// Puts back what forward has changed, unless its step was finished and its gradients applied.
void DdpCore::undo_step() {
  if (mixed_precision_) mixed_precision_->restore();
  const bool finished = reducer_->rounds() > snapshot_round_;
  if (finished && reducer_->stepped_since_round()) {
    snapshot_->drop();
  } else {
    snapshot_->restore();
  }
}

void DdpCore::reset() {
  if (delayed_) delayed_->abandon();
  if (!reducer_) return;
  reducer_->reset();
  undo_step();
}

void DdpCore::tell(HeldTensors& held) const {
  for (const at::Tensor& parameter : all_parameters_) held.add(parameter);
  if (reducer_) {
    const auto memory = reducer_->bucket_memory();
    held.gradients.insert(held.gradients.end(), memory.begin(), memory.end());
  }
  if (delayed_) held.gradients.push_back(delayed_->buffer());
}

// ---- Uneven inputs

/// Whether any rank that still trains will reduce in the backward to come.
bool DdpCore::agree_on_synchronising(bool joined) {
  at::Tensor synchronising = at::empty({1}).fill_(!joined && synchronise_ ? 1 : 0);
  std::vector<at::Tensor> tensors{synchronising};
  const CallSite site("DDP's join");
  options_.process_group->allreduce(tensors)->wait();
  return synchronising.item<float>() != 0;
}

/// What a rank without inputs does. torch/nn/parallel/distributed.py, _DDPJoinHook.
class DdpCore::Shadow final : public JoinHook {
 public:
  explicit Shadow(DdpCore& core) : core_(core) {}

  void main_hook() override {
    core_.snapshot_->drop();  // this rank's own steps are done, whatever becomes of the others'
    core_.set_divisor();
    core_.reducer_->rebuild_buckets();
    core_.sync_buffers_at(BufferCommHookLocation::kPreForward, /*joined=*/true);
    const bool synchronise = core_.agree_on_synchronising(/*joined=*/true);
    core_.sync_buffers_at(BufferCommHookLocation::kPostForward, /*joined=*/true);
    core_.buffers_may_differ_ = synchronise;
    if (synchronise) core_.reducer_->shadow_backward();
  }

  void post_hook(bool is_last_joiner) override {
    auto state = core_.model_.parameters;
    if (core_.forward_sync_buffers_) {
      for (auto& buffer : core_.current_buffers()) state.push_back(std::move(buffer));
    }
    broadcast_coalesced(state, core_.options_.process_group,
                        find_common_rank(core_.options_.process_group, is_last_joiner));
    core_.reducer_->take_shadowed_rounds();
  }

 private:
  DdpCore& core_;
};

std::unique_ptr<JoinHook> DdpCore::join_hook(const JoinOptions& options) {
  TORCH_CHECK_VALUE(
      !options.enable || !options_.skip_all_reduce_unused_params,
      "skip_all_reduce_unused_params does not go together with join(): a rank without inputs does not know "
      "which buckets the others skip; leave out skip_all_reduce_unused_params, or give all ranks equally "
      "many inputs and leave out join()");
  TORCH_CHECK_VALUE(
      !options.enable || !delayed_,
      "delay_all_reduce_named_params does not go together with join(): a rank without inputs does not know "
      "between which buckets the others reduce these parameters; leave out delay_all_reduce_named_params, or "
      "give all ranks equally many inputs and leave out join()");
  divide_by_initial_world_size_ = options.divide_by_initial_world_size;
  return std::make_unique<Shadow>(*this);
}

}  // namespace lockstep
