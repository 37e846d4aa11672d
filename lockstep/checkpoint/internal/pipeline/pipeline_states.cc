#include <algorithm>
#include <cstdint>
#include <exception>
#include <optional>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/optim/lbfgs.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/checkpoint/internal/pipeline/pipeline_states.h>
#include <lockstep/checkpoint/model_state_dict.h>
#include <lockstep/collectives/objects.h>
#include <lockstep/optim/optimizer_state_dict.h>

namespace lockstep::checkpoint::internal {
namespace {

constexpr const char* kOwner = "Pipeline";
/// The fault of a rank that has nothing to load.
constexpr const char* kNoState = "there is no state of this part in what is loaded";

/// A stage's index, its parameters' names with what tells which weight each is, and its buffers' names.
using ToldStage =
    std::tuple<int64_t, std::vector<std::pair<std::string, std::string>>, std::vector<std::string>>;
/// A rank's fault, or "", and its stages.
using Told = std::tuple<std::string, std::vector<ToldStage>>;

std::string of_rank(const ProcessGroup& group, size_t index) {
  return "on rank " + std::to_string(get_global_rank(group, static_cast<int>(index))) + ", ";
}

Told tell(const std::vector<PipelineStage>& stages) {
  Told told;
  std::unordered_map<const at::TensorImpl*, std::string> weights;
  const std::string rank = std::to_string(get_rank());
  if (stages.empty()) std::get<0>(told) = pipeline::internal::kNoStage;
  for (const PipelineStage& stage : stages) {
    if (stage.named_parameters().empty() && !stage.parameters().empty()) {
      std::get<0>(told) = "stage " + std::to_string(stage.stage_index()) +
                          " is a function, whose parameters have no names; make the stage of a module";
    }
    for (const auto& [name, tensor] : stage.options().tied) {
      weights[tensor.unsafeGetTensorImpl()] = "tied " + name;
    }
  }
  for (const PipelineStage& stage : stages) {
    auto& [index, parameters, buffers] = std::get<1>(told).emplace_back();
    index = stage.stage_index();
    for (const auto& [name, tensor] : stage.named_parameters()) {
      if (!tensor.defined()) continue;
      const std::string number = "rank " + rank + " number " + std::to_string(weights.size());
      parameters.emplace_back(name, weights.emplace(tensor.unsafeGetTensorImpl(), number).first->second);
    }
    for (const auto& [name, tensor] : stage.named_buffers()) {
      if (tensor.defined()) buffers.push_back(name);
    }
  }
  return told;
}

/// The names that the state's own have here.
std::vector<std::string> mapped(const std::vector<std::string>& keys, const LoadStateDictOptions& options) {
  std::vector<std::string> names;
  for (const std::string& key : keys) {
    if (const auto name = map_key(options.key_map, key)) names.push_back(*name);
  }
  return names;
}

/// Of an optimizer's state. None, where it has no such form, which loading it will say.
std::vector<std::string> parameters_in(const StateDict& state) {
  std::vector<std::string> names;
  try {
    for (const auto& group : state_value<std::vector<StateDict>>(state, "param_groups", kOwner)) {
      const auto of_group = state_value<std::vector<std::string>>(group, "params", kOwner);
      names.insert(names.end(), of_group.begin(), of_group.end());
    }
  } catch (const std::exception&) {
    names.clear();
  }
  return names;
}

/// An optimizer's state whose groups have only the parameters of this rank. A group of which this rank has none is then
/// one without parameters in the state, too, and so gets its options, such as the learning rate, by its place.
StateDict with_own_parameters(StateDict state, const LoadStateDictOptions& own) {
  auto groups = state_value<std::vector<StateDict>>(state, "param_groups", kOwner);
  for (StateDict& group : groups) {
    auto names = state_value<std::vector<std::string>>(group, "params", kOwner);
    std::erase_if(names, [&](const std::string& name) { return !map_key(own.key_map, name); });
    group["params"] = to_object(names);
  }
  state["param_groups"] = to_object(groups);
  return state;
}

}  // namespace

PipelineStates::PipelineStates(std::vector<PipelineStage> stages) : stages_(std::move(stages)) {
  group_ = pipeline::internal::group_of(stages_);
  const std::vector<Told> told = all_gather_values(tell(stages_), group_);
  std::map<int64_t, const ToldStage*> all;
  for (size_t i = 0; i < told.size(); ++i) {
    const auto& [fault, of_rank_i] = told[i];
    TORCH_CHECK_VALUE(fault.empty(), "the pipeline's state can't be saved: ", of_rank(group_, i), fault);
    for (const ToldStage& stage : of_rank_i) all.emplace(std::get<0>(stage), &stage);
  }
  std::map<std::string, std::pair<std::string, int64_t>> seen;  // by name: the weight, and where it was first
  std::map<std::string, std::string> first_of_weight;
  const auto see = [&](const std::string& name, const std::string& weight, int64_t index) {
    const auto [first, is_new] = seen.emplace(name, std::pair(weight, index));
    TORCH_CHECK_VALUE(
        is_new || (!weight.empty() && first->second.first == weight), "the name '", name, "' is on stage ",
        first->second.second, " and on stage ", index,
        ", so that a checkpoint can't hold both; let the stages' layers have the names that they "
        "have in the whole model (Sequential::push_back(name, layer), pipeline_stages()), or name "
        "the weight in PipelineStageOptions::tied if it is the same");
  };
  for (const auto& [index, stage] : all) {
    for (const auto& [name, weight] : std::get<1>(*stage)) {
      see(name, weight, index);
      const std::string& first = first_of_weight.emplace(weight, name).first->second;
      if (first != name) first_names_.emplace(name, first);
    }
    for (const std::string& name : std::get<2>(*stage)) see(name, "", index);
  }

  own_.name = kOwner;
  for (const PipelineStage& stage : stages_) {
    const auto& parameters = stage.named_parameters();
    const auto& buffers = stage.named_buffers();
    own_.parameters.insert(own_.parameters.end(), parameters.begin(), parameters.end());
    own_.buffers.insert(own_.buffers.end(), buffers.begin(), buffers.end());
  }
}

std::string PipelineStates::first_name(const std::string& name) const {
  const auto found = first_names_.find(name);
  return found == first_names_.end() ? name : found->second;
}

/// The parameters as optimizers' states know them: by their first names.
ModelTensors PipelineStates::own_weights() const {
  ModelTensors weights{.name = kOwner, .parameters = {}, .buffers = {}};
  for (const auto& [name, parameter] : own_.parameters) {
    if (parameter.defined()) weights.parameters.emplace_back(first_name(name), parameter);
  }
  return weights;
}

StateDict PipelineStates::state_dict() const {
  return state_dict_of(own_);
}

StateDict PipelineStates::optim_state_dict(const torch::optim::Optimizer& optimizer) const {
  StateDict state;
  std::vector<StateDict> groups;
  std::string fault;
  std::vector<Names> names;  // by group
  try {
    TORCH_CHECK_VALUE(dynamic_cast<const torch::optim::LBFGS*>(&optimizer) == nullptr,
                      "LBFGS has one state for all parameters together, which can't be cut into stages'");
    state = get_optimizer_state_dict(own_weights(), optimizer);
    groups = state_value<std::vector<StateDict>>(state, "param_groups", kOwner);
    for (const StateDict& group : groups) names.push_back(state_value<Names>(group, "params", kOwner));
  } catch (const std::exception& error) {
    fault = text_of(error);
  }
  const auto told = all_gather_values(std::pair(fault, names), group_);
  for (size_t i = 0; i < told.size(); ++i) {
    TORCH_CHECK_VALUE(told[i].first.empty(), "the optimizer's state can't be saved: ", of_rank(group_, i),
                      told[i].first);
    TORCH_CHECK_VALUE(
        told[i].second.size() == told[0].second.size(),
        "the ranks' optimizers have different numbers of parameter groups: ", of_rank(group_, i),
        told[i].second.size(), "; ", of_rank(group_, 0), told[0].second.size());
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    Names all;
    std::set<std::string> seen;
    for (const auto& [unused, of_rank_i] : told) {
      for (const std::string& name : of_rank_i[g]) {
        if (seen.insert(name).second) all.push_back(name);
      }
    }
    groups[g]["params"] = to_object(all);
  }
  state["param_groups"] = to_object(groups);
  return state;
}

PreparedLoad PipelineStates::prepare_load(const StateDict& state, const LoadStateDictOptions& options) const {
  Names wanted, keys;
  for (const auto* tensors : {&own_.parameters, &own_.buffers}) {
    for (const auto& [name, tensor] : *tensors) {
      if (tensor.defined()) wanted.push_back(name);
    }
  }
  for (const auto& [key, unused] : state) keys.push_back(key);
  return load_on_all(
      wanted,
      [&] {
        return Given{prepare_load_state_dict(own_, state, for_own(options, wanted)), mapped(keys, options)};
      },
      options.strict);
}

PreparedLoad PipelineStates::prepare_optim_load(torch::optim::Optimizer& optimizer, const StateDict& state,
                                                const LoadStateDictOptions& options) const {
  const ModelTensors weights = own_weights();
  Names wanted;
  std::set<const at::TensorImpl*> optimized;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) optimized.insert(parameter.unsafeGetTensorImpl());
  }
  for (const auto& [name, parameter] : weights.parameters) {
    if (optimized.contains(parameter.unsafeGetTensorImpl())) wanted.push_back(name);
  }
  LoadStateDictOptions to_first_names = options;
  to_first_names.key_map.emplace_back(
      [this](const std::string& name) { return std::optional(first_name(name)); });
  return load_on_all(
      wanted,
      [&] {
        const LoadStateDictOptions own = for_own(to_first_names, wanted);
        return Given{prepare_optimizer_state_dict(weights, optimizer, with_own_parameters(state, own), own),
                     mapped(parameters_in(state), to_first_names)};
      },
      options.strict);
}

void PipelineStates::none_to_load() const {
  load_on_all({}, {}, /*strict=*/false);
}

/// The options by which a rank takes what is its own of a whole state, and leaves out what is not.
LoadStateDictOptions PipelineStates::for_own(LoadStateDictOptions options, const Names& wanted) {
  options.strict = false;
  options.key_map.emplace_back(
      [names = std::set<std::string>(wanted.begin(), wanted.end())](const std::string& name) {
        return names.contains(name) ? std::optional(name) : std::nullopt;
      });
  return options;
}

/// `wanted`: this rank's names. `prepare`: none on a rank that has no state.
PreparedLoad PipelineStates::load_on_all(const Names& wanted, const std::function<Given()>& prepare,
                                         bool strict) const {
  Given given;
  std::string fault = prepare ? "" : kNoState;
  try {
    if (prepare) given = prepare();
  } catch (const std::exception& error) {
    fault = text_of(error);
  }
  const auto told = all_gather_values(std::tuple(fault, wanted, given.load.keys.missing_keys), group_);
  if (std::ranges::all_of(told, [](const auto& of_rank_i) { return std::get<0>(of_rank_i) == kNoState; })) {
    return {};
  }
  LoadProblems problems;
  std::set<std::string> known, missing;
  for (size_t i = 0; i < told.size(); ++i) {
    const auto& [fault_i, wanted_i, missing_i] = told[i];
    if (!fault_i.empty()) problems.messages.push_back(of_rank(group_, i) + fault_i);
    known.insert(wanted_i.begin(), wanted_i.end());
    for (const std::string& name : missing_i) {
      if (missing.insert(name).second) problems.keys.missing_keys.push_back(name);
    }
  }
  for (const std::string& name : given.names) {
    if (!known.contains(name)) problems.keys.unexpected_keys.push_back(name);
  }
  problems.throw_if_any(kOwner, strict);
  return {std::move(problems.keys), std::move(given.load.commit)};
}

}  // namespace lockstep::checkpoint::internal
