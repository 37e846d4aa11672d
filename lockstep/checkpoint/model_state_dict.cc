#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>

#include <lockstep/checkpoint/model_state_dict.h>

namespace lockstep {
namespace {

std::string shape_of(const at::Tensor& tensor) {
  return c10::str("torch.Size(", tensor.sizes(), ")");
}

/// The state by the model's names, and what is wrong with those.
std::unordered_map<std::string, c10::IValue> renamed(const StateDict& state,
                                                     const LoadStateDictOptions& options,
                                                     LoadProblems& problems) {
  std::unordered_map<std::string, c10::IValue> by_name;
  std::unordered_map<std::string, std::string> origin;
  for (const auto& [key, value] : state) {
    const auto name = map_key(options.key_map, key);
    if (!name) continue;
    const auto [first, is_new] = origin.emplace(*name, key);
    if (is_new) {
      by_name.emplace(*name, value);
    } else {
      problems.messages.push_back("\"" + first->second + "\" and \"" + key + "\" both become \"" + *name +
                                  "\" by key_map.");
    }
  }
  return by_name;
}

/// The state's tensor in the form that the model's has; or nothing, and a problem.
at::Tensor fitted(const std::string& name, const c10::IValue& value, const at::Tensor& target,
                  LoadProblems& problems) {
  if (!value.isTensor() || !value.toTensor().defined()) {
    problems.messages.push_back("While copying the parameter named \"" + name +
                                "\", expected torch.Tensor or Tensor-like object from checkpoint but "
                                "received " +
                                value.tagKind());
    return {};
  }
  at::Tensor source = value.toTensor().detach();
  if (target.dim() == 0 && source.dim() == 1 && source.size(0) > 0) source = source[0];  // torch 0.3's files
  if (source.sizes() != target.sizes()) {
    problems.messages.push_back("size mismatch for " + name + ": copying a param with shape " +
                                shape_of(source) + " from checkpoint, the shape in current model is " +
                                shape_of(target) + ".");
    return {};
  }
  if (source.layout() != target.layout() || source.is_quantized() != target.is_quantized()) {
    problems.messages.push_back("While copying the parameter named \"" + name +
                                "\": it is sparse or quantized only in one of checkpoint and model.");
    return {};
  }
  return source;
}

}  // namespace

StateDict checkpoint::internal::state_dict_of(const ModelTensors& model) {
  StateDict state;
  for (const auto* tensors : {&model.parameters, &model.buffers}) {
    for (const auto& [name, tensor] : *tensors) {
      if (tensor.defined()) state.emplace(name, tensor.detach());
    }
  }
  return state;
}

PreparedLoad prepare_load_state_dict(const ModelTensors& model, const StateDict& state,
                                     const LoadStateDictOptions& options) {
  LoadProblems problems;
  const auto by_name = renamed(state, options, problems);
  std::unordered_set<std::string> known;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // to, from
  for (const auto* tensors : {&model.parameters, &model.buffers}) {
    for (const auto& [name, target] : *tensors) {
      if (!target.defined()) continue;
      known.insert(name);
      const auto found = by_name.find(name);
      if (found == by_name.end()) {
        problems.keys.missing_keys.push_back(name);
        continue;
      }
      at::Tensor source = fitted(name, found->second, target, problems);
      if (source.defined()) copies.emplace_back(target, std::move(source));
    }
  }
  for (const auto& [key, value] : state) {
    const auto name = map_key(options.key_map, key);
    if (name && known.insert(*name).second) problems.keys.unexpected_keys.push_back(*name);
  }
  problems.throw_if_any(model.name, options.strict);
  return {problems.keys, [copies = std::move(copies)] {
            const at::NoGradGuard no_grad;
            for (const auto& [to, from] : copies) to.copy_(from);
          }};
}

}  // namespace lockstep
