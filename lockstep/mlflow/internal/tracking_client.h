#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include <lockstep/mlflow/internal/http.h>

namespace lockstep::mlflow::internal {

/// What became of a request.
enum class Outcome {
  kDone,
  kNotNow,    ///< the server is away, overloaded or does not let us in: the same may succeed later
  kRejected,  ///< it will never take that
};
struct Result {
  Outcome outcome = Outcome::kDone;
  std::string error = {};
  std::chrono::seconds retry_after{0};
};

/// What a run is, before the server knows it. As JSON in the journal.
struct RunDescription {
  std::string server = {};           ///< its URL
  std::string experiment_name = {};  ///< empty: `experiment_id`
  std::string experiment_id = {};
  std::string run_name = {};
  std::vector<std::pair<std::string, std::string>> tags = {};
  int64_t start_time = 0;  ///< milliseconds since 1970
  /// A tag of the run that no other has: finds it when the answer to its creation was lost.
  std::string token = {};

  std::string to_json() const;
  static RunDescription from_json(const std::string& text);
};

/// MLflow's REST interface (mlflow.org/docs/latest/rest-api.html), as far as a writer needs it. One thread.
class TrackingClient {
 public:
  explicit TrackingClient(HttpOptions options) : http_(std::move(options)) {}

  /// Finds or makes the experiment and makes the run. `search_first`: it may have been made already.
  Result create_run(const RunDescription& run, bool search_first, std::string& run_id);
  Result log_batch(const std::string& run_id, const nlohmann::json& metrics, const nlohmann::json& params,
                   const nlohmann::json& tags);
  /// `status`: RUNNING, FINISHED, FAILED or KILLED. `end_time` in milliseconds; 0: none.
  Result update_run(const std::string& run_id, const std::string& status, int64_t end_time);
  /// Into `folder` of the run's artifacts.
  Result log_artifact(const std::string& run_id, const std::filesystem::path& file,
                      const std::string& folder);

  void cancel_at(std::chrono::steady_clock::time_point time) { http_.cancel_at(time); }

 private:
  Result find_experiment(const RunDescription& run);

  HttpConnection http_;
  std::string experiment_id_;  // once found
  std::string artifact_uri_;   // of the run, once asked
};

}  // namespace lockstep::mlflow::internal
