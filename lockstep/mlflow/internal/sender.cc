#include <algorithm>
#include <cmath>
#include <iterator>
#include <random>
#include <utility>

#include <ATen/record_function.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/files/append_file.h>
#include <lockstep/base/log.h>
#include <lockstep/base/text/json_text.h>
#include <lockstep/mlflow/internal/sender.h>

namespace lockstep::mlflow::internal {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

// MLflow's limits of one request.
constexpr size_t kMetrics = 1000;
constexpr size_t kParams = 100;
constexpr size_t kTags = 100;
constexpr size_t kEntries = 1000;  // of the three together
constexpr size_t kBytes = 500'000;
constexpr std::chrono::seconds kLongestPatience{600};  // whatever the server asks for

/// What a line of the journal holds: {"metrics":[[key, value, time stamp, step], …]}, {"params":[[key,
/// value], …]}, {"tags":[[key, value], …]}; or something else, which is sent alone.
bool is_batched(const json& line) {
  return line.contains("metrics") || line.contains("params") || line.contains("tags");
}

/// Whether a line has the shape that the writer gives it; a disk that lost something may have given another.
bool is_well_formed(const json& line) {
  if (!line.is_object() || line.size() != 1 || !line.begin()->is_array()) return false;
  const std::string& kind = line.begin().key();
  const json& content = *line.begin();
  const auto is_pair = [](const json& pair) {
    return pair.is_array() && pair.size() == 2 && pair[0].is_string() && pair[1].is_string();
  };
  if (kind == "params" || kind == "tags") return std::all_of(content.begin(), content.end(), is_pair);
  if (kind == "artifact") return is_pair(content);
  if (kind == "status")
    return content.size() == 2 && content[0].is_string() && content[1].is_number_integer();
  return kind == "metrics" && std::all_of(content.begin(), content.end(), [](const json& metric) {
           return metric.is_array() && metric.size() == 4 && metric[0].is_string() &&
                  metric[2].is_number_integer() && metric[3].is_number_integer();
         });
}

/// One for each metric, parameter or tag.
std::vector<json> entries_of(const json& line) {
  std::vector<json> entries;
  for (const char* kind : {"metrics", "params", "tags"}) {
    if (!line.contains(kind)) continue;
    for (const auto& entry : line[kind]) entries.push_back({{kind, entry}});
  }
  return entries;
}

/// How many metrics, parameters and tags.
struct Load {
  size_t metrics = 0;
  size_t params = 0;
  size_t tags = 0;

  void add(const json& entry) {
    ++(entry.contains("metrics") ? metrics : entry.contains("params") ? params : tags);
  }
  bool fits() const {
    return metrics <= kMetrics && params <= kParams && tags <= kTags && metrics + params + tags <= kEntries;
  }
};

}  // namespace

struct Sender::Refusal {
  json entry;
  std::string error;
};

Sender::Sender(std::shared_ptr<Journal> journal, SenderOptions options)
    : journal_(std::move(journal)), options_(std::move(options)), client_(options_.http) {
  thread_.start("lockstep-mlflow", [this] { run(); });
}

Sender::~Sender() {
  stop(Clock::now());
}

void Sender::end_idleness() {
  if (phase_ == Phase::kIdle) phase_ = Phase::kSending;
}

void Sender::wake() {
  std::unique_lock lock(mutex_);
  const bool is_idle = phase_ == Phase::kIdle;
  end_idleness();
  lock.unlock();
  if (is_idle) work_.notify_one();
}

void Sender::hurry() {
  const std::lock_guard lock(mutex_);
  hurry_ = true;
  end_idleness();
  work_.notify_one();
}

bool Sender::wait(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  const int64_t failures = counts_.failures;
  ++waiters_;
  end_idleness();
  work_.notify_one();
  // What others append meanwhile is waited for, too; they are few.
  done_.wait_until(lock, deadline, [&] {
    return phase_ == Phase::kStopped || journal_has_nothing() || counts_.failures > failures;
  });
  --waiters_;
  return journal_has_nothing();
}

bool Sender::journal_has_nothing() const {
  return journal_->all_sent() && !journal_->run_id().empty();
}

bool Sender::stop(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  if (!is_stopping()) {
    phase_ = Phase::kStopping;
    was_away_ = failures_in_a_row_ > 0;
    stop_at_ = deadline;
    client_.cancel_at(deadline);
    work_.notify_one();
    lock.unlock();
    thread_.join();
  }
  return journal_has_nothing();
}

SenderCounts Sender::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

/// Doubles from first_retry to longest_retry, less up to a fifth, so that the runs of a cluster don't come
/// back all at once.
std::chrono::milliseconds Sender::pause_after(int64_t failures) {
  static thread_local std::minstd_rand random{std::random_device{}()};
  const double doubled = static_cast<double>(options_.first_retry.count()) *
                         std::pow(2.0, static_cast<double>(std::min<int64_t>(failures - 1, 30)));
  const double longest = std::min(doubled, static_cast<double>(options_.longest_retry.count()));
  return std::chrono::milliseconds(
      static_cast<int64_t>(longest * std::uniform_real_distribution<>(0.8, 1.0)(random)));
}

void Sender::run() {
  std::unique_lock lock(mutex_);
  auto next = Clock::now();  // no request before
  while (true) {
    // The run is made at once, so that it is seen from its start on.
    if (journal_has_nothing()) {
      hurry_ = false;
      done_.notify_all();
      if (is_stopping()) break;
      phase_ = Phase::kIdle;
      work_.wait(lock, [&] { return phase_ != Phase::kIdle; });
      if (journal_has_nothing()) continue;
      next = std::max(next, Clock::now() + options_.send_interval);
    }
    if (!is_stopping()) {
      // Waits for more to send together, or after a failure. hurry() and wait() cut the first short, stop()
      // both.
      work_.wait_until(
          lock, next, [&] { return is_stopping() || ((hurry_ || waiters_ > 0) && failures_in_a_row_ == 0); });
    } else if (failures_in_a_row_ > 0) {
      work_.wait_until(lock, std::min(next, stop_at_), [] { return false; });
    }
    if (is_stopping() && Clock::now() >= stop_at_) break;
    const bool is_last_chance = is_stopping() && was_away_;
    const bool hurried = std::exchange(hurry_, false);  // a later hurry() means later lines, too
    const int64_t there = journal_->size();
    lock.unlock();
    Result result;
    try {
      RECORD_USER_SCOPE("metrics: send to MLflow");
      result = step();
    } catch (const std::exception& error) {
      result = {Outcome::kNotNow, text_of(error)};
    }
    lock.lock();
    // Of a small file that was a large one, `there` is no place any more.
    const bool all_were_sent = journal_->sent() >= there || journal_->all_sent();
    hurry_ = hurry_ || (hurried && !all_were_sent);
    if (result.outcome == Outcome::kNotNow) {
      ++counts_.failures;
      if (failures_in_a_row_++ == 0 && !(is_stopping() && Clock::now() >= stop_at_)) {
        LOCKSTEP_LOG(kWarning) << "MlflowWriter: " << options_.http.base_url
                               << " cannot be written to: " << result.error
                               << "; the program goes on, and what is logged waits in "
                               << journal_->path().string();
      }
      next =
          Clock::now() + std::max<std::chrono::milliseconds>(pause_after(failures_in_a_row_),
                                                             std::min(result.retry_after, kLongestPatience));
      if (is_last_chance) break;
    } else {
      if (failures_in_a_row_ > 0) {
        LOCKSTEP_LOG(kWarning) << "MlflowWriter: " << options_.http.base_url << " can be written to again";
      }
      failures_in_a_row_ = 0;
      next = Clock::now();
      // What came during the request waits for more, or steps that are shorter would each be a request.
      if (all_were_sent) next += options_.send_interval;
    }
    done_.notify_all();
  }
  phase_ = Phase::kStopped;
  done_.notify_all();
}

Result Sender::step() {
  if (journal_->run_id().empty()) {
    const bool search_first = journal_->create_tried();
    journal_->set_create_tried();
    std::string run_id;
    Result result = client_.create_run(RunDescription::from_json(journal_->run()), search_first, run_id);
    if (result.outcome == Outcome::kRejected) result.outcome = Outcome::kNotNow;  // without a run all waits
    if (result.outcome != Outcome::kDone) return result;
    journal_->set_run_id(run_id);
    // So that a program that resumes the run finds what this one could not send.
    journal_->rename(journal_->path().parent_path() / (run_id + ".jsonl"));
    return {};
  }
  const auto lines = journal_->read(journal_->sent(), kBytes);
  if (lines.empty()) return {Outcome::kNotNow, "cannot read " + journal_->path().string()};
  return send_lines(lines);
}

/// As many of `lines` as one request takes, at least one.
Result Sender::send_lines(const std::vector<Journal::Line>& lines) {
  std::vector<json> entries;
  Load load;
  int64_t end = 0;
  int64_t count = 0;
  for (const auto& line : lines) {
    const json parsed = json::parse(line.text, nullptr, /*allow_exceptions=*/false);
    if (!is_well_formed(parsed)) {
      if (count > 0) break;
      reject(line.text, "the line is damaged");
      end = line.end;
      count = 1;
      break;
    }
    if (!is_batched(parsed)) {
      if (count > 0) break;
      const Result result = send_special(parsed);
      if (result.outcome == Outcome::kNotNow) return result;
      if (result.outcome == Outcome::kRejected) reject(parsed, result.error);
      end = line.end;
      count = 1;
      break;
    }
    auto more = entries_of(parsed);
    for (const auto& entry : more) load.add(entry);
    if (count > 0 && !load.fits()) break;
    std::move(more.begin(), more.end(), std::back_inserter(entries));
    end = line.end;
    ++count;
  }
  std::vector<Refusal> refusals;
  const Result result = send_entries(entries, 0, entries.size(), refusals);
  if (result.outcome == Outcome::kNotNow) return result;
  // Only now: had the server gone in between, all would be sent, and refused, again.
  for (const auto& refusal : refusals) reject(refusal.entry, refusal.error);
  journal_->set_sent(end);
  const std::lock_guard lock(mutex_);
  counts_.sent += count;
  return {};
}

/// {"status":[status, end time]}, {"artifact":[file, folder]}
Result Sender::send_special(const json& line) {
  if (line.contains("status")) {
    return client_.update_run(journal_->run_id(), line["status"][0], line["status"][1]);
  }
  return client_.log_artifact(journal_->run_id(), line["artifact"][0].get<std::string>(),
                              line["artifact"][1]);
}

/// One request; of a rejected one the halves, down to the entry that the server does not take.
Result Sender::send_entries(const std::vector<json>& entries, size_t begin, size_t end,
                            std::vector<Refusal>& refusals) {
  if (begin == end) return {};
  json metrics = json::array();
  json params = json::array();
  json tags = json::array();
  for (size_t i = begin; i < end; ++i) {
    const json& entry = entries[i];
    if (entry.contains("metrics")) {
      const json& metric = entry["metrics"];
      metrics.push_back({{"key", metric.at(0)},
                         {"value", metric.at(1)},
                         {"timestamp", metric.at(2)},
                         {"step", metric.at(3)}});
    } else {
      const bool is_param = entry.contains("params");
      const json& pair = entry[is_param ? "params" : "tags"];
      (is_param ? params : tags).push_back({{"key", pair.at(0)}, {"value", pair.at(1)}});
    }
  }
  const Result result = client_.log_batch(journal_->run_id(), metrics, params, tags);
  if (result.outcome != Outcome::kRejected) return result;
  if (end - begin == 1) {
    refusals.push_back({entries[begin], result.error});
    return {};
  }
  const size_t middle = begin + (end - begin) / 2;
  const Result first = send_entries(entries, begin, middle, refusals);
  return first.outcome == Outcome::kNotNow ? first : send_entries(entries, middle, end, refusals);
}

void Sender::reject(const json& entry, const std::string& error) {
  const std::filesystem::path path =
      journal_->path().parent_path() / (journal_->run_id() + ".rejected.jsonl");
  const json line = {{"entry", entry}, {"error", error}};
  AppendFile file("MlflowWriter", path, AppendFile::Kind::kLines);
  file.take_over();
  file.append(json_text(line) + "\n");
  const std::lock_guard lock(mutex_);
  if (counts_.rejected++ > 0) return;
  LOCKSTEP_LOG(kWarning) << "MlflowWriter: the server refuses " << json_text(entry) << ": " << error
                         << "; this and whatever else it refuses is in " << path.string();
}

}  // namespace lockstep::mlflow::internal
