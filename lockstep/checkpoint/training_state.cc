#include <algorithm>
#include <exception>
#include <memory>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/rethrow_with_context.h>
#include <lockstep/base/world_defaults.h>
#include <lockstep/checkpoint/internal/pipeline/pipeline_states.h>
#include <lockstep/checkpoint/model_state_dict.h>
#include <lockstep/checkpoint/rng_state.h>
#include <lockstep/checkpoint/training_state.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/collectives/groups/spread_failure.h>
#include <lockstep/collectives/objects.h>
#include <lockstep/optim/optimizer_state_dict.h>

namespace lockstep {
namespace checkpoint::internal {

/// Loads that run one after the other, and can all be undone.
class UndoableLoads {
 public:
  using Load = std::function<void(const StateDict&)>;

  /// `before`: the state of now.
  void run(const std::string& name, const Load& load, const StateDict& state, const StateDict& before) {
    // Its tensors may be the part's own.
    done_.emplace_back(load, from_object<StateDict>(to_object(before).deepcopy()));
    try {
      load(state);
    } catch (...) {
      done_.pop_back();  // a part that throws has changed nothing
      rethrow_with_context("while loading '" + name + "' of a TrainingState");
    }
  }
  void undo() {
    for (auto entry = done_.rbegin(); entry != done_.rend(); ++entry) entry->first(entry->second);
  }

 private:
  std::vector<std::pair<Load, StateDict>> done_;
};

}  // namespace checkpoint::internal

namespace {

constexpr const char* kRng = "rng";
constexpr const char* kFingerprint = "fingerprint";

StateDict inner_state(const StateDict& state, const std::string& name) {
  return state_value<StateDict>(state, name, "TrainingState");
}

WorldDefaults place() {
  return world_defaults().value_or(WorldDefaults{});
}

std::vector<std::string> with_prefix(const std::string& part, const std::vector<std::string>& keys) {
  std::vector<std::string> answer;
  for (const std::string& key : keys) answer.push_back(part + "." + key);
  return answer;
}

void append(std::vector<std::string>& to, const std::vector<std::string>& keys) {
  to.insert(to.end(), keys.begin(), keys.end());
}

/// What other ranks of the group say that fails there; empty if nothing does. Collective.
std::string failures_of_others(const ProcessGroup& group, const std::string& own) {
  const CallSite site(CallSite::kCheckpoint);
  const std::vector<std::string> texts = all_gather_values(own, group);
  std::string failures;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const std::string& text = texts[rank];
    if (text.empty() || static_cast<int>(rank) == get_rank(group)) continue;
    if (!failures.empty()) failures += "; ";
    failures += "rank " + std::to_string(get_global_rank(group, static_cast<int>(rank))) + ": " + text;
  }
  return failures;
}

/// Throws when this rank's `error` is one, or another rank of the groups has one. Collective.
void check_all_are_ready(const std::exception_ptr& error, const std::vector<ProcessGroup>& groups) {
  const std::string own = error ? text_of(error) : "";
  std::string others;
  try {
    for (const ProcessGroup& group : groups) {
      const std::string failures = failures_of_others(group, own.empty() ? others : own);
      if (others.empty()) others = failures;
    }
  } catch (...) {
    spread_failure(groups);
    if (!error) throw;  // what this rank has found is nearer to the cause
  }
  if (error) std::rethrow_exception(error);
  TORCH_CHECK_WITH(DistBackendError, others.empty(),
                   "TrainingState: nothing was loaded, for other ranks can't: ", others);
}

}  // namespace

void TrainingState::add_part(std::string name, Part part, Parts& parts) {
  TORCH_CHECK_VALUE(!name.empty(), "TrainingState: a part needs a name");
  for (const Parts* known : {&shared_, &per_rank_}) {
    const bool taken =
        std::any_of(known->begin(), known->end(), [&](const auto& entry) { return entry.first == name; });
    TORCH_CHECK_VALUE(!taken, "TrainingState: there is a part '", name, "' already");
  }
  parts.emplace_back(std::move(name), std::move(part));
}

void TrainingState::add_model_tensors(std::string name, std::function<ModelTensors()> model) {
  model();  // throws for an empty one
  Part part;
  part.save = [model] { return checkpoint::internal::state_dict_of(model()); };
  part.prepare = [model](const StateDict& state, const LoadStateDictOptions& options) {
    return prepare_load_state_dict(model(), state, options);
  };
  add_part(std::move(name), std::move(part), shared_);
}

/// Values can be set where the module's parameters have memory of their own.
void TrainingState::add_sharded_model(std::string name, std::function<ModelTensors()> module,
                                      std::function<StateDict()> save,
                                      std::function<void(const std::function<void()>&)> summon) {
  Part part;
  part.save = std::move(save);
  part.prepare = [module, summon](const StateDict& state, const LoadStateDictOptions& options) {
    PreparedLoad load = prepare_load_state_dict(module(), state, options);
    load.commit = [summon, commit = std::move(load.commit)] { summon(commit); };
    return load;
  };
  add_part(std::move(name), std::move(part), shared_);
}

void TrainingState::add_group(const ProcessGroup& group) {
  if (std::ranges::find(groups_, group) == groups_.end()) groups_.push_back(group);
}

void TrainingState::add_optimizer_of(std::string name, torch::optim::Optimizer& optimizer,
                                     std::function<ModelTensors()> model) {
  get_optimizer_state_dict(model(), optimizer);  // throws for one that can't be saved, or isn't the model's
  Part part;
  part.save = [model, &optimizer] { return get_optimizer_state_dict(model(), optimizer); };
  part.prepare = [model, &optimizer](const StateDict& state, const LoadStateDictOptions& options) {
    return prepare_optimizer_state_dict(model(), optimizer, state, options);
  };
  add_part(std::move(name), std::move(part), shared_);
}

void TrainingState::add_model(std::string name, const std::vector<PipelineStage>& stages) {
  const auto states = std::make_shared<checkpoint::internal::PipelineStates>(stages);
  Part part;
  part.save = [states] { return states->state_dict(); };
  part.prepare = [states](const StateDict& state, const LoadStateDictOptions& options) {
    return states->prepare_load(state, options);
  };
  part.prepare_without = [states] { states->none_to_load(); };
  add_part(std::move(name), std::move(part), shared_);
  add_group(states->group());
}

void TrainingState::add_optimizer(std::string name, torch::optim::Optimizer& optimizer,
                                  const std::vector<PipelineStage>& stages) {
  const auto states = std::make_shared<checkpoint::internal::PipelineStates>(stages);
  states->optim_state_dict(optimizer);  // throws for one that can't be saved, or isn't the stages'
  Part part;
  part.save = [states, &optimizer] { return states->optim_state_dict(optimizer); };
  part.prepare = [states, &optimizer](const StateDict& state, const LoadStateDictOptions& options) {
    return states->prepare_optim_load(optimizer, state, options);
  };
  part.prepare_without = [states] { states->none_to_load(); };
  add_part(std::move(name), std::move(part), shared_);
  add_group(states->group());
}

void TrainingState::add_rng() {
  TORCH_CHECK_VALUE(!has_rng_, "TrainingState: add_rng() was called already");
  Part own;
  own.save = get_rng_state;
  own.load = set_rng_state;
  add_part(kRng, std::move(own), per_rank_);
  has_rng_ = true;
}

StateDict TrainingState::save(const Parts& parts) {
  StateDict state;
  for (const auto& [name, part] : parts) state.emplace(name, to_object(part.save()));
  return state;
}

StateDict TrainingState::state_dict() const {
  StateDict state = save(shared_);
  if (has_rng_) {
    state.emplace(kRng, to_object(StateDict{{kFingerprint, rng_fingerprint()}}));
  }
  return state;
}

StateDict TrainingState::rank_state_dict() const {
  return save(per_rank_);
}

/// What has been checked, and what has been loaded already by then.
struct TrainingState::Preparation {
  LoadProblems problems;
  std::vector<PreparedLoad> loads;
  checkpoint::internal::UndoableLoads undoable;
};

void TrainingState::prepare(const Parts& parts, const StateDict& state, const LoadStateDictOptions& options,
                            Preparation& to) {
  std::vector<std::pair<const std::pair<std::string, Part>*, StateDict>> loads;
  std::exception_ptr error;
  // After an error, too, this rank goes through all parts: a pipeline's ranks check each of its parts together.
  const auto attempt = [&](const std::string& name, const auto& action) {
    try {
      try {
        action();
      } catch (...) {
        rethrow_with_context("while loading '" + name + "' of a TrainingState");
      }
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  };
  StateDict rest = state;
  for (const auto& entry : parts) {
    const auto& [name, part] = entry;
    std::optional<StateDict> inner;
    if (rest.erase(name) == 0) {
      to.problems.keys.missing_keys.push_back(name);
    } else {
      attempt(name, [&] { inner = inner_state(state, name); });
    }
    if (!inner) {
      if (part.prepare_without) attempt(name, part.prepare_without);
    } else if (!part.prepare) {
      loads.emplace_back(&entry, std::move(*inner));
    } else {
      attempt(name, [&] {
        auto load = part.prepare(*inner, options);
        append(to.problems.keys.missing_keys, with_prefix(name, load.keys.missing_keys));
        append(to.problems.keys.unexpected_keys, with_prefix(name, load.keys.unexpected_keys));
        to.loads.push_back(std::move(load));
      });
    }
  }
  if (error) std::rethrow_exception(error);
  for (const auto& [name, unused] : rest) to.problems.keys.unexpected_keys.push_back(name);
  to.problems.throw_if_any("TrainingState", options.strict);

  // Those that may still refuse come first. So a scheduler finds the optimizer as it was; what it sets there
  // is what the optimizer's own state says, which comes after it.
  for (const auto& [entry, inner] : loads) {
    to.undoable.run(entry->first, entry->second.load, inner, entry->second.save());
  }
}

/// No rank commits before all have prepared: commit() of a sharded model would wait for those that have not.
IncompatibleKeys TrainingState::load(const std::vector<ProcessGroup>& groups,
                                     const std::function<void(Preparation&)>& prepare) {
  Preparation prepared;
  std::exception_ptr error;
  try {
    prepare(prepared);
  } catch (...) {
    error = std::current_exception();
  }
  bool has_committed = false;
  try {
    check_all_are_ready(error, groups);
    for (const PreparedLoad& load : prepared.loads) {
      load.commit();
      has_committed = true;
    }
  } catch (...) {
    // A sharded model that has not got the memory for a commit is as it was, and so are other parts then.
    if (!has_committed) prepared.undoable.undo();
    throw;
  }
  return std::move(prepared.problems.keys);
}

IncompatibleKeys TrainingState::load_state_dict(const StateDict& state, const LoadStateDictOptions& options) {
  std::optional<int64_t> fingerprint;
  auto keys = load(groups_, [&](Preparation& to) {
    StateDict parts = state;
    const bool has_fingerprint = has_rng_ && parts.erase(kRng) > 0;
    prepare(shared_, parts, options, to);
    if (has_fingerprint) {
      fingerprint = state_value<int64_t>(inner_state(state, kRng), kFingerprint, "TrainingState");
    }
  });
  old_rng_ = fingerprint;
  return keys;
}

void TrainingState::load_rank_state_dict(const StateDict& state) {
  if (!state.empty() || per_rank_.empty()) {
    load({}, [&](Preparation& to) { prepare(per_rank_, state, {}, to); });
    return;
  }
  if (has_rng_ && old_rng_) derive_rng_state(*old_rng_, place().rank, place().world_size);
}

}  // namespace lockstep
