#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <lockstep/observe/metrics_writer.h>

namespace lockstep {

struct MlflowWriterOptions {
  /// http:// or https:// and where the server is; MLFLOW_TRACKING_URI unless told.
  std::string tracking_uri = {};
  /// Made when it does not exist; MLFLOW_EXPERIMENT_NAME unless told, or the id in MLFLOW_EXPERIMENT_ID, or
  /// the server's default experiment.
  std::string experiment_name = {};
  /// The server makes one up unless told.
  std::string run_name = {};
  /// Goes on with that run; MLFLOW_RUN_ID unless told. Empty: a new run.
  std::string run_id = {};
  /// The run that this one is a part of.
  std::string parent_run_id = {};
  std::map<std::string, std::string> tags = {};

  /// Where what is not sent yet waits, a file for each run. Where it cannot be written, a folder in the
  /// system's for temporary files.
  std::filesystem::path spool_directory = "mlflow_spool";
  /// How long to collect what goes into one request.
  std::chrono::milliseconds send_interval{1000};
  /// The limit of a request. For an artifact it is the longest time without a byte moving, and a second more per
  /// MiB for the server to store it.
  std::chrono::milliseconds timeout{10'000};
  /// How long finalize() and the destructor send what is left.
  std::chrono::milliseconds close_timeout{10'000};
  /// The pause after a failure, which doubles with each that follows, up to longest_retry.
  std::chrono::milliseconds first_retry{500};
  std::chrono::milliseconds longest_retry{60'000};
  /// Whether this process writes; rank 0 alone unless told.
  std::optional<bool> writes = std::nullopt;
};

/// Logs a run to an MLflow tracking server. The component Lockstep::mlflow, for it needs libcurl.
///
///     MlflowWriter writer({.tracking_uri = "http://127.0.0.1:5000", .experiment_name = "mnist"});
///     writer.log_hyperparameters({{"lr", 0.1}});
///     writer.log_metrics({{"train/loss", loss}}, step);
///     writer.log_artifact("best.safetensors");
///     writer.finalize("finished");
///
/// What is logged goes, with its time, into a file in spool_directory, at the cost of one write(2), and from
/// there to the server in a thread, in batches. So a server that is away, slow or broken neither stops nor
/// slows the training, takes no memory, and loses nothing: what could not be sent stays in
/// spool_directory/RUN_ID.jsonl, also when the process is killed, and is sent by the next writer with that
/// run_id, or by send_spooled(). The file is removed once all is sent.
///
/// Nothing is logged twice: a request whose answer was lost is sent again with the same time stamps, which a
/// server with a database (--backend-store-uri sqlite:///… and others) recognises; one that keeps plain files
/// does not. A run whose creation was not answered is looked for before another is made. What a resumed
/// training does again, from its checkpoint on, is logged again under its own time, since MLflow cannot take
/// metrics back.
///
/// What the server refuses for good (a parameter that has another value already, a name with a character that
/// MLflow does not take, an artifact where it stores none) is warned about once, counted, and kept in
/// spool_directory/RUN_ID.rejected.jsonl.
///
/// Of MLflow's variables it heeds, besides those above, MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME
/// and MLFLOW_TRACKING_PASSWORD; MLFLOW_TRACKING_INSECURE_TLS=true, which verifies no certificate; and
/// MLFLOW_TRACKING_SERVER_CERT_PATH, a file of certificates to trust. Thread-safe. Does nothing in a forked
/// child.
class MlflowWriter : public MetricsWriter {
 public:
  /// Does not contact the server: the run is made in the background after the first call that logs, or
  /// flush(). Throws c10::ValueError when no server is named, or one that is not reached by HTTP, or with a
  /// password in its URI.
  explicit MlflowWriter(MlflowWriterOptions options = {});
  /// finalize("finished"), or "failed" where an exception passes.
  ~MlflowWriter() override;
  MlflowWriter(const MlflowWriter&) = delete;
  MlflowWriter& operator=(const MlflowWriter&) = delete;

  /// All with the time of the call. Names may hold letters, digits, and "_-./: ".
  void log_metrics(const Metrics& metrics, int64_t step) override;
  /// As MLflow's parameters, which never change: logged again with the same value they are left alone, with
  /// another one they are refused.
  void log_hyperparameters(const Hyperparameters& hyperparameters) override;
  void set_tag(const std::string& key, const std::string& value);
  /// A file for the run's artifacts, into `folder` of them ("model/best"). Read and sent in the background,
  /// through the server (mlflow-artifacts:), or copied where the server names a folder of this machine.
  void log_artifact(const std::filesystem::path& file) override;
  void log_artifact(const std::filesystem::path& file, const std::string& folder);

  /// Sends without waiting for send_interval, and does not wait itself: what is logged is safe already.
  void flush() override;
  /// Waits until all is sent; false when an attempt fails, or at the end of `timeout`.
  bool wait_until_sent(std::chrono::milliseconds timeout);
  /// Sets the run's status and its end, and sends what is left, for close_timeout at most; a server that is
  /// away already is tried once more. What is left then waits in the file, and a warning names it. Other
  /// threads' calls return meanwhile.
  void finalize(std::string_view status) override;

  /// The run's id, to go on with; empty until the server has told it.
  std::string run_id() const;

  struct Counts {
    int64_t sent = 0;      ///< calls whose contents have arrived
    int64_t rejected = 0;  ///< metrics, parameters, tags and artifacts that the server refused for good
    int64_t failures = 0;  ///< requests that failed and were, or will be, repeated
    int64_t lost = 0;      ///< calls that the disk refused, for want of space
  };
  Counts counts() const;
  /// Where what is not sent waits; empty when nothing was logged.
  std::filesystem::path spool_file() const;

  struct Spooled {
    int64_t sent = 0;  ///< runs that are complete now; their files are removed
    int64_t left = 0;  ///< runs that still wait, or that another process writes
  };
  /// Sends what earlier runs have left in options.spool_directory for options.tracking_uri, for
  /// options.close_timeout each at most. For a server that is back, before a training or after many.
  static Spooled send_spooled(const MlflowWriterOptions& options);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
  int exceptions_;  // that were under way when it was made
};

}  // namespace lockstep
