#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include <torch/optim/optimizer.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/nn/model_tensors.h>
#include <lockstep/parallel/pipeline/pipeline_stage.h>
#include <lockstep/serialization/state_dict.h>
#include <lockstep/serialization/state_loading.h>

namespace lockstep::checkpoint::internal {

/// The states of a pipeline by the names of the whole model. What a rank saves is its part, and the union over the ranks is what
/// one process has that trains the whole model; that is also what each rank loads, whatever stages it was written by. Several
/// tensors of a rank have one name where they are one weight, tied over its stages: they are equal, so that one is saved, and all
/// are loaded. One thread at a time.
class PipelineStates {
 public:
  /// Collective over the stages' group, as all that follows but state_dict(). Throws c10::ValueError on all ranks for stages of
  /// callables, whose parameters have no names, and for a name that is on two stages without being tied.
  explicit PipelineStates(std::vector<PipelineStage> stages);

  const ProcessGroup& group() const { return group_; }
  StateDict state_dict() const;
  /// All ranks' parameters are in its groups, this rank's in its "state". Throws c10::ValueError on all ranks for what
  /// get_optimizer_state_dict() refuses on one, for LBFGS, whose one state can't be cut, and where the ranks' optimizers have
  /// different numbers of groups.
  StateDict optim_state_dict(const torch::optim::Optimizer& optimizer) const;

  /// The checks of all ranks: all throw the same c10::Error, or none does. A rank without a state takes part by none_to_load().
  PreparedLoad prepare_load(const StateDict& state, const LoadStateDictOptions& options) const;
  PreparedLoad prepare_optim_load(torch::optim::Optimizer& optimizer, const StateDict& state,
                                  const LoadStateDictOptions& options) const;
  /// In the place of either of these. Throws, on all ranks, unless none has a state.
  void none_to_load() const;

 private:
  using Names = std::vector<std::string>;

  struct Given {
    PreparedLoad load;
    Names names;  // in the state, which all ranks have
  };
  PreparedLoad load_on_all(const Names& wanted, const std::function<Given()>& prepare, bool strict) const;
  static LoadStateDictOptions for_own(LoadStateDictOptions options, const Names& wanted);
  ModelTensors own_weights() const;
  std::string first_name(const std::string& name) const;

  std::vector<PipelineStage> stages_;
  ProcessGroup group_;
  ModelTensors own_;  // of this rank's stages
  std::map<std::string, std::string>
      first_names_;  // by the other names that a weight has, here or on other stages
};

}  // namespace lockstep::checkpoint::internal
