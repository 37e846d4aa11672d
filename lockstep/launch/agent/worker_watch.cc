#include <algorithm>
#include <array>
#include <ctime>
#include <utility>

#include <lockstep/base/ranks.h>
#include <lockstep/base/text/format_duration.h>
#include <lockstep/launch/agent/worker_watch.h>

namespace lockstep::launch {
namespace {

/// "for 12 s, since 12:03:04", by this host's clock and time zone.
std::string for_and_since(std::chrono::steady_clock::duration lasted) {
  const auto seconds = std::chrono::round<std::chrono::seconds>(lasted);
  const std::time_t began = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now() - seconds);
  std::tm parts = {};
  std::array<char, 16> clock{};
  ::localtime_r(&began, &parts);
  std::strftime(clock.data(), clock.size(), "%H:%M:%S", &parts);
  return "for " + format_duration(seconds) + ", since " + clock.data();
}

}  // namespace

std::string WorkerWatch::name(int rank, pid_t pid) const {
  return "rank " + std::to_string(rank) + " (pid " + std::to_string(pid) + " on " + host_ + ")";
}

/// As ranks say it; those of a job on one host don't name it.
std::string WorkerWatch::with_host(const std::string& name) const {
  if (!name.ends_with(')') || name.find(" on ") != std::string::npos) return name;
  return name.substr(0, name.size() - 1) + " on " + host_ + ")";
}

std::vector<std::string> WorkerWatch::look(const std::vector<Worker>& workers, Time now) {
  std::vector<std::string> lines;
  look_at_stopped(workers, now, lines);
  look_at_awaited(workers, now, lines);
  return lines;
}

void WorkerWatch::look_at_stopped(const std::vector<Worker>& workers, Time now,
                                  std::vector<std::string>& lines) {
  for (auto& [pid, stop] : stopped_) stop.lasts = false;
  for (const Worker& worker : workers) {
    if (!worker.stopped) continue;
    Stop& stop = stopped_.try_emplace(worker.pid, Stop{worker.rank, now}).first->second;
    stop.lasts = true;
    if (stop.told || now - stop.since < kStoppedFor) continue;
    stop.told = true;
    lines.push_back(name(worker.rank, worker.pid) + " has been stopped " + for_and_since(now - stop.since) +
                    " (by SIGSTOP, SIGTSTP or a debugger); kill -CONT " + std::to_string(worker.pid) +
                    " continues it");
  }
  std::erase_if(stopped_, [&](const auto& entry) {
    const auto& [pid, stop] = entry;
    const bool runs = std::any_of(workers.begin(), workers.end(),
                                  [pid = pid](const Worker& worker) { return worker.pid == pid; });
    if (!stop.lasts && stop.told && runs) lines.push_back(name(stop.rank, pid) + " goes on");
    return !stop.lasts;
  });
}

void WorkerWatch::look_at_awaited(const std::vector<Worker>& workers, Time now,
                                  std::vector<std::string>& lines) {
  for (auto& [awaited, wait] : awaited_) wait.waited = std::exchange(wait.waiting, {});
  for (const Worker& worker : workers) {
    if (!worker.wait) continue;
    const Time since{std::chrono::nanoseconds(worker.wait->since_ns)};
    Awaited& wait = awaited_.try_emplace(worker.wait->awaited, Awaited{.since = since}).first->second;
    wait.waiting.push_back(worker.rank);
    wait.since = std::min(wait.since, since);
    wait.state = worker.wait->state;
  }
  for (auto next = awaited_.begin(); next != awaited_.end();) {
    const auto at = next++;
    auto& [awaited, wait] = *at;
    if (wait.waiting.empty()) {
      const bool one_runs =
          std::any_of(workers.begin(), workers.end(), [&waited = wait.waited](const Worker& worker) {
            return std::find(waited.begin(), waited.end(), worker.rank) != waited.end();
          });
      if (wait.told && one_runs) lines.push_back(with_host(awaited) + " is waited for no more");
      awaited_.erase(at);
      continue;
    }
    // At the second look all that wait for it have said so.
    if (++wait.looks < 2 || wait.told) continue;
    wait.told = true;
    lines.push_back(name_ranks(wait.waiting) + (wait.waiting.size() == 1 ? " has" : " have") +
                    " waited for " + with_host(awaited) + " " + for_and_since(now - wait.since) +
                    (wait.state.empty() ? "" : "; " + wait.state));
  }
}

}  // namespace lockstep::launch
