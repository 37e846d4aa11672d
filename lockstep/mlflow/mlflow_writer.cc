#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <mutex>
#include <unistd.h>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/environment.h>
#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/base/process/fork_guard.h>
#include <lockstep/base/random_bytes.h>
#include <lockstep/base/text/hex.h>
#include <lockstep/base/text/json_number.h>
#include <lockstep/base/text/json_text.h>
#include <lockstep/base/text/lower_case.h>
#include <lockstep/mlflow/internal/sender.h>
#include <lockstep/mlflow/mlflow_writer.h>
#include <lockstep/observe/writing_rank.h>

namespace lockstep {
namespace {

using mlflow::internal::Journal;
using mlflow::internal::RunDescription;
using mlflow::internal::Sender;
using mlflow::internal::SenderOptions;
using nlohmann::json;

// MLflow takes no more of them in one request.
constexpr size_t kMetricsOfALine = 1000;
constexpr size_t kParamsOfALine = 100;

int64_t milliseconds_since_1970() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::milliseconds>(now).count();
}

std::string variable(const char* name) {
  return environment::text(name).value_or("");
}

/// Parameters are texts; these are Python's.
std::string param_text(const Hyperparameters::mapped_type& value) {
  if (const bool* flag = std::get_if<bool>(&value)) return *flag ? "True" : "False";
  if (const auto* whole = std::get_if<int64_t>(&value)) return std::to_string(*whole);
  if (const auto* text = std::get_if<std::string>(&value)) return *text;
  const double number = std::get<double>(value);
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number > 0 ? "inf" : "-inf";
  return json(number).dump();
}

std::string program_name() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).filename().string();
}

bool is_true(const std::string& value) {
  const std::string text = lower_case(value);
  return text == "true" || text == "1";
}

std::string server_of(const MlflowWriterOptions& options) {
  std::string uri = options.tracking_uri.empty() ? variable("MLFLOW_TRACKING_URI") : options.tracking_uri;
  TORCH_CHECK_VALUE(!uri.empty(),
                    "MlflowWriter: no tracking server is named; set tracking_uri or MLFLOW_TRACKING_URI to "
                    "http://HOST:PORT");
  // A URI may hold a password, so no text shows it.
  const size_t scheme = uri.find("://");
  TORCH_CHECK_VALUE(uri.starts_with("http://") || uri.starts_with("https://"),
                    "MlflowWriter: the tracking URI is ",
                    scheme == std::string::npos ? "a folder" : "one of " + uri.substr(0, scheme) + "://",
                    ", and a store that is no server is for Python alone; start one on it by `mlflow server "
                    "--backend-store-uri` and that URI, and set http://HOST:PORT");
  const size_t host = scheme + 3;
  TORCH_CHECK_VALUE(
      uri.substr(host, uri.find_first_of("/?#", host) - host).find('@') == std::string::npos,
      "MlflowWriter: the tracking URI holds a password, which would be seen in logs; put it into "
      "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD");
  while (uri.ends_with('/')) uri.pop_back();
  return uri;
}

SenderOptions sender_options(const MlflowWriterOptions& options) {
  return {.http = {.base_url = server_of(options),
                   .token = variable("MLFLOW_TRACKING_TOKEN"),
                   .username = variable("MLFLOW_TRACKING_USERNAME"),
                   .password = variable("MLFLOW_TRACKING_PASSWORD"),
                   .verify_tls = !is_true(variable("MLFLOW_TRACKING_INSECURE_TLS")),
                   .ca_file = variable("MLFLOW_TRACKING_SERVER_CERT_PATH"),
                   .timeout = options.timeout},
          .send_interval = options.send_interval,
          .first_retry = options.first_retry,
          .longest_retry = options.longest_retry};
}

RunDescription describe(const MlflowWriterOptions& options) {
  RunDescription run;
  run.server = server_of(options);
  run.experiment_name =
      options.experiment_name.empty() ? variable("MLFLOW_EXPERIMENT_NAME") : options.experiment_name;
  const std::string id = variable("MLFLOW_EXPERIMENT_ID");
  run.experiment_id = id.empty() ? "0" : id;
  run.run_name = options.run_name;
  run.start_time = milliseconds_since_1970();
  run.token = to_hex(random_bytes<16>());
  std::map<std::string, std::string> tags = options.tags;
  tags.emplace("mlflow.source.name", program_name());
  tags.emplace("mlflow.source.type", "LOCAL");
  if (const std::string user = variable("USER"); !user.empty()) tags.emplace("mlflow.user", user);
  if (!options.parent_run_id.empty()) tags.emplace("mlflow.parentRunId", options.parent_run_id);
  run.tags.assign(tags.begin(), tags.end());
  return run;
}

std::filesystem::path temporary_spool() {
  std::error_code error;
  const auto folder = std::filesystem::temp_directory_path(error);
  return (error ? std::filesystem::path("/tmp") : folder) / ("mlflow_spool_" + std::to_string(::getuid()));
}

/// A journal in the spool directory, or in the temporary folder; null, and a warning, when neither will do.
std::shared_ptr<Journal> open_journal(const MlflowWriterOptions& options, const std::string& run_id,
                                      const RunDescription& run) {
  // The second name is for a run that another process logs to as well.
  const std::string stem = run_id.empty() ? run.token : run_id;
  std::string errors;
  for (const auto& folder : {options.spool_directory, temporary_spool()}) {
    for (const std::string& name : {stem, stem + "." + run.token}) {
      try {
        auto journal = std::make_shared<Journal>(folder / (name + ".jsonl"), run.to_json());
        if (!run_id.empty()) journal->set_run_id(run_id);
        if (folder != options.spool_directory) {
          LOCKSTEP_LOG(kWarning) << "MlflowWriter: what is not sent yet waits in " << folder.string()
                                 << " instead: " << errors;
        }
        return journal;
      } catch (const c10::Error& error) {
        if (errors.empty()) errors = error.what_without_backtrace();
      }
    }
  }
  LOCKSTEP_LOG(kWarning) << "MlflowWriter: nothing can be logged: " << errors
                         << "; choose another spool_directory";
  return nullptr;
}

}  // namespace

/// A run under way, from its first record on.
class MlflowWriter::Impl {
 public:
  explicit Impl(MlflowWriterOptions options) : options_(std::move(options)), rank_(options_.writes) {
    sender_options_ = sender_options(options_);
    if (options_.run_id.empty()) options_.run_id = variable("MLFLOW_RUN_ID");
  }
  ~Impl() = default;

  bool writes() { return !in_forked_child() && rank_.here(); }
  bool in_forked_child() const { return fork_guard_.in_forked_child(); }

  void log(const json& line) {
    const std::lock_guard lock(mutex_);
    start();
    if (!journal_) {
      ++lost_;
      return;
    }
    journal_->append(json_text(line));
    if (sender_) sender_->wake();  // which may have failed to start: the journal keeps the line
  }

  void flush() {
    const std::lock_guard lock(mutex_);
    start();
    if (sender_) sender_->hurry();
  }

  bool wait(std::chrono::milliseconds timeout) {
    std::shared_ptr<Sender> sender;
    {
      const std::lock_guard lock(mutex_);
      sender = sender_;
    }
    return !sender || sender->wait(std::chrono::steady_clock::now() + timeout);
  }

  void finalize(std::string_view status) {
    const std::lock_guard ending(ending_);  // a second call returns when the first one has sent all
    {
      const std::lock_guard lock(mutex_);
      if (std::exchange(phase_, Phase::kFinalized) == Phase::kFinalized || !journal_) return;
      const std::string known = status == "finished" ? "FINISHED" : status == "killed" ? "KILLED" : "FAILED";
      journal_->append(json_text({{"status", {known, milliseconds_since_1970()}}}));
      if (sender_) sender_->wake();
    }
    // Other calls need not wait for this one: neither pointer changes any more.
    if (sender_ && sender_->stop(std::chrono::steady_clock::now() + options_.close_timeout)) {
      journal_->remove();
    } else {
      LOCKSTEP_LOG(kWarning) << "MlflowWriter: what could not be sent to " << sender_options_.http.base_url
                             << " is in " << journal_->path().string()
                             << "; MlflowWriter::send_spooled() sends it"
                             << (journal_->run_id().empty()
                                     ? ""
                                     : ", or a writer with the run_id " + journal_->run_id());
    }
  }

  std::string run_id() const {
    const std::lock_guard lock(mutex_);
    return journal_ ? journal_->run_id() : options_.run_id;
  }

  Counts counts() const {
    const std::lock_guard lock(mutex_);
    if (!sender_) return {.lost = lost_};
    const auto counts = sender_->counts();
    return {counts.sent, counts.rejected, counts.failures, journal_->lost()};
  }

  std::filesystem::path spool_file() const {
    const std::lock_guard lock(mutex_);
    return journal_ ? journal_->path() : std::filesystem::path();
  }

 private:
  enum class Phase : uint8_t {
    kNew,        // nothing was logged
    kLogging,    // with journal_ and sender_; without a journal where none could be opened
    kFinalized,  // with what there was; nothing more is logged
  };

  void start() {
    TORCH_CHECK(phase_ != Phase::kFinalized,
                "MlflowWriter: the run has ended by finalize(); make another writer with its run_id to go on "
                "with it");
    if (std::exchange(phase_, Phase::kLogging) == Phase::kLogging) return;
    journal_ = open_journal(options_, options_.run_id, describe(options_));
    if (!journal_) return;
    if (!options_.run_id.empty()) journal_->append(json_text({{"status", {"RUNNING", 0}}}));
    sender_ = std::make_shared<Sender>(journal_, sender_options_);
  }

  MlflowWriterOptions options_;
  SenderOptions sender_options_;
  ForkGuard fork_guard_;  // in a child the mutex may be locked for ever, and the thread is not there
  WritingRank rank_;
  std::mutex ending_;  // taken before mutex_
  mutable std::mutex mutex_;
  Phase phase_ = Phase::kNew;
  int64_t lost_ = 0;  // without a journal
  std::shared_ptr<Journal> journal_;
  std::shared_ptr<Sender> sender_;
};

MlflowWriter::MlflowWriter(MlflowWriterOptions options)
    : impl_(std::make_unique<Impl>(std::move(options))), exceptions_(std::uncaught_exceptions()) {}

MlflowWriter::~MlflowWriter() {
  if (impl_->in_forked_child()) {
    (void)impl_.release();  // its thread belongs to the parent
    return;
  }
  impl_->finalize(std::uncaught_exceptions() > exceptions_ ? "failed" : "finished");
}

void MlflowWriter::log_metrics(const Metrics& metrics, int64_t step) {
  if (!impl_->writes() || metrics.empty()) return;
  const int64_t now = milliseconds_since_1970();
  json entries = json::array();
  for (const auto& [name, value] : metrics) {
    entries.push_back({name, json_number(value, NumberWords::kProtobuf), now, step});
    if (entries.size() == kMetricsOfALine) impl_->log({{"metrics", std::exchange(entries, json::array())}});
  }
  if (!entries.empty()) impl_->log({{"metrics", std::move(entries)}});
}

void MlflowWriter::log_hyperparameters(const Hyperparameters& hyperparameters) {
  if (!impl_->writes() || hyperparameters.empty()) return;
  json entries = json::array();
  for (const auto& [name, value] : hyperparameters) {
    entries.push_back(json::array({name, param_text(value)}));
    if (entries.size() == kParamsOfALine) impl_->log({{"params", std::exchange(entries, json::array())}});
  }
  if (!entries.empty()) impl_->log({{"params", std::move(entries)}});
}

void MlflowWriter::set_tag(const std::string& key, const std::string& value) {
  if (!impl_->writes()) return;
  impl_->log({{"tags", json::array({json::array({key, value})})}});
}

void MlflowWriter::log_artifact(const std::filesystem::path& file) {
  log_artifact(file, "");
}

void MlflowWriter::log_artifact(const std::filesystem::path& file, const std::string& folder) {
  if (!impl_->writes()) return;
  impl_->log({{"artifact", json::array({std::filesystem::absolute(file).string(), folder})}});
}

void MlflowWriter::flush() {
  if (impl_->writes()) impl_->flush();
}

bool MlflowWriter::wait_until_sent(std::chrono::milliseconds timeout) {
  return impl_->in_forked_child() || impl_->wait(timeout);
}

void MlflowWriter::finalize(std::string_view status) {
  if (!impl_->in_forked_child()) impl_->finalize(status);
}

std::string MlflowWriter::run_id() const {
  return impl_->in_forked_child() ? "" : impl_->run_id();
}

MlflowWriter::Counts MlflowWriter::counts() const {
  return impl_->in_forked_child() ? Counts{} : impl_->counts();
}

std::filesystem::path MlflowWriter::spool_file() const {
  return impl_->in_forked_child() ? std::filesystem::path() : impl_->spool_file();
}

MlflowWriter::Spooled MlflowWriter::send_spooled(const MlflowWriterOptions& options) {
  const SenderOptions sender_options = lockstep::sender_options(options);
  Spooled result;
  std::vector<std::filesystem::path> files;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(options.spool_directory, error)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(".jsonl") && !name.ends_with(".rejected.jsonl")) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  for (const auto& file : files) {
    try {
      auto journal = std::make_shared<Journal>(file, "");
      if (RunDescription::from_json(journal->run()).server != sender_options.http.base_url) continue;
      Sender sender(journal, sender_options);
      const bool all = sender.stop(std::chrono::steady_clock::now() + options.close_timeout);
      if (all) journal->remove();
      ++(all ? result.sent : result.left);
    } catch (const std::exception& problem) {
      LOCKSTEP_LOG(kWarning) << "MlflowWriter: " << file.string() << " is not sent: " << text_of(problem);
      ++result.left;
    }
  }
  return result;
}

}  // namespace lockstep
