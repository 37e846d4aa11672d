#pragma once

#include <concepts>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include <lockstep/collectives/process_group.h>
#include <lockstep/nn/model_tensors.h>
#include <lockstep/serialization/state_dict.h>
#include <lockstep/serialization/state_loading.h>

namespace lockstep {

class PipelineStage;

/// What has a state of its own: schedulers, GradScaler, DataLoader, a class of yours with these two
/// functions. torch/distributed/checkpoint/stateful.py.
template <class T>
concept Stateful = requires(T& part, const StateDict& state) {
  { part.state_dict() } -> std::convertible_to<StateDict>;
  part.load_state_dict(state);
};

/// The parts of a training program that a checkpoint holds, each under a name.
///
///     lockstep::TrainingState state;
///     state.add_model("model", model);
///     state.add_optimizer("optimizer", optimizer, model);
///     state.add("scheduler", scheduler);
///     state.add_per_rank("loader", loader);
///     state.add_rng();
///
/// What all ranks have alike (models, optimizers, schedulers) is in state_dict() and is saved once; what each
/// rank has for itself (its place in the data, its random numbers) is in rank_state_dict().
///
/// Refers to the parts, which must outlive it (pointers, holders and scripts are kept). Every rank adds the
/// same parts under the same names. Used by one thread at a time, and not while another changes the parts.
class TrainingState {
 public:
  TrainingState() = default;
  TrainingState(const TrainingState&) = delete;
  TrainingState& operator=(const TrainingState&) = delete;
  TrainingState(TrainingState&&) = default;
  TrainingState& operator=(TrainingState&&) = default;

  // All of these throw c10::ValueError for an empty name and for one that was there already.

  /// A model of any kind that model_tensors.h lists, in the form of state_dict(model): parameters and buffers
  /// under their names in the plain module, also of DistributedDataParallel. Of a FullyShardedDataParallel and its optimizer
  /// rank 0 has the whole, in memory of its own; saving and loading are collective then (is_collective()), and loading takes the
  /// memory of a whole model on each rank.
  template <ModelType Model>
  void add_model(std::string name, Model& model) {
    if constexpr (ShardedModel<Model>) {
      add_sharded_model(
          std::move(name), [&model] { return model.module_tensors(); },
          [&model] { return model.full_state_dict(/*rank0_only=*/true); },
          [&model](const std::function<void()>& load) { model.summon_full_params(load); });
      add_group(model.process_group());
    } else {
      add_model_tensors(std::move(name), model_tensors_later(model));
    }
  }
  /// An optimizer of `model`'s parameters, in the form of get_optimizer_state_dict(): by parameter name. Of a
  /// ZeroRedundancyOptimizer each rank has its part.
  template <ModelType Model>
  void add_optimizer(std::string name, torch::optim::Optimizer& optimizer, Model& model) {
    if constexpr (ShardedModel<Model>) {
      Part part;
      part.save = [&] { return model.full_optim_state_dict(optimizer, /*rank0_only=*/true); };
      part.prepare = [&](const StateDict& state, const LoadStateDictOptions& options) {
        return model.prepare_full_optim_state_dict(optimizer, state, options);
      };
      add_part(std::move(name), std::move(part), shared_);
      add_group(model.process_group());
    } else {
      add_optimizer_of(std::move(name), optimizer, model_tensors_later(model));
    }
  }
  /// The stages of a pipeline that this rank has: {stage}, by the names that their parameters and buffers have in their
  /// modules, which are to be those of the whole model (pipeline_stages(), Sequential::push_back(name, layer)).
  /// Collective over the stages' group; saving and loading are, too (is_collective()). What is saved is the state of the
  /// whole model in one process: any number of stages loads it, also interleaved ones, and the module itself. Each rank
  /// reads the whole. When the state does not fit on some rank, all throw, and nothing has changed on any. With data
  /// parallelism buffers are the first pipeline's. Throws c10::ValueError on all ranks for stages of functions that have
  /// parameters, and for a name on two stages that is not of a tied weight.
  void add_model(std::string name, const std::vector<PipelineStage>& stages);
  /// An optimizer of these stages' parameters, by their names, a tied weight by its first. All ranks' optimizers have equally
  /// many groups. Throws c10::ValueError for LBFGS, too, whose state can't be cut.
  void add_optimizer(std::string name, torch::optim::Optimizer& optimizer,
                     const std::vector<PipelineStage>& stages);
  /// Something whose state is the same on all ranks.
  template <Stateful T>
  void add(std::string name, T& part) {
    add_part(std::move(name), part_of(part), shared_);
  }
  /// A model, such as a swa_utils::AveragedModel.
  template <ModelType Model>
  requires(!Stateful<Model>) void add(std::string name, Model& model) { add_model(std::move(name), model); }
  /// Something of which each rank has its own, such as a DataLoader.
  template <Stateful T>
  void add_per_rank(std::string name, T& part) {
    add_part(std::move(name), part_of(part), per_rank_);
  }
  /// torch's random number generators of each rank (rng_state.h), as "rng".
  void add_rng();

  /// {"model": {…}, "optimizer": {…}}. Tensors share the parts' memory: copy them before training goes on.
  /// Ranks return different keys where an optimizer is sharded, and of pipelines, and their "rng" differs; the union over
  /// the ranks, key by key, is the state. Sends nothing, but for a FullyShardedDataParallel and a pipeline.
  StateDict state_dict() const;
  /// {"loader": {…}, "rng": {…}}: what is this rank's own.
  StateDict rank_state_dict() const;
  /// All ranks are needed to save and to load, for each has a part of a sharded model, or of a pipeline.
  bool is_collective() const { return !groups_.empty(); }

  /// Loads the union of all ranks' state_dict() into all parts, in place; every rank calls it with the same state, and
  /// nothing is sent, but for a FullyShardedDataParallel and a pipeline: then all ranks of its group load or none, and
  /// those that could throw c10::DistBackendError with the other ranks' causes. `options` are for names: of parts, and of
  /// tensors and parameters within models and optimizers ("model.head.weight" in what is returned and in errors; key_map
  /// gets "head.weight"). Throws, and has changed nothing, when something is missing, unexpected or does not fit; also
  /// when the first part that was added lacks memory for its values, which a FullyShardedDataParallel may.
  IncompatibleKeys load_state_dict(const StateDict& state, const LoadStateDictOptions& options = {});
  /// Loads this rank's rank_state_dict(). An empty state means that another number of ranks has written the
  /// checkpoint: then random numbers go on from what load_state_dict(), called before, found in the shared
  /// state (derive_rng_state()), and the other parts stay as they are: a loader begins its epoch anew.
  /// Throws, and has changed nothing, for a part that is missing, unexpected or throws.
  void load_rank_state_dict(const StateDict& state);

 private:
  struct Part {
    std::function<StateDict()> save;
    /// Checks; what is done last.
    std::function<PreparedLoad(const StateDict&, const LoadStateDictOptions&)> prepare;
    /// Of a part whose ranks check together: in the place of `prepare` where there is no state of it. Throws if other
    /// ranks have one.
    std::function<void()> prepare_without = {};
    /// Instead of `prepare`, for those that check and load in one.
    std::function<void(const StateDict&)> load;
  };
  using Parts = std::vector<std::pair<std::string, Part>>;

  template <Stateful T>
  static Part part_of(T& part) {
    return {.save = [&part] { return StateDict(part.state_dict()); },
            .prepare = {},
            .load = [&part](const StateDict& state) { part.load_state_dict(state); }};
  }
  void add_part(std::string name, Part part, Parts& parts);
  void add_group(const ProcessGroup& group);
  void add_model_tensors(std::string name, std::function<ModelTensors()> model);
  void add_sharded_model(std::string name, std::function<ModelTensors()> module,
                         std::function<StateDict()> save,
                         std::function<void(const std::function<void()>&)> summon);
  void add_optimizer_of(std::string name, torch::optim::Optimizer& optimizer,
                        std::function<ModelTensors()> model);
  static StateDict save(const Parts& parts);
  struct Preparation;
  static void prepare(const Parts& parts, const StateDict& state, const LoadStateDictOptions& options,
                      Preparation& to);
  /// The ranks of `groups` load all or nothing.
  static IncompatibleKeys load(const std::vector<ProcessGroup>& groups,
                               const std::function<void(Preparation&)>& prepare);

  Parts shared_;
  Parts per_rank_;
  bool has_rng_ = false;
  std::vector<ProcessGroup> groups_;  // of sharded models, each once
  std::optional<int64_t> old_rng_;    // the fingerprint in the state that was loaded last
};

}  // namespace lockstep
