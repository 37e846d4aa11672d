#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/tensor_tree.h>
#include <lockstep/optim/internal/optimizer_formats.h>
#include <lockstep/optim/internal/optimizer_parts.h>
#include <lockstep/optim/internal/scheduled_groups.h>
#include <lockstep/optim/optimizer_state_dict.h>

namespace lockstep {

using internal::format_of;
using internal::OptimizerParts;
using internal::ScheduledGroups;

namespace {

using c10::IValue;
using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

/// The keys of a parameter group that are schedulers' notes.
constexpr std::pair<const char*, std::optional<double> ScheduledGroups::Group::*> kNotes[] = {
    {"initial_lr", &ScheduledGroups::Group::initial_lr},
    {"max_lr", &ScheduledGroups::Group::max_lr},
    {"min_lr", &ScheduledGroups::Group::min_lr},
    {"max_momentum", &ScheduledGroups::Group::max_momentum},
    {"base_momentum", &ScheduledGroups::Group::base_momentum},
    {"swa_lr", &ScheduledGroups::Group::swa_lr},
};

// ---- Saving ----

/// `ids`: what stands for each parameter, by group.
StateDict write_state(const OptimizerParts& parts, const std::vector<std::vector<IValue>>& ids) {
  const OptimizerFormat& format = format_of(parts.local());
  const auto notes = ScheduledGroups::of(parts.outer());
  auto states = serialization::make_object_dict();
  auto groups = serialization::make_object_list(ids.size());
  for (size_t g = 0; g < ids.size(); ++g) {
    StateDict group = format.get_options(parts.outer().param_groups()[g].options());
    for (const auto& [key, note] : kNotes) {
      if (const auto& value = notes->groups()[g].*note) group[key] = *value;
    }
    group["params"] = to_object(ids[g]);
    groups.push_back(to_object(group));
    for (size_t i = 0; i < ids[g].size(); ++i) {
      const auto state = parts.local().state().find(parts.keys()[g][i]);
      if (state == parts.local().state().end()) continue;
      StateDict values = format.get_state(*state->second);
      if (!values.empty()) states.insert(ids[g][i], to_object(values));
    }
  }
  StateDict answer{{"state", states}, {"param_groups", groups}};
  if (parts.averager()) answer["step"] = parts.averager()->step();
  return answer;
}

/// The optimizer, to be read only: its parts are found in one way for reading and writing.
Optimizer& for_reading(const Optimizer& optimizer) {
  return const_cast<Optimizer&>(optimizer);  // NOLINT(cppcoreguidelines-pro-type-const-cast)
}

/// The model's names of the optimizer's parameters, by group.
std::vector<std::vector<std::string>> names_of(const ModelTensors& model, const Optimizer& optimizer) {
  std::unordered_map<const void*, std::string> names;
  for (const auto& [name, parameter] : model.parameters) {
    names.emplace(parameter.unsafeGetTensorImpl(), name);  // the first one stays
  }
  std::vector<std::vector<std::string>> answer;
  for (const auto& group : optimizer.param_groups()) {
    auto& of_group = answer.emplace_back();
    for (const at::Tensor& parameter : group.params()) {
      const auto found = names.find(parameter.unsafeGetTensorImpl());
      TORCH_CHECK_VALUE(found != names.end(), "parameter ", of_group.size(), " of the optimizer's group ",
                        answer.size() - 1, ", of sizes ", parameter.sizes(), ", is none of the model ",
                        model.name, "; give the model whose parameters() the optimizer was made of");
      of_group.push_back(found->second);
    }
  }
  return answer;
}

// ---- Loading ----

using ParamStates = std::vector<std::pair<void*, std::shared_ptr<std::unique_ptr<OptimizerParamState>>>>;

/// Checks a state group by group, and collects what loading it will do.
class Loader {
 public:
  explicit Loader(Optimizer& optimizer) : parts_(optimizer), format_(format_of(parts_.local())) {}

  std::string name() const { return format_.optimizer_name(); }
  const OptimizerParts& parts() const { return parts_; }
  LoadProblems& problems() { return problems_; }
  bool needs_same_order() const { return !format_.has_state_per_parameter(); }

  void take_options(size_t group, const StateDict& options) {
    try {
      auto& checked = options_[group];
      checked = parts_.outer().param_groups()[group].options().clone();
      format_.set_options(options, *checked);
      new_options_.emplace_back(group, options);
    } catch (const std::exception& error) {
      problem("parameter group " + std::to_string(group), error);
    }
  }

  /// Null: the parameter has no state.
  void take_state(size_t group, size_t index, const std::string& label, const StateDict* state) {
    void* key = parts_.keys()[group][index];
    if (!key) return;  // another rank's
    auto made = std::make_shared<std::unique_ptr<OptimizerParamState>>();
    try {
      const auto options = options_.find(group);
      const auto& param_group = parts_.outer().param_groups()[group];
      if (state && !state->empty()) {
        *made = format_.make_state(
            *state, param_group.params()[index],
            options == options_.end() || !options->second ? param_group.options() : *options->second);
      }
    } catch (const std::exception& error) {
      problem("the state of " + label, error);
    }
    states_.emplace_back(key, std::move(made));
  }

  void take_averager_step(const StateDict& state) {
    if (!parts_.averager()) return;
    try {
      averager_step_ = state.contains("step") ? optimizer_format::step_at(state) : 0;
    } catch (const std::exception& error) {
      problem("the averager's step", error);
    }
  }

  PreparedLoad finish(bool strict) {
    problems_.throw_if_any(name(), strict);
    return {problems_.keys, [self = std::make_shared<Loader>(std::move(*this))] { self->commit(); }};
  }

 private:
  void problem(const std::string& where, const std::exception& error) {
    problems_.messages.push_back(where + ": " + text_of(error));
  }

  void commit() {
    const auto notes = ScheduledGroups::of(parts_.outer());
    for (const auto& [group, options] : new_options_) {
      for (Optimizer* optimizer : parts_.optimizers()) {
        format_.set_options(options, optimizer->param_groups()[group].options());
      }
      for (const auto& [key, note] : kNotes) {
        auto& value = notes->groups()[group].*note;
        value.reset();
        if (optimizer_format::has(options, key)) value = optimizer_format::number_at(options, key);
      }
    }
    auto& states = parts_.local().state();
    for (const auto& [key, state] : states_) {
      if (*state) {
        states[key] = std::move(*state);
      } else {
        states.erase(key);
      }
    }
    if (averager_step_) parts_.averager()->set_step(*averager_step_);
    parts_.forget_consolidated();
  }

  OptimizerParts parts_;
  const OptimizerFormat& format_;
  LoadProblems problems_;
  std::map<size_t, std::unique_ptr<OptimizerOptions>> options_;  // as they will be
  std::vector<std::pair<size_t, StateDict>> new_options_;
  ParamStates states_;
  std::optional<int64_t> averager_step_;
};

/// A parameter's number or name in a state.
std::string id_of(const IValue& id) {
  if (id.isInt()) return std::to_string(id.toInt());
  return from_object<std::string>(id);
}

struct SavedGroup {
  StateDict options;
  std::vector<std::string> ids;
};

/// The two halves of a state. Throws c10::ValueError when they are of another form.
struct SavedState {
  explicit SavedState(const StateDict& state) {
    constexpr const char* kOwner = "Optimizer";
    for (auto& group : state_value<std::vector<StateDict>>(state, "param_groups", kOwner)) {
      auto& saved = groups.emplace_back();
      for (const IValue& id : state_value<std::vector<IValue>>(group, "params", kOwner)) {
        saved.ids.push_back(id_of(id));
      }
      saved.options = std::move(group);
    }
    const auto whole = state_value<IValue>(state, "state", kOwner);
    TORCH_CHECK_VALUE(whole.isGenericDict(), "Optimizer::load_state_dict: 'state' is no dict");
    for (const auto& item : whole.toGenericDict()) {
      states.emplace(id_of(item.key()), from_object<StateDict>(item.value()));
    }
  }

  const StateDict* state_of(const std::string& id) const {
    const auto found = states.find(id);
    return found == states.end() ? nullptr : &found->second;
  }

  std::vector<SavedGroup> groups;
  std::map<std::string, StateDict> states;
};

/// Which of the state's groups has each parameter, by the parameter's name in the model, and its id there.
using ByName = std::map<std::string, std::pair<size_t, std::string>>;

ByName find_names(const SavedState& saved, const LoadStateDictOptions& options, LoadProblems& problems) {
  ByName by_name;
  for (size_t g = 0; g < saved.groups.size(); ++g) {
    for (const std::string& id : saved.groups[g].ids) {
      const auto name = map_key(options.key_map, id);
      if (!name) continue;
      const auto [first, is_new] = by_name.emplace(*name, std::pair(g, id));
      if (!is_new) {
        problems.messages.push_back("\"" + first->second.second + "\" and \"" + id + "\" both are \"" +
                                    *name + "\".");
      }
    }
  }
  return by_name;
}

/// A state has a parameter of several names under the one that came first in the model which has written it; in a
/// pipeline's stages that may be another one than here. So what is not there under the first name is taken from another.
void rename_to_first(const ModelTensors& model, ByName& by_name) {
  std::unordered_map<const void*, std::string> firsts;
  for (const auto& [name, parameter] : model.parameters) {
    if (!parameter.defined()) continue;
    const std::string& first = firsts.emplace(parameter.unsafeGetTensorImpl(), name).first->second;
    if (first == name || by_name.contains(first)) continue;
    if (auto other = by_name.extract(name)) {
      other.key() = first;
      by_name.insert(std::move(other));
    }
  }
}

/// Whether the group of the state has these parameters and no others, in this order.
bool same_order(const std::vector<std::string>& names, const std::vector<SavedGroup>& groups,
                std::optional<size_t> source, const LoadStateDictOptions& options) {
  if (!source) return true;  // none of them is there
  std::vector<std::string> saved;
  for (const std::string& id : groups[*source].ids) {
    if (const auto name = map_key(options.key_map, id)) saved.push_back(*name);
  }
  return saved == names;
}

}  // namespace

StateDict state_dict(const Optimizer& optimizer) {
  const auto parts = OptimizerParts::consolidated(for_reading(optimizer));
  std::vector<std::vector<IValue>> ids;
  int64_t next = 0;
  for (const auto& group : optimizer.param_groups()) {
    auto& of_group = ids.emplace_back();
    for (size_t i = 0; i < group.params().size(); ++i) of_group.emplace_back(next++);
  }
  return write_state(parts, ids);
}

void load_state_dict(Optimizer& optimizer, const StateDict& state) {
  Loader loader(optimizer);
  const SavedState saved(state);
  const auto& groups = optimizer.param_groups();
  TORCH_CHECK_VALUE(saved.groups.size() == groups.size(),
                    "loaded state dict has a different number of parameter groups: ", saved.groups.size(),
                    ", the optimizer has ", groups.size());
  std::set<std::string> known;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& ids = saved.groups[g].ids;
    TORCH_CHECK_VALUE(ids.size() == groups[g].params().size(),
                      "loaded state dict contains a parameter group that doesn't match the size of "
                      "optimizer's group: group ",
                      g, " has ", ids.size(), " parameters, the optimizer's ", groups[g].params().size());
    loader.take_options(g, saved.groups[g].options);
    for (size_t i = 0; i < ids.size(); ++i) {
      known.insert(ids[i]);
      loader.take_state(g, i, "parameter " + ids[i], saved.state_of(ids[i]));
    }
  }
  for (const auto& [id, unused] : saved.states) {
    if (!known.contains(id)) loader.problems().keys.unexpected_keys.push_back(id);
  }
  loader.take_averager_step(state);
  loader.finish(/*strict=*/true).commit();
}

StateDict get_optimizer_state_dict(const ModelTensors& model, const Optimizer& optimizer) {
  std::vector<std::vector<IValue>> ids;
  for (const auto& names : names_of(model, optimizer)) ids.emplace_back(names.begin(), names.end());
  return write_state(OptimizerParts(for_reading(optimizer)), ids);
}

std::vector<at::Tensor> optimizer_state_tensors(const Optimizer& optimizer) {
  const OptimizerParts parts(for_reading(optimizer));
  const OptimizerFormat& format = format_of(parts.local());
  std::vector<at::Tensor> tensors;
  for (const auto& [key, state] : parts.local().state()) {
    StateDict values = format.get_state(*state);
    values.erase("step");
    for_each_tensor(std::as_const(values), [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  }
  return tensors;
}

PreparedLoad prepare_optimizer_state_dict(const ModelTensors& model, Optimizer& optimizer,
                                          const StateDict& state, const LoadStateDictOptions& options) {
  Loader loader(optimizer);
  const SavedState saved(state);
  LoadProblems& problems = loader.problems();
  auto by_name = find_names(saved, options, problems);
  rename_to_first(model, by_name);
  const auto names = names_of(model, optimizer);
  std::set<std::string> known;
  for (size_t g = 0; g < names.size(); ++g) {
    std::optional<size_t> source;
    for (const std::string& name : names[g]) {
      const auto found = by_name.find(name);
      if (found == by_name.end()) continue;
      if (source.value_or(found->second.first) != found->second.first) {
        problems.messages.push_back("the parameters of group " + std::to_string(g) +
                                    " are in several groups of the state: \"" + name + "\" is in group " +
                                    std::to_string(found->second.first) + ", others are in group " +
                                    std::to_string(*source) + ".");
        break;
      }
      source = found->second.first;
    }
    if (loader.needs_same_order() && !same_order(names[g], saved.groups, source, options)) {
      problems.messages.push_back(loader.name() +
                                  " has one state for all parameters, in their order, and that is "
                                  "another one here than in the state.");
    }
    // A group without parameters can be known by its place only.
    if (names[g].empty() && g < saved.groups.size() && saved.groups[g].ids.empty()) source = g;
    if (source) loader.take_options(g, saved.groups[*source].options);
    for (size_t i = 0; i < names[g].size(); ++i) {
      const auto found = by_name.find(names[g][i]);
      if (found == by_name.end()) {
        problems.keys.missing_keys.push_back(names[g][i]);
        continue;
      }
      loader.take_state(g, i, "\"" + names[g][i] + "\"", saved.state_of(found->second.second));
      known.insert(names[g][i]);
    }
  }
  for (const auto& [name, unused] : by_name) {
    if (!known.contains(name)) problems.keys.unexpected_keys.push_back(name);
  }
  loader.take_averager_step(state);
  return loader.finish(options.strict);
}

IncompatibleKeys set_optimizer_state_dict(const ModelTensors& model, Optimizer& optimizer,
                                          const StateDict& state, const LoadStateDictOptions& options) {
  PreparedLoad load = prepare_optimizer_state_dict(model, optimizer, state, options);
  load.commit();
  return std::move(load.keys);
}

}  // namespace lockstep
