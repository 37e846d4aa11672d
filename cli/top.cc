#include "top.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <poll.h>
#include <set>
#include <string>
#include <string_view>
#include <sys/ioctl.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <c10/util/Exception.h>

#include <lockstep/base/deadline.h>
#include <lockstep/base/files/write_all.h>
#include <lockstep/base/text/counted.h>
#include <lockstep/base/text/parse_number.h>
#include <lockstep/base/text/printable.h>
#include <lockstep/base/unique_fd.h>
#ifdef LOCKSTEP_CLI_HOSTS
#include <lockstep/launch/control_plane/job_watch.h>
#endif
#include <lockstep/launch/signal_catcher.h>
#include <lockstep/monitor/host_sampler.h>
#include <lockstep/monitor/job_table.h>

namespace lockstep::cli {
namespace {

using monitor::HostReport;
using monitor::HostSampler;
using monitor::LocalJob;

constexpr const char* kTopExamples = R"(
Examples:
  lockstep top                  the job of this user that runs here, every second until Ctrl-C
  lockstep top 4242             the one of that process: a rank, its launcher, or a shell above it
  lockstep top --once           one table; also where the output is no terminal
  lockstep top --json | jq .    the same for programs

Shows any job of processes that use Lockstep's groups, whatever has started them. Of a job over several hosts that
lockstep run has started all ranks are shown, on each of its hosts; of others those on this host.
docs/profiling.md says what the columns mean.
Exit status: 0, also when the job ends or Ctrl-C ends the table; 1 where no job runs, or its agent is of another version
or has no place for one more that watches; 2 for a wrong command line, and where several jobs run and none is named.)";

/// Processors' use and rates are means between two looks.
constexpr auto kBetweenFirstLooks = std::chrono::milliseconds(500);
/// With hosts whose reports have not come.
constexpr auto kPatienceWithHosts = std::chrono::seconds(5);

struct TopArguments {
  std::string job;
  bool once = false;
  bool json = false;
  double interval = 1;
};

/// Where a job's state comes from.
class JobSource {
 public:
  virtual ~JobSource() = default;
  /// Readable once there is something new; -1: there is when one looks.
  virtual int fd() const { return -1; }
  /// The job's hosts as they are now; nothing once it has ended.
  virtual std::optional<std::vector<HostReport>> look() = 0;
};

/// Of this host alone.
class LocalSource : public JobSource {
 public:
  LocalSource(std::unique_ptr<HostSampler> sampler, const LocalJob& job) : sampler_(std::move(sampler)) {
    for (const auto& rank : job.report.ranks) ranks_.insert(rank.pid);
  }
  std::optional<std::vector<HostReport>> look() override {
    for (LocalJob& job : sampler_->look()) {
      const auto& ranks = job.report.ranks;
      const auto is_known = [&](const auto& rank) { return ranks_.count(rank.pid) != 0; };
      if (std::none_of(ranks.begin(), ranks.end(), is_known)) continue;
      for (const auto& rank : ranks) ranks_.insert(rank.pid);
      return std::vector{std::move(job.report)};
    }
    return std::nullopt;
  }

 private:
  std::unique_ptr<HostSampler> sampler_;
  std::set<pid_t> ranks_;
};

#ifdef LOCKSTEP_CLI_HOSTS
/// Of all hosts of a job of lockstep run's, by the agent of this one.
class AgentSource : public JobSource {
 public:
  explicit AgentSource(launch::JobWatch watch) : watch_(std::move(watch)) {}
  int fd() const override { return watch_.fd(); }
  std::optional<std::vector<HostReport>> look() override {
    std::vector<launch::Report> reports;
    const bool open = watch_.read(reports);
    const auto now = std::chrono::steady_clock::now();
    for (const launch::Report& report : reports) {
      if (auto host = monitor::parse_host_report(report.text)) hosts_[report.agent] = {std::move(*host), now};
    }
    if (!open) return std::nullopt;
    std::erase_if(hosts_,
                  [&](const auto& host) { return now - host.second.second > 2 * kPatienceWithHosts; });
    std::vector<HostReport> hosts;
    for (const auto& [agent, report] : hosts_) hosts.push_back(report.first);
    monitor::forget_former_generations(hosts);
    const auto place = [](const HostReport& host) {
      return std::pair(host.ranks.empty() ? 1 << 30 : host.ranks.front().rank, std::string_view(host.host));
    };
    std::sort(hosts.begin(), hosts.end(),
              [&](const HostReport& a, const HostReport& b) { return place(a) < place(b); });
    return hosts;
  }

 private:
  launch::JobWatch watch_;
  std::map<launch::AgentId, std::pair<HostReport, std::chrono::steady_clock::time_point>> hosts_;
};
#endif

/// A job that could be shown.
struct Candidate {
  std::optional<LocalJob> local;  // its ranks on this host, if there are some
  pid_t agent = 0;                // of this host, where it has one
  UniqueFd connection = {};       // to that
};

std::vector<Candidate> find_jobs(HostSampler& sampler) {
  std::vector<Candidate> found;
  for (LocalJob& job : sampler.look()) found.push_back({.local = std::move(job)});
#ifdef LOCKSTEP_CLI_HOSTS
  for (auto& [agent, connection] : launch::JobWatch::agents()) {
    auto job = std::find_if(found.begin(), found.end(),
                            [pid = agent](const Candidate& one) { return one.local && one.local->has(pid); });
    if (job == found.end()) job = found.emplace(found.end());
    job->agent = agent;
    job->connection = std::move(connection);
  }
#endif
  return found;
}

bool is_named(const Candidate& job, const std::string& name) {
  if (job.local && job.local->report.job == name) return true;
  const auto pid = parse_number<pid_t>(name);
  return pid && (*pid == job.agent || (job.local && job.local->has(*pid)));
}

std::string describe(const Candidate& job) {
  if (!job.local)
    return "\n  " + std::to_string(job.agent) + ": an agent of lockstep run that has no ranks now";
  const HostReport& report = job.local->report;
  const size_t ranks = report.ranks.size();
  return "\n  " + printable(report.job, 80) + ": " + counted(ranks, "rank") + " here, the first is process " +
         std::to_string(report.ranks.front().pid) + ", " + printable(report.program, 100);
}

/// A line, where there are some.
std::string describe_other_versions(const std::vector<pid_t>& pids) {
  constexpr size_t kMost = 10;
  if (pids.empty()) return {};
  std::string text = pids.size() == 1 ? "lockstep top: process " : "lockstep top: processes ";
  for (size_t i = 0; i < std::min(pids.size(), kMost); ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(pids[i]);
  if (pids.size() > kMost) text += " and " + std::to_string(pids.size() - kMost) + " more";
  return text + ": of another version of Lockstep, which this one can't read\n";
}

/// The one that is meant; none where none runs.
std::optional<Candidate> choose(std::vector<Candidate> jobs, const std::string& name) {
  std::string all;
  for (const Candidate& job : jobs) all += describe(job);
  if (!name.empty() && !jobs.empty()) {
    std::erase_if(jobs, [&](const Candidate& job) { return !is_named(job, name); });
    TORCH_CHECK_VALUE(!jobs.empty(), "no job '", name, "' of this user runs here; these do:", all);
  }
  TORCH_CHECK_VALUE(jobs.size() <= 1,
                    "several jobs run here; name one, by its id or by the pid of one of its processes:", all);
  return jobs.empty() ? std::nullopt : std::optional(std::move(jobs.front()));
}

std::unique_ptr<JobSource> open_source(Candidate job, std::unique_ptr<HostSampler> sampler) {
#ifdef LOCKSTEP_CLI_HOSTS
  if (job.connection)
    return std::make_unique<AgentSource>(launch::JobWatch(job.agent, std::move(job.connection)));
#endif
  return std::make_unique<LocalSource>(std::move(sampler), *job.local);
}

/// Waits for so long, or until `other` is readable. True where a signal asks this program to end: SIGUSR1 and SIGUSR2, which
/// may be sent to all programs of this name, are for jobs.
bool wait_for_signal(const launch::SignalCatcher& signals, const Deadline& until, int other = -1) {
  pollfd waits[2] = {{signals.fd(), POLLIN, 0}, {other, POLLIN, 0}};  // a negative descriptor is ignored
  ::poll(waits, 2, until.poll_milliseconds());
  while (const auto signal = signals.take()) {
    if (*signal != SIGUSR1 && *signal != SIGUSR2) return true;
  }
  return false;
}

struct Terminal {
  bool moves = false;  // its cursor can be moved
  monitor::JobTableOptions size;
};

Terminal look_at_terminal() {
  Terminal terminal;
  const char* kind = std::getenv("TERM");
  terminal.moves = kind != nullptr && *kind != '\0' && std::string(kind) != "dumb";
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0) {
    terminal.size.columns = size.ws_col;
    if (terminal.moves && size.ws_row > 0)
      terminal.size.rows = std::max(size.ws_row - 1, 1);  // the cursor stands below
  }
  return terminal;
}

/// In one piece, so that the table does not flicker. Changes no mode of the terminal: there is nothing to restore.
std::string frame_of(const std::string& table, bool first) {
  std::string frame = first ? "\033[H\033[2J" : "\033[H";
  for (const char c : table) {
    if (c == '\n') frame += "\033[K";  // what the former table had after it
    frame += c;
  }
  return frame + "\033[J";
}

/// The first look that has everything, as far as it comes in time; nothing where a signal or the job's end came before.
std::optional<std::vector<HostReport>> first_look(JobSource& source, const launch::SignalCatcher& signals,
                                                  bool& interrupted) {
  const auto patience = Deadline::after(kPatienceWithHosts);
  if (source.fd() < 0) {
    interrupted = wait_for_signal(signals, Deadline::after(kBetweenFirstLooks));
    return source.look();
  }
  auto hosts = source.look();
  while (hosts && !monitor::has_all_ranks(*hosts) && !interrupted && !patience.expired()) {
    interrupted = wait_for_signal(signals, patience, source.fd());
    hosts = source.look();
  }
  return hosts;
}

int show(const TopArguments& arguments) {
  auto sampler = std::make_unique<HostSampler>();
  auto jobs = find_jobs(*sampler);
  const std::string others = describe_other_versions(sampler->other_versions());
  if (arguments.job.empty() || jobs.empty()) std::cerr << others;
  auto job = choose(std::move(jobs), arguments.job);
  if (!job) {
    std::cerr << "lockstep top: no job of this user runs on this host, or its ranks have not met yet\n";
    return 1;
  }
  const auto source = open_source(std::move(*job), std::move(sampler));
  const launch::SignalCatcher signals;
  bool interrupted = false;
  auto hosts = first_look(*source, signals, interrupted);
  const bool once = arguments.json || arguments.once || ::isatty(STDOUT_FILENO) == 0;
  if (hosts && once && !interrupted) {
    const std::string text = arguments.json ? monitor::job_json(*hosts) : monitor::draw_table(*hosts, {});
    TORCH_CHECK(write_all(STDOUT_FILENO, text) == text.size(),
                "standard output can't be written: ", std::strerror(errno));
    return 0;
  }
  const std::chrono::duration<double> interval(arguments.interval);
  for (bool first = true; hosts && !interrupted; first = false) {
    const Terminal terminal = look_at_terminal();
    const std::string table = monitor::draw_table(*hosts, terminal.size);
    write_all(STDOUT_FILENO, terminal.moves ? frame_of(table, first) : (first ? "" : "\n") + table);
    const auto until = Deadline::after(std::chrono::duration_cast<std::chrono::nanoseconds>(interval));
    do {  // reports are read as they come: an agent keeps few for those that don't, and not the newest
      interrupted = wait_for_signal(signals, until, source->fd());
      hosts = source->look();
    } while (hosts && !interrupted && source->fd() >= 0 && !until.expired());
  }
  if (!interrupted) std::cerr << "lockstep top: the job has ended\n";
  return 0;
}

}  // namespace

void add_top(CLI::App& program, int& status) {
  auto arguments = std::make_shared<TopArguments>();
  CLI::App* top = program.add_subcommand(
      "top", "Watch a running job: its ranks' steps, phases and waits, its hosts and cards");
  top->footer(kTopExamples);
  top->add_option("JOB", arguments->job,
                  "The job's id, or the pid of one of its processes; needed where several run");
  top->add_flag("--once", arguments->once, "One table, and end");
  top->add_flag("--json", arguments->json, "The same as JSON, once");
  top->add_option("-d,--interval", arguments->interval, "Seconds between two tables")
      ->type_name("SECONDS")
      ->check(CLI::Range(0.1, 3600.0))
      ->capture_default_str();
  top->callback([arguments, &status] { status = show(*arguments); });
}

std::function<std::string(uint64_t, bool)> make_host_report(const std::string& job) {
  return [job, sampler = std::shared_ptr<HostSampler>()](uint64_t generation, bool idles) mutable {
    if (!sampler) {
      sampler = std::make_shared<HostSampler>();
      sampler->look();
      std::this_thread::sleep_for(kBetweenFirstLooks);
    }
    std::optional<HostReport> report;
    for (LocalJob& local : sampler->look()) {
      std::erase_if(local.report.ranks,
                    [&](const auto& rank) { return local.lines.at(rank.pid).count(::getpid()) == 0; });
      // A rank may have begun a job of its own, which is smaller.
      if (!report || local.report.ranks.size() > report->ranks.size()) report = std::move(local.report);
    }
    if (!report || report->ranks.empty()) {
      report = sampler->host();
      report->job = job;
    }
    report->generation = generation;
    report->idles = idles;
    return monitor::to_json(*report);
  };
}

}  // namespace lockstep::cli
