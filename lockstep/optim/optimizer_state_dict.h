#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <lockstep/nn/model_tensors.h>
#include <lockstep/serialization/state_dict.h>
#include <lockstep/serialization/state_loading.h>

/// The state of optimizers in Python's two forms. LibTorch's own (torch::save) knows parameters by their
/// order, and Python can't read it.
///
/// | form | a parameter is | its reader |
/// |---|---|---|
/// | state_dict(), load_state_dict() | its number | Python's optimizer.load_state_dict() |
/// | get_optimizer_state_dict(), set_optimizer_state_dict() | its name in the model |
/// torch.distributed.checkpoint.state_dict; a model whose parameters were defined in another order |
///
/// Both hold {"state": {parameter: {"exp_avg": …}}, "param_groups": [{"lr": …, "params": [parameter, …]}]}:
/// options and state tensors under Python's names, `step` as a float32 tensor, `betas` as a tuple, and the
/// options that LibTorch doesn't have (`maximize`, `foreach`, …) at Python's defaults. Reading refuses those
/// that would change what a step computes. What schedulers note in groups (`initial_lr`, `max_lr`, …) is
/// there while a scheduler of the optimizer lives.
///
/// For SGD, Adam, AdamW, RMSprop, Adagrad and LBFGS, and classes that derive from them without more state;
/// others see OptimizerFormat. For ZeroRedundancyOptimizer (each rank has a part of the state, as said
/// below) and PostLocalSGDOptimizer, whose averager's "step" stands beside "state".
///
/// Tensors in what is returned share the optimizer's memory; what is loaded is copied, in the parameter's
/// dtype (but `step`) and on its device. Errors are c10::Error or c10::ValueError, and nothing has changed
/// then. One thread at a time for an optimizer.
namespace lockstep {

/// Python's optimizer.state_dict(). Of a ZeroRedundancyOptimizer the whole state, as of the last
/// consolidate_state_dict() to this rank, which must have been.
StateDict state_dict(const torch::optim::Optimizer& optimizer);
/// Python's optimizer.load_state_dict(): the parameters are those of the state in the same order. Takes the
/// other form, too, when the order is the same. ZeroRedundancyOptimizer: every rank calls it with the whole
/// state, of any number of ranks.
void load_state_dict(torch::optim::Optimizer& optimizer, const StateDict& state);

/// torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(): names are the model's
/// (model_tensors.h; for a parameter with two, the first). Of a ZeroRedundancyOptimizer it has this rank's
/// states and all groups: the union over the ranks is the plain optimizer's. Throws c10::ValueError for a
/// parameter that is not the model's.
StateDict get_optimizer_state_dict(const ModelTensors& model, const torch::optim::Optimizer& optimizer);
template <ModelType Model>
StateDict get_optimizer_state_dict(const Model& model, const torch::optim::Optimizer& optimizer) {
  return get_optimizer_state_dict(model_tensors(model), optimizer);
}

/// The reverse. Parameters are found by name: groups may hold them in another order, but those of one group
/// must be in one group of the state. (LBFGS has one state for all, and wants the same order.) Not strict:
/// parameters that the state doesn't have keep their state, and a group without any its options; both are
/// returned as missing.
IncompatibleKeys set_optimizer_state_dict(const ModelTensors& model, torch::optim::Optimizer& optimizer,
                                          const StateDict& state, const LoadStateDictOptions& options = {});
template <ModelType Model>
IncompatibleKeys set_optimizer_state_dict(const Model& model, torch::optim::Optimizer& optimizer,
                                          const StateDict& state, const LoadStateDictOptions& options = {}) {
  return set_optimizer_state_dict(model_tensors(model), optimizer, state, options);
}

/// The tensors of the state that this rank has, but for those that count steps. Throws c10::ValueError for an optimizer whose
/// state has no known form.
std::vector<at::Tensor> optimizer_state_tensors(const torch::optim::Optimizer& optimizer);

/// The first half of set_optimizer_state_dict(): all checks. The optimizer must not change until commit().
PreparedLoad prepare_optimizer_state_dict(const ModelTensors& model, torch::optim::Optimizer& optimizer,
                                          const StateDict& state, const LoadStateDictOptions& options = {});

}  // namespace lockstep
