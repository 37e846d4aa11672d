#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/base/tensor_tree.h>
#include <lockstep/nn/model_tensors.h>
#include <lockstep/nn/wrapped_module.h>
#include <lockstep/parallel/ddp/no_sync_scope.h>
#include <lockstep/parallel/fsdp/any_wrapper.h>
#include <lockstep/parallel/fsdp/fsdp_core.h>
#include <lockstep/parallel/fsdp/options.h>
#include <lockstep/parallel/fsdp/sharded_optimizer.h>

namespace lockstep {

/// Training of models that don't fit N times: on a host each parameter lies once, in shared memory, where all ranks read it.
/// Gradients are averaged while backward() runs, and each rank keeps those of the rows that it owns, with the optimizer's
/// state for these; so memory is that of torch's FULL_SHARD, and nothing is gathered.
///
///     lockstep::FullyShardedDataParallel model(net, {.auto_wrap_policy = lockstep::fsdp::size_based_auto_wrap_policy(100'000)});
///     auto optimizer = model.make_optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3));
///     loss(model(batch.data), batch.target).backward();
///     optimizer->step();                              // collective
///     optimizer->zero_grad();
///
/// It wraps what DistributedDataParallel wraps, with a forward() of any signature. The module's parameters are read-only from
/// then on: they change in step() alone, on all ranks at once, and a rank that is not in step() may read them whenever it
/// wants, alone too (evaluation). A write to them ends the process with a note that names the parameter. What they were
/// given to begin with is set before they are wrapped, or in summon_full_params(). An old graph fails in backward with torch's
/// error for variables that were modified in place.
///
/// parameters() are this rank's rows of each, as leaves; module->parameters() are the whole ones, for forward alone. All ranks
/// run the same number of synchronised backwards and steps; a parameter that a rank does not use counts as zeros there, but
/// each backward must reach one sharded parameter at least. Over several hosts each has the weights once (HYBRID_SHARD).
///
/// With FULL_SHARD and SHARD_GRAD_OP over several hosts, or with `gather`, each rank has its rows alone. The parameters
/// of a group of the auto_wrap_policy are gathered when an operator is given one of them in forward() or backward(), and
/// freed when others are; outside of these they have no values, and reading them throws. Then forward is collective too:
/// all ranks use the groups in the same order, in evaluation as well, and one thread uses the model.
///
/// Modules within the module may be wrapped before it, as members of the type FullyShardedDataParallel<Block>: they
/// become parts of this one, each a group of its own, and what is left is another one. Their optimizers and states are
/// this one's; all have the same process group and sharding, and each keeps its mixed precision. Where a part computes
/// alone, it is as if the whole did.
///
/// Used by one thread at a time; others may evaluate meanwhile, without gradients: step() waits for them, and they for it.
/// Several models may live in one process, made in the same order on all ranks, and one backward may reach several: the same
/// ones on all ranks, in whatever order where nothing is gathered. One module has but one wrapper at a time. When a
/// reduction or step() fails, or a backward throws after its first gradient, on one rank, all throw the first cause, and the
/// model must be made anew from a checkpoint, unless no rank had begun to write: full_state_dict() works then, without mixed
/// precision.
/// torch/distributed/fsdp/fully_sharded_data_parallel.py.
template <class Wrapped>
class FullyShardedDataParallel : public torch::nn::Module,
                                 public fsdp::AnyWrapper,
                                 public ForwardOfWrapper<FullyShardedDataParallel<Wrapped>, Wrapped> {
  using Traits = WrappedModule<Wrapped>;
  friend ForwardOfWrapper<FullyShardedDataParallel, Wrapped>;

 public:
  using Handle = typename Traits::Handle;

  /// Collective; throws on every rank, naming the parameter, if the ranks' models differ, and on every rank for what it can't
  /// wrap: the module is as it was then. Parameters and buffers may be on the meta device (MetaDeviceGuard): rank 0 gives them
  /// values, module by module, so that nowhere there is a whole model beside the shared one.
  explicit FullyShardedDataParallel(Handle wrapped, FullyShardedDataParallelOptions options = {})
      : torch::nn::Module("FullyShardedDataParallel"),
        fsdp::AnyWrapper(options.mixed_precision),
        module(checked(std::move(wrapped))),
        inner_(Traits::as_module(module)) {
    set_core(std::make_shared<FsdpCore>(model_of(module, inner_, options), options));
  }
  /// A module holder, such as torch::nn::Linear.
  template <class Holder>
  requires ModuleHolderOf<Holder, Wrapped>
  explicit FullyShardedDataParallel(const Holder& holder, FullyShardedDataParallelOptions options = {})
      : FullyShardedDataParallel(holder.ptr(), std::move(options)) {}
  FullyShardedDataParallel(const FullyShardedDataParallel&) = delete;
  FullyShardedDataParallel& operator=(const FullyShardedDataParallel&) = delete;

  /// This rank's rows of each parameter, as leaves, in definition order: what optimizers update. Ignored parameters are among
  /// them as they are.
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> answer;
    for (const auto& parameter : core()->parameters()) answer.push_back(parameter.second);
    return answer;
  }
  const std::vector<NamedTensor>& named_parameters() const { return core()->parameters(); }
  /// The module's, of which each rank has its own.
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const {
    torch::OrderedDict<std::string, at::Tensor> buffers;
    for (auto& [name, buffer] : module_buffers()) buffers.insert(name, std::move(buffer));
    return buffers;
  }
  std::vector<NamedTensor> module_parameters() const override { return parameters_of(module, *inner_); }
  std::vector<NamedTensor> module_buffers() const override { return buffers_of(module, *inner_); }
  /// Both, for what loads values while summon_full_params() runs.
  ModelTensors module_tensors() const { return {inner_->name(), module_parameters(), module_buffers()}; }

  /// An optimizer of all parameters, or of groups of what parameters() has.
  template <ElementwiseOptimizer Optimizer, class Defaults>
  std::unique_ptr<ShardedOptimizer<Optimizer>> make_optimizer(Defaults defaults) {
    return std::make_unique<ShardedOptimizer<Optimizer>>(core(), parameters(), std::move(defaults));
  }
  template <ElementwiseOptimizer Optimizer, class Defaults>
  std::unique_ptr<ShardedOptimizer<Optimizer>> make_optimizer(
      std::vector<torch::optim::OptimizerParamGroup> groups, Defaults defaults) {
    return std::make_unique<ShardedOptimizer<Optimizer>>(core(), std::move(groups), std::move(defaults));
  }

  /// While it lives, backwards are not reduced, whenever their forwards were: gradients add up in those of the module's
  /// parameters, whole on each rank, and the next synchronised backward reduces the sum, or the optimizer's zero_grad() drops it.
  /// Several may live at once. Movable.
  using NoSync = NoSyncScope<std::shared_ptr<FsdpCore>>;
  NoSync no_sync() { return NoSync(core()); }

  /// Scales the gradients so that the norm of them all, over all ranks, is at most max_norm; returns the norm before. Those of
  /// ignored parameters count with this rank's. Collective.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2.0) {
    return core()->clip_grad_norm_(max_norm, norm_type);
  }

  /// Runs `action` while the module's parameters have whole values of their own, on each rank a copy. With `writeback` the rows
  /// that a rank owns become what they are there then; when `action` throws on some rank, or a parameter has got other sizes,
  /// all throw, and the weights are as they were. Collective.
  void summon_full_params(const std::function<void()>& action, bool writeback = true) {
    core()->summon_full_params(action, writeback);
  }

  /// The whole model under the module's own names, in memory of its own, in the parameters' full precision; with
  /// rank0_only nothing on other ranks. Collective with mixed precision and where parameters are gathered; otherwise a
  /// rank may call it alone.
  StateDict full_state_dict(bool rank0_only = false) { return core()->full_state_dict(rank0_only); }
  /// Every rank gives the whole model, or what has its rows; of any number of ranks. Buffers and ignored parameters are taken
  /// from the rank's own argument: rank 0's state gives all ranks rank 0's. Collective. Throws c10::ValueError when
  /// a tensor is missing or has other sizes; then all ranks throw, and nothing has changed.
  void load_full_state_dict(const StateDict& state) { core()->load_full_state_dict(state); }
  /// This rank's rows, with their places in the whole. Without buffers and ignored parameters. to_object() makes it fit for
  /// files.
  fsdp::ShardedStateDict sharded_state_dict() const { return core()->sharded_state_dict(); }
  /// Takes this rank's rows from what any number of ranks had: from the states of them all, or of those that had these rows,
  /// or, on as many ranks, from its own. Collective. Throws as load_full_state_dict() does, also where rows are in none.
  void load_sharded_state_dict(const std::vector<fsdp::ShardedStateDict>& states) {
    core()->load_sharded_state_dict(states);
  }

  /// The optimizer's whole state in Python's form, by the parameters' names: that which get_optimizer_state_dict() has of an
  /// unsharded model; with rank0_only other ranks have its options alone. Collective. Throws c10::ValueError for an
  /// optimizer of sharded parameters that make_optimizer() has not made.
  StateDict full_optim_state_dict(const torch::optim::Optimizer& optimizer, bool rank0_only = false) const {
    return core()->full_optim_state_dict(optimizer, rank0_only);
  }
  /// Takes this rank's rows of such a state, of any number of ranks. Collective; all ranks do or none, which throw then.
  void load_full_optim_state_dict(torch::optim::Optimizer& optimizer, const StateDict& state) const {
    core()->load_full_optim_state_dict(optimizer, state);
  }
  /// This rank's part of it alone: all checks, and sends nothing. The optimizer must not change until commit().
  PreparedLoad prepare_full_optim_state_dict(torch::optim::Optimizer& optimizer, const StateDict& state,
                                             const LoadStateDictOptions& options = {}) const {
    return core()->prepare_full_optim_state_dict(optimizer, state, options);
  }
  /// The state of this rank's rows, in the same form, but for tensors that have rows: there it has fsdp::ShardedTensor, as
  /// to_object() makes them.
  StateDict sharded_optim_state_dict(const torch::optim::Optimizer& optimizer) const {
    return core()->sharded_optim_state_dict(optimizer);
  }
  /// Takes this rank's rows, as load_sharded_state_dict() does; options, and the state of ignored parameters, are the first
  /// one's. Collective. Throws on all ranks, and has changed nothing, when on some rank rows or parameters are missing.
  void load_sharded_optim_state_dict(torch::optim::Optimizer& optimizer,
                                     const std::vector<StateDict>& states) const {
    core()->load_sharded_optim_state_dict(optimizer, states);
  }

  const ProcessGroup& process_group() const { return core()->process_group(); }
  /// Whether parameters are gathered for each forward and backward, which are collective then.
  bool gathers() const { return core()->gathers(); }
  /// Where the module computes, and forward moves its inputs to.
  c10::Device device() const { return core()->device(); }

  void train(bool on = true) override {
    torch::nn::Module::train(on);
    Traits::train(module, on);
  }
  void zero_grad(bool set_to_none = true) override {
    inner_->zero_grad(set_to_none);
    if (is_part()) return;
    core()->drop_sums();
    for (auto& shard : parameters()) {
      if (!shard.grad().defined()) continue;
      if (set_to_none) {
        shard.mutable_grad() = at::Tensor();
      } else {
        shard.mutable_grad().zero_();
      }
    }
  }
  /// torch::save() writes the module's own, whole; torch::load() is collective. save() throws c10::NotImplementedError with mixed
  /// precision, of which forward's side has lost bits, and where parameters are gathered.
  void save(torch::serialize::OutputArchive& archive) const override {
    if (is_part()) return inner_->save(archive);  // the whole has checked
    TORCH_CHECK_NOT_IMPLEMENTED(!core()->gathers(),
                                "FullyShardedDataParallel: torch::save() of a model whose parameters are "
                                "gathered would write rows alone; save full_state_dict()");
    TORCH_CHECK_NOT_IMPLEMENTED(!core()->options().mixed_precision.is_used(),
                                "FullyShardedDataParallel: torch::save() of a model with mixed_precision "
                                "would write what its forward "
                                "sees, in lower precision; save full_state_dict()");
    inner_->save(archive);
  }
  void load(torch::serialize::InputArchive& archive) override {
    if (is_part()) return inner_->load(archive);  // within the whole's
    summon_full_params([&] { inner_->load(archive); });
  }

  /// The wrapped module.
  const Handle module;

 private:
  static Handle checked(Handle handle) {
    TORCH_CHECK_VALUE(!Traits::is_empty(handle), "FullyShardedDataParallel: the module is empty");
    return handle;
  }

  static std::vector<NamedTensor> parameters_of(const Handle& handle, const torch::nn::Module& inner) {
    return fsdp::parts_of(inner).empty() ? Traits::named_parameters(handle)
                                         : fsdp::parameters_with_parts(inner);
  }
  static std::vector<NamedTensor> buffers_of(const Handle& handle, const torch::nn::Module& inner) {
    return fsdp::parts_of(inner).empty() ? Traits::named_buffers(handle) : fsdp::buffers_with_parts(inner);
  }

  static FsdpCore::Model model_of(const Handle& handle, const std::shared_ptr<torch::nn::Module>& inner,
                                  const FullyShardedDataParallelOptions& options) {
    std::vector<fsdp::Part> parts = fsdp::parts_of(*inner);
    std::vector<at::Tensor> not_left = options.ignored_parameters;
    for (const fsdp::Part& part : parts) {
      for (const NamedTensor& parameter : part.wrapper->module_parameters())
        not_left.push_back(parameter.second);
    }
    fsdp::AutoWrapPolicy policy = options.auto_wrap_policy;
    std::vector<at::Tensor> full_precision;
    if (policy && options.mixed_precision.is_used()) {
      full_precision = fsdp::batch_norm_tensors(*inner);
      if (!full_precision.empty()) policy = fsdp::batch_norms_apart(std::move(policy));
    }
    return {.parameters = parameters_of(handle, *inner),
            .buffers = [handle, inner] { return buffers_of(handle, *inner); },
            .groups = fsdp::parameter_groups(*inner, policy, options.ignored_modules, not_left),
            .units = fsdp::init_units(inner, options.ignored_modules),
            .parts = std::move(parts),
            .full_precision = std::move(full_precision),
            .name = inner->name()};
  }

  template <class Forward, class... Arguments>
  auto run(Forward&& call, Arguments&&... arguments) {
    const auto prepared_call = [&] {
      if (prepares_inputs()) return call(prepared(std::forward<Arguments>(arguments))...);
      return call(std::forward<Arguments>(arguments)...);
    };
    using Output = decltype(prepared_call());
    if constexpr (std::is_void_v<Output>) {
      run_forward(prepared_call);
    } else {
      std::optional<Output> output;
      run_forward([&] { output.emplace(prepared_call()); });
      return std::move(*output);
    }
  }

  /// The argument's type stays, so that it still fits forward()'s signature. What lies behind pointers is not the copy's own:
  /// it stays as it is.
  template <class Argument>
  std::remove_cvref_t<Argument> prepared(Argument&& argument) const {
    std::remove_cvref_t<Argument> copy = std::forward<Argument>(argument);
    if constexpr (can_find_tensors<std::remove_cvref_t<Argument>>) {
      for_each_owned_tensor(copy, [this](at::Tensor& tensor) { tensor = prepare_input(tensor); });
    }
    return copy;
  }

  const std::shared_ptr<torch::nn::Module> inner_;  // not registered: its parameters are not for optimizers
};

template <class Given>
FullyShardedDataParallel(const Given&, FullyShardedDataParallelOptions = {})
    -> FullyShardedDataParallel<ContainedModule<Given>>;

}  // namespace lockstep
