#pragma once

#include <lockstep/nn/model_tensors.h>
#include <lockstep/serialization/state_dict.h>
#include <lockstep/serialization/state_loading.h>

namespace lockstep {

namespace checkpoint::internal {
StateDict state_dict_of(const ModelTensors& model);
}  // namespace checkpoint::internal

/// Python's model.state_dict(): parameters and buffers by name ("hidden.weight", "norm.running_mean"). The
/// tensors share the model's memory, so what is to stay must be cloned. Every kind of model that
/// model_tensors.h lists; LibTorch has no buffers that are not persistent. Not while another thread changes
/// the model. torch/nn/modules/module.py, Module.state_dict.
template <ModelType Model>
StateDict state_dict(const Model& model) {
  return checkpoint::internal::state_dict_of(model_tensors(model));
}

/// Python's model.load_state_dict(): copies the state's tensors into the model's, which stay the same
/// objects, so that optimizers and DistributedDataParallel keep theirs; dtypes and devices are converted as
/// copy_() does. Returns what did not fit, which only `strict = false` lets pass.
///
///     lockstep::load_state_dict(model, state, {.strict = false, .key_map =
///     {lockstep::strip_prefix("module.")}});
///
/// Throws c10::Error with torch's texts, which lists all that is wrong, and changes nothing then: names that
/// are missing or unexpected, other sizes, values that are no tensors, two names that become one. Every rank
/// calls it with the same state, and nothing is sent. Module.load_state_dict.
template <ModelType Model>
IncompatibleKeys load_state_dict(const Model& model, const StateDict& state,
                                 const LoadStateDictOptions& options = {});

/// The first half of load_state_dict(): all checks. `model`'s tensors must be the same until commit().
PreparedLoad prepare_load_state_dict(const ModelTensors& model, const StateDict& state,
                                     const LoadStateDictOptions& options = {});

template <ModelType Model>
IncompatibleKeys load_state_dict(const Model& model, const StateDict& state,
                                 const LoadStateDictOptions& options) {
  PreparedLoad load = prepare_load_state_dict(model_tensors(model), state, options);
  load.commit();
  return std::move(load.keys);
}

}  // namespace lockstep
