#include <memory>
#include <regex>
#include <sstream>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/serialization/state_loading.h>

namespace lockstep {
namespace {

std::string quoted(const std::vector<std::string>& keys) {
  std::string list;
  for (const std::string& key : keys) list += (list.empty() ? "\"" : ", \"") + key + "\"";
  return list;
}

}  // namespace

KeyMap strip_prefix(std::string prefix) {
  return [prefix = std::move(prefix)](const std::string& key) -> std::optional<std::string> {
    return key.starts_with(prefix) ? key.substr(prefix.size()) : key;
  };
}

KeyMap rename_keys(std::map<std::string, std::string> new_names) {
  return [new_names = std::move(new_names)](const std::string& key) {
    const auto found = new_names.find(key);
    return std::optional(found == new_names.end() ? key : found->second);
  };
}

KeyMap replace_in_keys(const std::string& pattern, std::string replacement) {
  std::shared_ptr<const std::regex> compiled;
  try {
    compiled = std::make_shared<std::regex>(pattern);
  } catch (const std::regex_error& error) {
    TORCH_CHECK_VALUE(false, "replace_in_keys: '", pattern, "' is no regular expression: ", error.what());
  }
  return [compiled, replacement = std::move(replacement)](const std::string& key) {
    return std::optional(std::regex_replace(key, *compiled, replacement));
  };
}

std::optional<std::string> map_key(const std::vector<KeyMap>& maps, const std::string& key) {
  std::optional<std::string> mapped = key;
  for (const KeyMap& map : maps) {
    TORCH_CHECK_VALUE(map, "load_state_dict: a function in key_map is empty");
    mapped = map(*mapped);
    if (!mapped) break;
  }
  return mapped;
}

void LoadProblems::throw_if_any(const std::string& owner, bool strict) const {
  std::ostringstream text;
  if (strict && !keys.missing_keys.empty()) {
    text << "\n\tMissing key(s) in state_dict: " << quoted(keys.missing_keys) << ". ";
  }
  if (strict && !keys.unexpected_keys.empty()) {
    text << "\n\tUnexpected key(s) in state_dict: " << quoted(keys.unexpected_keys) << ". ";
  }
  for (const std::string& message : messages) text << "\n\t" << message;
  const std::string problems = text.str();
  TORCH_CHECK(problems.empty(), "Error(s) in loading state_dict for ", owner, ":", problems);
}

}  // namespace lockstep
