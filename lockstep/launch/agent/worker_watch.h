#pragma once

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <sys/types.h>
#include <utility>
#include <vector>

#include <lockstep/rendezvous/exit_status_table.h>

namespace lockstep::launch {

/// Names the workers that run and do not get on: those that are stopped, and ranks for which workers that use the library
/// have waited for long, as these say. Each is told once, and when it is over. Knows no clock and no process: fed by look().
class WorkerWatch {
 public:
  static constexpr std::chrono::seconds kInterval{1};  // between looks
  static constexpr std::chrono::seconds kStoppedFor{
      5};  // a pause of a debugger, or of job control, is not told

  /// A worker that runs.
  struct Worker {
    int rank = 0;
    pid_t pid = 0;
    bool stopped = false;
    std::optional<ExitStatusTable::LongWait> wait = {};
  };

  /// `host`: this one's name, for messages.
  explicit WorkerWatch(std::string host) : host_(std::move(host)) {}

  /// What there is to say, in lines.
  std::vector<std::string> look(const std::vector<Worker>& workers,
                                std::chrono::steady_clock::time_point now);

 private:
  using Time = std::chrono::steady_clock::time_point;
  struct Stop {
    int rank;
    Time since;
    bool told = false;
    bool lasts = true;
  };
  /// A rank that is waited for.
  struct Awaited {
    std::vector<int> waiting = {};
    std::vector<int> waited = {};  // at the look before
    std::string state = {};
    Time since;
    int looks = 0;  // at which it was waited for
    bool told = false;
  };

  std::string name(int rank, pid_t pid) const;
  std::string with_host(const std::string& name) const;
  void look_at_stopped(const std::vector<Worker>& workers, Time now, std::vector<std::string>& lines);
  void look_at_awaited(const std::vector<Worker>& workers, Time now, std::vector<std::string>& lines);

  std::string host_;
  std::map<pid_t, Stop> stopped_;
  std::map<std::string, Awaited> awaited_;  // by what the rank is called
};

}  // namespace lockstep::launch
