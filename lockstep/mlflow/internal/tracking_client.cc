#include <algorithm>
#include <fstream>
#include <stdexcept>
#include <string_view>

#include <nlohmann/json.hpp>

#include <lockstep/base/text/json_text.h>
#include <lockstep/base/text/printable.h>
#include <lockstep/mlflow/internal/tracking_client.h>

namespace lockstep::mlflow::internal {
namespace {

using nlohmann::json;

constexpr const char* kApi = "/api/2.0/mlflow/";
constexpr const char* kArtifacts = "/api/2.0/mlflow-artifacts/artifacts";
constexpr const char* kTokenTag = "lockstep.token";
constexpr size_t kLongestError = 500;

/// No object when the body is no JSON, or nested deeper than any answer, which would take much memory.
json parse(const HttpAnswer& answer) {
  const json::parser_callback_t check_depth = [](int depth, json::parse_event_t, json&) {
    if (depth > 32) throw std::length_error("nested too deep");
    return true;
  };
  try {
    return json::parse(answer.body, check_depth, /*allow_exceptions=*/false);
  } catch (const std::length_error&) {
    return json();
  }
}

/// A string at a path of keys; empty when there is none.
std::string text_at(const json& object, const char* pointer) {
  const json::json_pointer at(pointer);
  return object.is_structured() && object.contains(at) && object[at].is_string()
             ? object[at].get<std::string>()
             : "";
}

Result judge(const HttpAnswer& answer) {
  if (answer.ok()) return {};
  if (answer.status == 0) return {Outcome::kNotNow, printable(answer.error, kLongestError)};
  std::string error = text_at(parse(answer), "/message");
  if (error.empty()) error = answer.body;
  error = "status " + std::to_string(answer.status) + ": " + printable(error, kLongestError);
  // A server that refuses the log-in, does not know the run, or has another service in its place may be put
  // right; a request that is wrong stays wrong.
  const bool is_final = answer.status == 400 || answer.status == 405 || answer.status == 409 ||
                        answer.status == 413 || answer.status == 415 || answer.status == 422;
  return {is_final ? Outcome::kRejected : Outcome::kNotNow, error, answer.retry_after};
}

/// Of a file. All that is logged later waits for it, so it is given up where another try would not help: a
/// server that stores no files does so as long as it runs, and one that has accepted other requests, but
/// forbids this one or has no such route, will not change its answer.
Result judge_artifact(const HttpAnswer& answer) {
  Result result = judge(answer);
  const bool stores_none =
      answer.status == 503 && answer.body.find("--no-serve-artifacts") != std::string::npos;
  if (stores_none || answer.status == 403 || answer.status == 404) result.outcome = Outcome::kRejected;
  return result;
}

/// An answer that says nothing of what it should.
Result strange(const HttpAnswer& answer) {
  return {Outcome::kNotNow, "the answer is no MLflow server's: " + printable(answer.body, kLongestError)};
}

std::string api(const char* name) {
  return std::string(kApi) + name;
}

json tags_of(const std::vector<std::pair<std::string, std::string>>& tags) {
  json list = json::array();
  for (const auto& [key, value] : tags) list.push_back({{"key", key}, {"value", value}});
  return list;
}

/// A path's parts, each escaped.
std::string escape_path(const std::filesystem::path& path) {
  std::string result;
  for (const auto& part : path) {
    if (part != "/" && !part.empty()) result += "/" + HttpConnection::escape(part.string());
  }
  return result;
}

/// Whether a server may name the folder for what the run stores: MLflow's contain the run's id.
bool is_folder_of(const std::filesystem::path& folder, const std::string& run_id) {
  const auto has = [&](const std::filesystem::path& part) {
    return std::find(folder.begin(), folder.end(), part) != folder.end();
  };
  return has(run_id) && !has("..");
}

bool remove_prefix(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

}  // namespace

std::string RunDescription::to_json() const {
  return json_text({{"run",
                     {{"server", server},
                      {"experiment_name", experiment_name},
                      {"experiment_id", experiment_id},
                      {"run_name", run_name},
                      {"tags", tags},
                      {"start_time", start_time},
                      {"token", token}}}});
}

RunDescription RunDescription::from_json(const std::string& text) {
  const json run = json::parse(text).at("run");
  return {run.at("server"), run.at("experiment_name"), run.at("experiment_id"), run.at("run_name"),
          run.at("tags"),   run.at("start_time"),      run.at("token")};
}

Result TrackingClient::find_experiment(const RunDescription& run) {
  if (run.experiment_name.empty()) {
    experiment_id_ = run.experiment_id;
    return {};
  }
  const std::string by_name =
      api("experiments/get-by-name?experiment_name=") + HttpConnection::escape(run.experiment_name);
  // Between asking and making, another client may make it: then asking again finds it.
  for (int attempt = 0; attempt < 2; ++attempt) {
    const HttpAnswer found = http_.get(by_name);
    const std::string id = text_at(parse(found), "/experiment/experiment_id");
    if (found.ok() && !id.empty()) {
      if (text_at(parse(found), "/experiment/lifecycle_stage") != "deleted") {
        experiment_id_ = id;
        return {};
      }
      return {Outcome::kNotNow,
              "the experiment '" + run.experiment_name + "' is deleted; restore it, or choose another name"};
    }
    const bool is_missing =
        found.status == 404 && text_at(parse(found), "/error_code") == "RESOURCE_DOES_NOT_EXIST";
    if (found.ok()) return strange(found);
    if (!is_missing) return judge(found);
    const HttpAnswer made =
        http_.post_json(api("experiments/create"), json_text({{"name", run.experiment_name}}));
    experiment_id_ = made.ok() ? text_at(parse(made), "/experiment_id") : "";
    if (!experiment_id_.empty()) return {};
    if (text_at(parse(made), "/error_code") != "RESOURCE_ALREADY_EXISTS")
      return made.ok() ? strange(made) : judge(made);
  }
  return {Outcome::kNotNow, "the experiment '" + run.experiment_name + "' comes and goes"};
}

Result TrackingClient::create_run(const RunDescription& run, bool search_first, std::string& run_id) {
  if (experiment_id_.empty()) {
    if (Result result = find_experiment(run); result.outcome != Outcome::kDone) return result;
  }
  if (search_first) {
    const HttpAnswer found =
        http_.post_json(api("runs/search"),
                        json_text({{"experiment_ids", {experiment_id_}},
                                   {"filter", std::string("tags.`") + kTokenTag + "` = '" + run.token + "'"},
                                   {"max_results", 1}}));
    if (!found.ok()) return judge(found);
    run_id = text_at(parse(found), "/runs/0/info/run_id");
    if (!run_id.empty()) return {};
  }
  json tags = tags_of(run.tags);
  tags.push_back({{"key", kTokenTag}, {"value", run.token}});
  json request = {{"experiment_id", experiment_id_}, {"start_time", run.start_time}, {"tags", tags}};
  if (!run.run_name.empty()) request["run_name"] = run.run_name;
  const HttpAnswer made = http_.post_json(api("runs/create"), json_text(request), /*once=*/true);
  if (!made.ok()) return judge(made);
  run_id = text_at(parse(made), "/run/info/run_id");
  return run_id.empty() ? strange(made) : Result{};
}

Result TrackingClient::log_batch(const std::string& run_id, const json& metrics, const json& params,
                                 const json& tags) {
  return judge(http_.post_json(
      api("runs/log-batch"),
      json_text({{"run_id", run_id}, {"metrics", metrics}, {"params", params}, {"tags", tags}})));
}

Result TrackingClient::update_run(const std::string& run_id, const std::string& status, int64_t end_time) {
  json request = {{"run_id", run_id}, {"status", status}};
  if (end_time != 0) request["end_time"] = end_time;
  return judge(http_.post_json(api("runs/update"), json_text(request)));
}

Result TrackingClient::log_artifact(const std::string& run_id, const std::filesystem::path& file,
                                    const std::string& folder) {
  if (artifact_uri_.empty()) {
    const HttpAnswer run = http_.get(api("runs/get?run_id=") + HttpConnection::escape(run_id));
    if (!run.ok()) return judge(run);
    artifact_uri_ = text_at(parse(run), "/run/info/artifact_uri");
    if (artifact_uri_.empty()) return strange(run);
  }
  std::error_code error;
  if (!std::filesystem::is_regular_file(file, error) || !std::ifstream(file)) {
    return {Outcome::kRejected, "cannot read " + file.string()};
  }
  if (!is_folder_of(artifact_uri_, run_id)) {
    return {Outcome::kRejected, "the server names " + printable(artifact_uri_) +
                                    " for the run's artifacts, which is no folder of the run " + run_id};
  }
  const std::filesystem::path name = std::filesystem::path(folder) / file.filename();
  std::string_view uri = artifact_uri_;
  if (remove_prefix(uri, "mlflow-artifacts:/") && !uri.starts_with('/')) {
    return judge_artifact(http_.put_file(kArtifacts + escape_path(uri) + escape_path(name), file));
  }
  uri = artifact_uri_;
  if (!remove_prefix(uri, "file://") && !uri.starts_with('/')) {
    return {Outcome::kRejected,
            "the run's artifacts are at " + printable(artifact_uri_) +
                ", and only mlflow-artifacts:/ and file:// are known; "
                "start the server with --artifacts-destination, which makes it pass them on"};
  }
  const std::filesystem::path target = std::filesystem::path(uri) / name;
  std::filesystem::create_directories(target.parent_path(), error);
  std::filesystem::copy_file(file, target, std::filesystem::copy_options::overwrite_existing, error);
  return error ? Result{Outcome::kRejected, "cannot copy to " + target.string() + ": " + error.message()}
               : Result{};
}

}  // namespace lockstep::mlflow::internal
