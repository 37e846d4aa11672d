#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

/// What loading a state into something that has names is told, and answers: models and optimizers alike.
namespace lockstep {

/// What did not fit. torch/nn/modules/module.py, _IncompatibleKeys.
struct IncompatibleKeys {
  std::vector<std::string> missing_keys;     ///< wanted, but not in the state
  std::vector<std::string> unexpected_keys;  ///< in the state, but not wanted
};

/// The name that a name of the state has here; nothing: it is left out. Any function will do:
///
///     [](const std::string& key) { return key.starts_with("head.") ? std::nullopt : std::optional(key); }
using KeyMap = std::function<std::optional<std::string>(const std::string& key)>;

/// Takes `prefix` from the names that have it: strip_prefix("module.") for what Python's
/// DistributedDataParallel has saved. torch/nn/modules/utils.py, consume_prefix_in_state_dict_if_present.
KeyMap strip_prefix(std::string prefix);
/// Names that are in the table get its other name; the others stay.
KeyMap rename_keys(std::map<std::string, std::string> new_names);
/// Replaces all matches of a regular expression (ECMAScript's, as std::regex), with $1, $2, … for its groups.
/// Throws c10::ValueError for a pattern that is none.
KeyMap replace_in_keys(const std::string& pattern, std::string replacement);

struct LoadStateDictOptions {
  bool strict = true;  ///< names that are missing or unexpected are an error; sizes must agree in any case
  std::vector<KeyMap> key_map = {};  ///< applied to each name of the state, one after the other
};

/// `key` by all of `maps`, in order.
std::optional<std::string> map_key(const std::vector<KeyMap>& maps, const std::string& key);

/// Everything that is wrong with a state, collected before anything is changed.
struct LoadProblems {
  IncompatibleKeys keys;
  std::vector<std::string> messages;  ///< errors even when not strict

  /// Throws c10::Error with all of them, in the words of torch.nn.Module.load_state_dict(), if there are any.
  void throw_if_any(const std::string& owner, bool strict) const;
};

/// A state that was checked against what it is for, and is not loaded yet. commit() loads it; it fails only
/// where memory or a device does.
struct PreparedLoad {
  IncompatibleKeys keys;
  std::function<void()> commit;
};

}  // namespace lockstep
