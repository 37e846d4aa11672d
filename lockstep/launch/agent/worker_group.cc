#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <signal.h>
#include <stdlib.h>
#include <string_view>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/files/read_at_most.h>
#include <lockstep/base/host_name.h>
#include <lockstep/base/try_again.h>
#include <lockstep/launch/agent/failure_report.h>
#include <lockstep/launch/agent/filtered_copy.h>
#include <lockstep/launch/agent/local_rank_macro.h>
#include <lockstep/launch/agent/orphan_watch.h>
#include <lockstep/launch/agent/output_router.h>
#include <lockstep/launch/agent/worker_group.h>
#include <lockstep/launch/agent/worker_watch.h>
#include <lockstep/rendezvous/flight_directory.h>
#include <lockstep/rendezvous/process_stat.h>

namespace lockstep::launch {
namespace {

/// The folder of the ranks' error files: one of the run's own that goes with it, or the one where the user keeps these, and
/// what the ranks write.
class RankFiles {
 public:
  RankFiles(const RunOptions& options, int attempt) : kept_(!options.log_folder.empty()) {
    if (kept_) {
      path_ = options.log_folder + "/attempt_" + std::to_string(attempt);
      std::error_code error;
      for (int rank = 0; rank < options.nprocs && !error; ++rank)
        std::filesystem::create_directories(path_ + "/" + std::to_string(rank), error);
      TORCH_CHECK(!error, "can't make a folder in ", path_, ": ", error.message());
      return;
    }
    path_ = environment::text("TMPDIR").value_or("/tmp") + "/lockstep_XXXXXX";
    TORCH_CHECK(::mkdtemp(path_.data()) != nullptr, "can't make a folder ", path_, ": ", std::strerror(errno),
                "; set TMPDIR to a folder that can be written");
  }
  RankFiles(const RankFiles&) = delete;
  RankFiles& operator=(const RankFiles&) = delete;
  ~RankFiles() {
    std::error_code ignored;
    if (!kept_) std::filesystem::remove_all(path_, ignored);
  }
  std::string error_file(int rank) const {
    return kept_ ? path(rank, "error.json") : path_ + "/error_" + std::to_string(rank) + ".json";
  }
  /// A rank's file in a folder that is kept.
  std::string path(int rank, const std::string& name) const {
    return path_ + "/" + std::to_string(rank) + "/" + name;
  }
  /// The file of all ranks in a folder that is kept.
  std::string path(const std::string& name) const { return path_ + "/" + name; }
  /// What is to go with the launcher: what the folder may hold, and then itself.
  std::vector<std::string> temporary(int nprocs) const {
    std::vector<std::string> all;
    for (int rank = 0; !kept_ && rank < nprocs; ++rank) all.push_back(error_file(rank));
    if (!kept_) all.push_back(path_);
    return all;
  }

 private:
  bool kept_;
  std::string path_;
};

/// While one lives, writing to a pipe without a reader is an error and not the launcher's end.
class IgnoredBrokenPipe {
 public:
  IgnoredBrokenPipe() : former_(::signal(SIGPIPE, SIG_IGN)) {}
  IgnoredBrokenPipe(const IgnoredBrokenPipe&) = delete;
  IgnoredBrokenPipe& operator=(const IgnoredBrokenPipe&) = delete;
  ~IgnoredBrokenPipe() { ::signal(SIGPIPE, former_); }

 private:
  void (*former_)(int);
};

/// Anything may be there, for the worker has made it: what is no file, or too large to be a message, says nothing.
std::optional<std::string> read_error(const std::string& path) {
  constexpr size_t kMostBytes = 1 << 20;
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return std::nullopt;
  const auto text = read_at_most(path, kMostBytes);
  return text ? error_file_message(*text) : std::nullopt;
}

/// The line that names the folder where ranks of this host have written flight records since then; empty where
/// none has. `host`: this one's name where there are several.
std::string records_line(const std::string& folder, std::filesystem::file_time_type since,
                         const std::string& host) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename();
    const bool record = name.starts_with("rank_") && name.ends_with(".json");
    if (!record || entry.last_write_time(ignored) < since) continue;
    return "lockstep run: the ranks' last operations" + (host.empty() ? "" : ", on " + host) +
           ": lockstep inspect flight " + folder + "\n";
  }
  return {};
}

using FilteredCopies = std::array<std::optional<FilteredCopy>, 2>;

FilteredCopies filtered_copies(const RunOptions& options, const RankFiles& files) {
  FilteredCopies copies;
  for (size_t i = 0; i < copies.size(); ++i) {
    const char* name = i == 0 ? "filtered_stdout.log" : "filtered_stderr.log";
    if (!options.filters[i].empty())
      copies[i].emplace(files.path(name), options.filters[i], options.role, options.nprocs);
  }
  return copies;
}

std::array<OutputRouter::Route, 2> routes_of(const RunOptions& options, const RankFiles& files,
                                             FilteredCopies& copies, int rank) {
  std::array<OutputRouter::Route, 2> routes;
  const bool chosen = options.shown_ranks.empty() || options.shown_ranks.count(rank) != 0;
  for (const int stream : {1, 2}) {
    OutputRouter::Route& route = routes[static_cast<size_t>(stream - 1)];
    const bool copied = options.tee.has(rank, stream);
    const bool moved = options.redirects.has(rank, stream) && !copied;
    if (copied || moved) route.file = files.path(rank, stream == 1 ? "stdout.log" : "stderr.log");
    route.shown = chosen && !moved;
    FilteredCopy* copy =
        copies[static_cast<size_t>(stream - 1)] ? &*copies[static_cast<size_t>(stream - 1)] : nullptr;
    if (copied && chosen) route.copy = copy;  // as torchrun has it, unlike the file of the rank
  }
  return routes;
}

/// See RunOptions::virtual_local_rank.
void make_local_rank_virtual(WorkerEnvironment& environment, int local_rank) {
  std::string device = std::to_string(local_rank);
  if (const auto visible = environment.get("CUDA_VISIBLE_DEVICES")) {
    std::string_view rest = *visible;  // which has an entry for each: see checked_options()
    for (int i = 0; i < local_rank; ++i) rest.remove_prefix(rest.find(',') + 1);
    rest = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
    device = rest.substr(0, rest.find_last_not_of(' ') + 1);  // may be empty: it sees none then
  }
  environment.set("LOCAL_RANK", "0");
  environment.set("CUDA_VISIBLE_DEVICES", device);
}

/// What a look at the workers finds.
std::vector<WorkerWatch::Worker> look_at(const Supervisor& supervisor, int first_rank) {
  std::vector<WorkerWatch::Worker> workers;
  for (const auto& [local_rank, pid] : supervisor.running()) {
    const auto stat = read_process_stat(pid);
    workers.push_back({.rank = first_rank + local_rank,
                       .pid = pid,
                       .stopped = stat && stat->is_stopped(),
                       .wait = supervisor.exit_status().wait_of(local_rank)});
  }
  return workers;
}

/// The workers' output, what is said of them while they run, and who else decides on them.
class ControlledStreams : public Streams {
 public:
  ControlledStreams(OutputRouter& output, Supervisor& supervisor, int first_rank, WorkerControl* control,
                    std::vector<pid_t> others)
      : output_(output),
        supervisor_(supervisor),
        first_rank_(first_rank),
        control_(control),
        others_(std::move(others)) {}

  void add_to(std::vector<pollfd>& waits) override {
    if (control_ != nullptr) waits.push_back({control_->fd(), POLLIN, 0});
    output_.add_to(waits);
  }
  void serve(const pollfd* begin, const pollfd* end) override {
    if (control_ != nullptr) {
      ++begin;
      control_->serve(supervisor_);
    }
    std::vector<pid_t> own = supervisor_.pids();
    own.insert(own.end(), others_.begin(), others_.end());
    orphans_.look(own);
    if (look_at_.expired()) {
      look_at_ = Deadline::after(WorkerWatch::kInterval);
      for (const std::string& line :
           watch_.look(look_at(supervisor_, first_rank_), std::chrono::steady_clock::now())) {
        output_.say(line);
      }
    }
    output_.serve(begin, end);
  }
  Deadline wake_at() const override {
    return earlier(earlier(look_at_, orphans_.wake_at()), output_.wake_at());
  }
  bool finished() const override { return output_.finished(); }

 private:
  OutputRouter& output_;
  Supervisor& supervisor_;
  int first_rank_;
  WorkerControl* control_;
  std::vector<pid_t> others_;  // children of this process beside the workers
  OrphanWatch orphans_;
  WorkerWatch watch_{host_name()};
  Deadline look_at_ = Deadline::after(WorkerWatch::kInterval);
};

std::string ended_by(int signal) {
  const char* name = ::sigabbrev_np(signal);
  return std::string("lockstep run: ended by SIG") + (name == nullptr ? "?" : name) + "\n";
}

GroupEnd end_of(const std::vector<Ending>& endings, const std::vector<RankEvidence>& evidence, int first_rank,
                const std::string& host, std::optional<int> interrupted_by) {
  // They were stopped and ask to be started again (RobustLoop): the process that started this job is to know.
  if (!endings.empty() && std::all_of(endings.begin(), endings.end(), [](const Ending& ending) {
        return WIFEXITED(ending.wait_status) && WEXITSTATUS(ending.wait_status) == kTryAgain;
      })) {
    return {.exit_status = kTryAgain, .report = {}};
  }
  const bool failed = std::any_of(endings.begin(), endings.end(), [](const Ending& e) { return e.failed(); });
  return {.exit_status = interrupted_by ? 128 + *interrupted_by
                         : failed       ? 1
                                        : 0,
          .report = failure_report(endings, evidence, first_rank, host),
          .far_culprit = far_cause_of_failure(endings)};
}

}  // namespace

WorkerEnvironment common_environment(const RunOptions& options, size_t columns) {
  auto result = WorkerEnvironment::inherited();
  result.set("LOCKSTEP_RUN", "1");
  // torchrun's workers inherit it, and those that start processes by torch.distributed.elastic heed it.
  result.set("TORCHELASTIC_SIGNALS_TO_HANDLE", options.signals_to_handle);
  if (!result.has("LOCKSTEP_PROFILE")) result.set("LOCKSTEP_PROFILE", "on_signal");
  result.unset("LOCKSTEP_TERMINAL_COLUMNS");
  if (columns > 0) result.set("LOCKSTEP_TERMINAL_COLUMNS", std::to_string(columns));
  if (!result.has("OMP_NUM_THREADS") && options.nprocs > 1) result.set("OMP_NUM_THREADS", "1");
  return result;
}

GroupEnd run_workers(const RunOptions& options, RankVariables variables,
                     const std::function<uint16_t(Supervisor&)>& open_store,
                     const std::function<void(WorkerEnvironment&)>& adjust, WorkerControl* control,
                     WorkerForks* forks) {
  const bool prefix = options.prefix && variables.world_size > 1;

  prepare_descriptors(options.nprocs, options.log_folder.empty() ? 0 : 2);
  const auto started_at = std::filesystem::file_time_type::clock::now();
  std::string flight_folder;
  IgnoredBrokenPipe no_broken_pipe;
  std::optional<RankFiles> files(std::in_place, options, variables.restart_count);
  FilteredCopies copies = filtered_copies(options, *files);
  OutputRouter output({.nprocs = options.nprocs,
                       .first_rank = variables.first_rank,
                       .prefix = prefix,
                       .targets = options.output,
                       .observe = options.observe_output});
  std::vector<Ending> endings;
  std::vector<RankEvidence> evidence(static_cast<size_t>(options.nprocs));
  std::optional<int> interrupted_by;
  const SignalCatcher signals;  // for what comes when the supervisor is gone
  {
    // On one host the guardian's fork comes before the store's threads.
    Supervisor supervisor(options.nprocs,
                          {.grace_period = options.grace_period,
                           .temporary = files->temporary(options.nprocs),
                           .exit_status = control == nullptr ? nullptr : control->exit_status(),
                           .owns_job = true});
    variables.store_port = open_store(supervisor);
    const WorkerEnvironment common = common_environment(options, output.worker_columns());
    if (options.tells_of_threads && options.nprocs > 1 && ::getenv("OMP_NUM_THREADS") == nullptr) {
      output.say("OMP_NUM_THREADS is not set; each of the " + std::to_string(options.nprocs) +
                 " processes gets OMP_NUM_THREADS=1, so that they do not overload the machine");
    }
    if (forks != nullptr) forks->prepare(options, common, [&] { return supervisor.interrupted(); });
    const UniqueFd nothing(::open("/dev/null", O_RDWR | O_CLOEXEC));
    for (int rank = 0; rank < options.nprocs && !supervisor.interrupted(); ++rank) {
      auto ends = output.open_next(routes_of(options, *files, copies, rank));
      WorkerEnvironment mine = common;
      variables.local_rank = rank;
      variables.apply(mine);
      if (options.virtual_local_rank) make_local_rank_virtual(mine, rank);
      if (adjust) adjust(mine);
      flight_folder = flight_directory([&](const char* name) { return mine.get(name); });
      mine.set("TORCHELASTIC_ERROR_FILE", files->error_file(rank));
      mine.set(ExitStatusTable::kVariable, supervisor.exit_status().environment_value());
      std::vector<std::string> words = options.command;
      for (size_t i = 1; i < words.size(); ++i) words[i] = with_local_rank(words[i], rank);
      const int input = variables.first_rank + rank == 0 && ::isatty(STDIN_FILENO) == 0 ? -1 : nothing.get();
      supervisor.start(
          {.program = options.program,
           .arguments = std::move(words),
           .environment = mine.strings(),
           .standard = {input, ends[0].get(), ends[1].get()},
           .inherited = {},
           .make_process = forks == nullptr ? MakeProcess() : forks->make_process(),
           .cores = options.cores.empty() ? std::vector<int>() : options.cores[static_cast<size_t>(rank)]});
    }
    if (forks != nullptr) forks->started();
    ControlledStreams streams(output, supervisor, variables.first_rank, control,
                              forks == nullptr ? std::vector<pid_t>() : forks->pids());
    endings = supervisor.run(streams);
    interrupted_by = supervisor.interrupted_by();
    for (int rank = 0; rank < options.nprocs; ++rank)
      evidence[static_cast<size_t>(rank)].error = read_error(files->error_file(rank));
    files.reset();  // while the guardian would remove them: output may wait for its reader for long
  }
  if (control != nullptr && control->has_lapsed()) {
    for (Ending& ending : endings) {
      // Those by the guardian's signal; others have ended by themselves before.
      if (ending.was_ended_by_sigkill() && ending.out_of_memory.empty()) ending.asked_to_end = true;
    }
  }
  output.close();
  for (int rank = 0; rank < options.nprocs; ++rank)
    evidence[static_cast<size_t>(rank)].last_lines = output.last_lines(rank);
  const std::string host = variables.group_size > 1 ? host_name() : std::string();
  GroupEnd end = end_of(endings, evidence, variables.first_rank, host, interrupted_by);
  const bool is_explained = !end.report.empty() || interrupted_by;
  const std::string records = is_explained ? records_line(flight_folder, started_at, host) : std::string();
  if (!end.report.empty()) end.report += records;
  if (control != nullptr) control->ended(end);
  if (end.exit_status == kTryAgain) {
    output.append("lockstep run: the processes ended with status 75, which asks for another start\n");
  } else {
    output.append(end.report);
    if (end.report.empty() && interrupted_by) output.append(records);
    if (interrupted_by) output.append(ended_by(*interrupted_by));
  }
  while (interrupted_by && signals.take()) {  // the supervisor has taken them, too
  }
  const auto signal =
      output.drain(signals, interrupted_by.has_value(), control == nullptr ? -1 : control->fd());
  if (signal && !interrupted_by) end.exit_status = 128 + *signal;
  return end;
}

}  // namespace lockstep::launch
