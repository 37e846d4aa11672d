#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include <lockstep/base/process/background_thread.h>
#include <lockstep/mlflow/internal/journal.h>
#include <lockstep/mlflow/internal/tracking_client.h>

namespace lockstep::mlflow::internal {

struct SenderOptions {
  HttpOptions http = {};
  std::chrono::milliseconds send_interval{1000};
  std::chrono::milliseconds first_retry{500};
  std::chrono::milliseconds longest_retry{60'000};
};

/// Counters of a sender.
struct SenderCounts {
  int64_t sent = 0;      ///< journal lines that the server has
  int64_t rejected = 0;  ///< entries that it will never take; in the file beside the journal
  int64_t failures = 0;  ///< attempts that ended with "not now"
};

/// Sends a journal to an MLflow server, in a thread of its own: makes the run, then batches within MLflow's
/// limits, in the order of the journal. What fails is tried again after a pause that doubles, with all the
/// rest waiting in the journal. A batch whose answer was lost is sent again with the same time stamps, which
/// a server with a database knows for the same. Thread-safe.
class Sender {
 public:
  Sender(std::shared_ptr<Journal> journal, SenderOptions options);
  /// stop() without time.
  ~Sender();

  /// Something was appended.
  void wake();
  /// Sends what there is without waiting for more.
  void hurry();
  /// Returns when all is sent, when an attempt fails, or at `deadline`; true in the first case.
  bool wait(std::chrono::steady_clock::time_point deadline);
  /// Sends what is left, until it is sent or `deadline` has come; a server that was away already gets one
  /// more chance. True when all is sent. Later calls do nothing.
  bool stop(std::chrono::steady_clock::time_point deadline);
  SenderCounts counts() const;

 private:
  struct Refusal;
  enum class Phase : uint8_t {
    kSending,
    kIdle,      // the thread sleeps until something is appended, or asked for
    kStopping,  // stop() has been called
    kStopped,   // the thread sends nothing any more
  };

  bool is_stopping() const { return phase_ == Phase::kStopping || phase_ == Phase::kStopped; }
  /// Lets a thread that is idle look again.
  void end_idleness();
  void run();
  bool journal_has_nothing() const;
  /// Sends some lines from the front of the journal.
  Result step();
  Result send_lines(const std::vector<Journal::Line>& lines);
  Result send_special(const nlohmann::json& line);
  Result send_entries(const std::vector<nlohmann::json>& entries, size_t begin, size_t end,
                      std::vector<Refusal>& refusals);
  void reject(const nlohmann::json& entry, const std::string& error);
  std::chrono::milliseconds pause_after(int64_t failures);

  const std::shared_ptr<Journal> journal_;
  const SenderOptions options_;
  TrackingClient client_;
  mutable std::mutex mutex_;
  std::condition_variable work_;  // for the thread
  std::condition_variable done_;  // for wait()
  Phase phase_ = Phase::kSending;
  bool hurry_ = false;     // what there is goes at once
  int64_t waiters_ = 0;    // in wait()
  bool was_away_ = false;  // the server, when stopping began
  std::chrono::steady_clock::time_point stop_at_ = std::chrono::steady_clock::time_point::max();
  SenderCounts counts_;
  int64_t failures_in_a_row_ = 0;
  BackgroundThread thread_;
};

}  // namespace lockstep::mlflow::internal
