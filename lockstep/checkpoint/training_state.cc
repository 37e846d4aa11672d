#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/rethrow_with_context.h>
#include <lockstep/base/world_defaults.h>
#include <lockstep/checkpoint/model_state_dict.h>
#include <lockstep/checkpoint/rng_state.h>
#include <lockstep/checkpoint/training_state.h>
#include <lockstep/optim/optimizer_state_dict.h>

namespace lockstep {
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

/// Runs loads one after the other; when one throws, the ones before it are undone.
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
      const auto error = std::current_exception();
      done_.pop_back();  // a part that throws has changed nothing
      undo();
      try {
        std::rethrow_exception(error);
      } catch (...) {
        rethrow_with_context("while loading '" + name + "' of a TrainingState");
      }
    }
  }

 private:
  void undo() {
    for (auto entry = done_.rbegin(); entry != done_.rend(); ++entry) entry->first(entry->second);
  }

  std::vector<std::pair<Load, StateDict>> done_;
};

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
  is_collective_ = true;
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

IncompatibleKeys TrainingState::load(const Parts& parts, const StateDict& state,
                                     const LoadStateDictOptions& options) {
  LoadProblems problems;
  std::vector<std::pair<const std::string*, PreparedLoad>> prepared;
  std::vector<std::pair<const std::pair<std::string, Part>*, StateDict>> loads;
  StateDict rest = state;
  for (const auto& entry : parts) {
    const auto& [name, part] = entry;
    if (rest.erase(name) == 0) {
      problems.keys.missing_keys.push_back(name);
      continue;
    }
    StateDict inner = inner_state(state, name);
    if (!part.prepare) {
      loads.emplace_back(&entry, std::move(inner));
      continue;
    }
    try {
      auto load = part.prepare(inner, options);
      append(problems.keys.missing_keys, with_prefix(name, load.keys.missing_keys));
      append(problems.keys.unexpected_keys, with_prefix(name, load.keys.unexpected_keys));
      prepared.emplace_back(&name, std::move(load));
    } catch (...) {
      rethrow_with_context("while loading '" + name + "' of a TrainingState");
    }
  }
  for (const auto& [name, unused] : rest) problems.keys.unexpected_keys.push_back(name);
  problems.throw_if_any("TrainingState", options.strict);

  // Those that may still refuse come first. So a scheduler finds the optimizer as it was; what it sets there
  // is what the optimizer's own state says, which comes after it.
  UndoableLoads undoable;
  for (const auto& [entry, inner] : loads) {
    undoable.run(entry->first, entry->second.load, inner, entry->second.save());
  }
  for (const auto& [name, load] : prepared) load.commit();
  return std::move(problems.keys);
}

IncompatibleKeys TrainingState::load_state_dict(const StateDict& state, const LoadStateDictOptions& options) {
  StateDict parts = state;
  std::optional<int64_t> fingerprint;
  if (has_rng_ && parts.contains(kRng)) {
    fingerprint = state_value<int64_t>(inner_state(state, kRng), kFingerprint, "TrainingState");
    parts.erase(kRng);
  }
  auto keys = load(shared_, parts, options);
  old_rng_ = fingerprint;
  return keys;
}

void TrainingState::load_rank_state_dict(const StateDict& state) {
  if (!state.empty() || per_rank_.empty()) {
    load(per_rank_, state, {});
    return;
  }
  if (has_rng_ && old_rng_) derive_rng_state(*old_rng_, place().rank, place().world_size);
}

}  // namespace lockstep
