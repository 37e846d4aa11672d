#pragma once

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/ddp/ddp_core.h>
#include <lockstep/ddp/options.h>

namespace lockstep {

/// Data-parallel training: every rank holds the whole model and computes on its own part of the batch;
/// gradients are averaged over the group while backward() runs, so that all ranks take the same step.
///
///     auto net = std::make_shared<Net>();
///     lockstep::DistributedDataParallel<Net> model(net);
///     loss(model(batch.data), batch.target).backward();   // gradients are the averages when this returns
///
/// The wrapped module has a forward() of any signature. Rank 0's parameters and buffers go to all at
/// construction, its buffers before each synchronised forward. Gradients are views into shared memory;
/// optimizers and clipping work as ever. All ranks must run the same synchronised iterations, and each
/// parameter must take part in each of them. The state lies under `module.` in parameters and checkpoints.
/// Called from one thread at a time; several models may live in one process. Every backward that follows a
/// synchronised forward is reduced, also the second one through a retained graph, which torch leaves
/// unreduced without a word; so gradients of the parameters that are not to be averaged belong under
/// no_sync(). Validate on `*model.module`: a forward here may broadcast buffers, and ranks may have unequal
/// numbers of batches.
///
/// The constructor is collective and throws on every rank, naming the parameter, if the ranks' models differ.
/// Later errors are those of all_reduce, or say which parameters received no gradient.
/// torch/nn/parallel/distributed.py.
// (Not "Module": inside of a torch::nn::Module that name is the base class.)
template <class Wrapped>
class DistributedDataParallel : public torch::nn::Module {
  static_assert(std::is_base_of_v<torch::nn::Module, Wrapped>,
                "the wrapped module must be a torch::nn::Module");

 public:
  explicit DistributedDataParallel(std::shared_ptr<Wrapped> wrapped,
                                   DistributedDataParallelOptions options = {})
      : torch::nn::Module("DistributedDataParallel"),
        module(std::move(wrapped)),
        core_(
            named(module->named_parameters()), [held = module] { return named(held->named_buffers()); },
            std::move(options)) {
    register_module("module", module);
  }

  /// The module's forward with gradient synchronisation around it.
  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    core_.before_forward();
    if constexpr (std::is_void_v<decltype(module->forward(std::forward<Arguments>(arguments)...))>) {
      module->forward(std::forward<Arguments>(arguments)...);
      core_.after_forward();
    } else {
      auto output = module->forward(std::forward<Arguments>(arguments)...);
      core_.after_forward();
      return output;
    }
  }
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  /// While it lives, forwards are not synchronised: their gradients add up locally, and the next synchronised
  /// backward reduces the sum. Covers forward and backward; may be nested.
  class [[nodiscard]] NoSync {
   public:
    explicit NoSync(DdpCore& core) : core_(core), before_(core.synchronises()) {
      core_.set_synchronises(false);
    }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;
    ~NoSync() { core_.set_synchronises(before_); }

   private:
    DdpCore& core_;
    bool before_;
  };
  NoSync no_sync() { return NoSync(core_); }

  /// The wrapped module.
  const std::shared_ptr<Wrapped> module;

  const DdpCore& core() const { return core_; }

 private:
  template <class Dictionary>
  static std::vector<NamedTensor> named(const Dictionary& tensors) {
    std::vector<NamedTensor> answer;
    for (const auto& item : tensors) answer.emplace_back(item.key(), item.value());
    return answer;
  }

  DdpCore core_;
};

}  // namespace lockstep
