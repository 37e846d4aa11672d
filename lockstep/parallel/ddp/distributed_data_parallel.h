#pragma once

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/record_function.h>
#include <torch/nn/module.h>

#include <lockstep/base/tensor_tree.h>
#include <lockstep/nn/module_inspection.h>
#include <lockstep/nn/output_sink.h>
#include <lockstep/nn/wrapped_module.h>
#include <lockstep/optim/recoverable.h>
#include <lockstep/parallel/ddp/ddp_core.h>
#include <lockstep/parallel/ddp/no_sync_scope.h>
#include <lockstep/parallel/ddp/options.h>
#include <lockstep/parallel/ddp/reducer/reducer.h>

namespace lockstep {

/// Data-parallel training: every rank holds the whole model and computes on its own part of the batch;
/// gradients are averaged over the group while backward() runs, so that all ranks take the same step.
///
///     auto net = std::make_shared<Net>();
///     lockstep::DistributedDataParallel model(net);
///     loss(model(batch.data), batch.target).backward();   // gradients are the averages when this returns
///
/// It wraps a torch::nn::Module in a shared_ptr or a holder (torch::nn::Sequential, any TORCH_MODULE), a
/// torch::nn::AnyModule or a torch::jit::Module, with a forward() of any signature. Rank 0's parameters and
/// buffers go to all at construction, its buffers before each synchronised forward. Gradients lie in shared
/// memory; optimizers and clipping work as ever. All ranks must run the same synchronised iterations, and
/// each parameter must take part in each of them unless find_unused_parameters or static_graph is set. The
/// state lies under `module.` in named_parameters(), but torch::save writes the wrapped module's own.
///
/// Called from one thread at a time; several models may live in one process. Every backward that follows a
/// synchronised forward is reduced, also the second one through a retained graph, which torch leaves
/// unreduced without a word; so gradients of the parameters that are not to be averaged belong under
/// no_sync(). Validate on `*model.module`: a forward here may broadcast buffers, and ranks may have unequal
/// numbers of batches.
///
/// The module may be on a GPU, or spread over several; gradients are reduced there, ordered after the streams that
/// they come on, and backward() leaves them in the order of the current stream, as it leaves all others. With
/// `device_ids`, the one device of the module, tensors among the arguments are moved there. Beside that
/// inputs, outputs and streams are the caller's.
///
/// The constructor is collective and throws on every rank, naming the parameter, if the ranks' models differ.
/// Later errors are those of all_reduce, or say which parameters received no gradient. When a reduction
/// fails, backward() throws the first cause, and parameters, optimizer and random numbers are as they were
/// before the step's first forward; see update_process_group(). torch/nn/parallel/distributed.py.
// (Not "Module": inside of a torch::nn::Module that name is the base class.)
template <class Wrapped>
class DistributedDataParallel : public torch::nn::Module,
                                public Joinable,
                                public ForwardOfWrapper<DistributedDataParallel<Wrapped>, Wrapped> {
  using Traits = WrappedModule<Wrapped>;
  friend ForwardOfWrapper<DistributedDataParallel, Wrapped>;

 public:
  using Handle = typename Traits::Handle;

  explicit DistributedDataParallel(Handle wrapped, DistributedDataParallelOptions options = {})
      : torch::nn::Module("DistributedDataParallel"),
        module(checked(std::move(wrapped))),
        inner_(Traits::as_module(module)),
        core_(model_of(module, inner_), std::move(options), *this) {
    register_module("module", inner_);
  }
  /// A module holder, such as torch::nn::Linear.
  template <class Holder>
  requires ModuleHolderOf<Holder, Wrapped>
  explicit DistributedDataParallel(const Holder& holder, DistributedDataParallelOptions options = {})
      : DistributedDataParallel(holder.ptr(), std::move(options)) {}
  DistributedDataParallel(const DistributedDataParallel&) = delete;
  DistributedDataParallel& operator=(const DistributedDataParallel&) = delete;

  /// While it lives, forwards are not synchronised: their gradients add up locally, and the next synchronised
  /// backward reduces the sum. Covers forward and backward; several may live at once. Movable, for scopes
  /// that depend on a condition:
  ///
  ///     std::optional<decltype(model.no_sync())> guard;
  ///     if (is_not_last) guard = model.no_sync();
  using NoSync = NoSyncScope<DdpCore*>;
  NoSync no_sync() { return NoSync(&core_); }

  /// For ranks with unequal numbers of batches: while it lives, ranks that have run out stand in for
  /// themselves in the others' collectives; its end waits for all, and leaves the last one's model
  /// everywhere. See Join, which also takes several joinables.
  Join join(JoinOptions options = {}) { return Join({this}, options); }
  std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) override {
    return core_.join_hook(options);
  }
  at::Device join_device() const override { return core_.device(); }
  ProcessGroup join_process_group() const override { return core_.options().process_group; }

  /// Reduces gradients by hook(state, bucket) from now on: once, before the first backward, on all ranks the
  /// same. `hook`: HookFuture(const State&, GradBucket&); see lockstep/parallel/ddp/grad_bucket.h.
  template <class State, class Hook>
  void register_comm_hook(State state, Hook hook, const std::string& name = "user's hook") {
    core_.register_comm_hook([state = std::move(state),
                              hook = std::move(hook)](GradBucket& bucket) { return hook(state, bucket); },
                             name);
  }
  /// The optimizer's step in backward: each of `optim_params` (all, unless given) steps as soon as its
  /// gradient is reduced. `optim` makes the optimizer of one parameter; the answer leads to all of them. A
  /// communication hook, so there can't be another; no step() follows backward(), and a step that fails in
  /// the middle is not undone. torch's _register_fused_optim.
  OptimizerPerParameter register_fused_optim(
      const OptimizerPerParameter::Factory& optim,
      const std::optional<std::vector<at::Tensor>>& optim_params = {}) {
    return core_.register_fused_optim(optim, optim_params);
  }
  /// Synchronises buffers by hook(buffers) instead of a broadcast from rank 0.
  void register_buffer_comm_hook(BufferCommHook hook,
                                 BufferCommHookLocation location = BufferCommHookLocation::kPostForward) {
    core_.register_buffer_comm_hook(std::move(hook), location);
  }
  /// As the option; before the first backward.
  void set_static_graph() { core_.set_static_graph(); }
  /// Whether the next forward will synchronise buffers.
  bool will_sync_module_buffers() const { return core_.will_sync_module_buffers(); }

  /// What was built, and the times of the last and the average iteration (in ns), under torch's names.
  /// Beyond torch's: backward_comm_exposed_time, reduction_time (the operations' own), gradient_bytes,
  /// gradient_bytes_in_place (written by their kernels where they were reduced), tuned,
  /// first_bucket_cap_bytes.
  c10::DDPLoggingData get_ddp_logging_data() const { return core_.logging_data(); }
  /// Times are taken in the first 10 iterations and then in every `sample_rate`-th; 100 unless told.
  void set_ddp_runtime_logging_sample_rate(int sample_rate) { reducer().set_sample_rate(sample_rate); }
  /// Throws, naming the parameters, if the last backward did not reduce all of them.
  void check_reducer_finalized() const { reducer().check_finalized(); }

  /// After a failure: goes on with another group, in the same processes; collective over it. First the ranks
  /// compare how many steps they have done: a rank that is behind gets parameters, buffers and `states`
  /// (optimizers, say) of one that is ahead. Returns the number of steps that all have done now: backward
  /// passes whose gradients were applied. A registered communication hook keeps its group, and may be
  /// replaced then. Not inside of a backward.
  int64_t update_process_group(const ProcessGroup& group, const std::vector<Recoverable>& states = {}) {
    return core_.update_process_group(group, states);
  }
  /// Forgets a step that was not finished (backward threw an error of the user's own, say): on all ranks, or
  /// followed by update_process_group().
  void reset() { core_.reset(); }

  Reducer& reducer() const { return core_.reducer(); }
  DdpCore& core() { return core_; }
  const DdpCore& core() const { return core_; }

  void save(torch::serialize::OutputArchive& archive) const override { inner_->save(archive); }
  void load(torch::serialize::InputArchive& archive) override { inner_->load(archive); }

  /// The wrapped module.
  const Handle module;

 private:
  static Handle checked(Handle handle) {
    TORCH_CHECK_VALUE(!Traits::is_empty(handle), "DistributedDataParallel: the module is empty");
    return handle;
  }

  static DdpCore::Model model_of(const Handle& handle, const std::shared_ptr<torch::nn::Module>& inner) {
    return {.parameters = Traits::named_parameters(handle),
            .buffers = [handle] { return Traits::named_buffers(handle); },
            .sparse = sparse_parameters(*inner),
            .name = inner->name(),
            .has_sync_batch_norm = has_sync_batch_norm(*inner)};
  }

  template <class Forward, class... Arguments>
  auto run(Forward&& call, Arguments&&... arguments) {
    core_.enter();
    RECORD_USER_SCOPE("DistributedDataParallel.forward");
    try {
      return leave([&] {
        if (core_.prepares_inputs()) return call(prepared(std::forward<Arguments>(arguments))...);
        return call(std::forward<Arguments>(arguments)...);
      });
    } catch (...) {
      core_.abandon();
      throw;
    }
  }

  template <class Call>
  auto leave(Call&& call) {
    using Output = decltype(call());
    if constexpr (std::is_void_v<Output>) {
      call();
      core_.leave({}, /*searched=*/true);
    } else {
      Output output = call();
      std::vector<at::Tensor> tensors;
      if constexpr (can_find_tensors<Output>) {
        if (core_.joins_outputs()) join_outputs(output);
        for_each_tensor(output, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
      }
      core_.leave(tensors, can_find_tensors<Output>);
      return output;
    }
  }

  template <class Output>
  static void join_outputs(Output& output) {
    const auto has_graph = [](const at::Tensor& tensor) {
      return tensor.requires_grad() && !tensor.is_leaf();
    };
    std::vector<at::Tensor> tensors;
    for_each_owned_tensor(output, [&](at::Tensor& tensor) {
      if (has_graph(tensor)) tensors.push_back(tensor);
    });
    tensors = join_in_graph(tensors);
    auto next = tensors.begin();
    for_each_owned_tensor(output, [&](at::Tensor& tensor) {
      if (has_graph(tensor)) tensor = *next++;
    });
  }

  /// The argument's type stays, so that it still fits forward()'s signature. What stands behind a pointer is the caller's.
  template <class Argument>
  std::remove_cvref_t<Argument> prepared(Argument&& argument) const {
    std::remove_cvref_t<Argument> copy = std::forward<Argument>(argument);
    if constexpr (can_find_tensors<std::remove_cvref_t<Argument>>) {
      for_each_owned_tensor(copy, [this](at::Tensor& tensor) { tensor = core_.prepare_input(tensor); });
    }
    return copy;
  }

  const std::shared_ptr<torch::nn::Module> inner_;
  DdpCore core_;
};

template <class Given>
DistributedDataParallel(const Given&, DistributedDataParallelOptions = {})
    -> DistributedDataParallel<ContainedModule<Given>>;

}  // namespace lockstep
