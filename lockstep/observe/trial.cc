#include <cstdint>
#include <utility>
#include <variant>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/environment.h>
#include <lockstep/observe/trial.h>

namespace lockstep {
namespace {

constexpr const char* kTrialVariable = "LOCKSTEP_TRIAL";

using Hyperparameter = Hyperparameters::mapped_type;

std::optional<Hyperparameter> to_hyperparameter(const nlohmann::json& value) {
  if (value.is_boolean()) return value.get<bool>();
  // Those beyond int64_t are unsigned ones that get() would wrap.
  if (value.is_number_integer() && !(value.is_number_unsigned() && value.get<uint64_t>() > INT64_MAX)) {
    return value.get<int64_t>();
  }
  if (value.is_number()) return value.get<double>();
  if (value.is_string()) return value.get<std::string>();
  return std::nullopt;
}

/// The parameter as a T; nothing where there is none of that name.
template <typename T>
std::optional<T> trial_parameter(const Hyperparameters& parameters, const std::string& name,
                                 const char* kind) {
  const auto found = parameters.find(name);
  if (found == parameters.end()) return std::nullopt;
  if (const T* value = std::get_if<T>(&found->second)) return *value;
  TORCH_CHECK_VALUE(false, "the sweep's parameter '", name, "' is not ", kind,
                    ", which the program asks for; give it another form in --param ", name, "=…");
}

}  // namespace

Trial::Trial(const std::optional<std::string>& description) {
  if (!description) return;
  const auto json = nlohmann::json::parse(*description, nullptr, /*allow_exceptions=*/false);
  const auto has = [&](const char* key, auto is) {
    return json.is_object() && json.contains(key) && (json[key].*is)();
  };
  TORCH_CHECK_VALUE(
      has("number", &nlohmann::json::is_number_integer) && has("parameters", &nlohmann::json::is_object) &&
          has("report", &nlohmann::json::is_string),
      kTrialVariable, " is '", *description, "', which is no trial of lockstep sweep; unset it");
  number_ = json["number"].get<int64_t>();
  for (const auto& [name, value] : json["parameters"].items()) {
    auto parameter = to_hyperparameter(value);
    TORCH_CHECK_VALUE(parameter, kTrialVariable, ": the parameter '", name, "' is of type ",
                      value.type_name(), ", and not a number, true, false or a text");
    parameters_.emplace(name, *std::move(parameter));
  }
  writer_ = std::make_shared<JsonLinesWriter>(json["report"].get<std::string>());
}

std::optional<bool> Trial::boolean(const std::string& name) const {
  return trial_parameter<bool>(parameters_, name, "true or false");
}

std::optional<int64_t> Trial::integer(const std::string& name) const {
  return trial_parameter<int64_t>(parameters_, name, "an integer");
}

std::optional<double> Trial::real(const std::string& name) const {
  const auto found = parameters_.find(name);
  if (found != parameters_.end() && std::holds_alternative<int64_t>(found->second)) {
    return static_cast<double>(std::get<int64_t>(found->second));
  }
  return trial_parameter<double>(parameters_, name, "a number");
}

std::optional<std::string> Trial::text(const std::string& name) const {
  return trial_parameter<std::string>(parameters_, name, "a text");
}

void Trial::report(const Metrics& metrics, int64_t step) const {
  if (writer_) writer_->log_metrics(metrics, step);
}

Trial trial() {
  return Trial(environment::text(kTrialVariable));
}

}  // namespace lockstep
