#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/process/cpu.h>
#include <lockstep/base/write_all.h>
#include <lockstep/device/nvidia_devices.h>
#include <lockstep/launch/agent.h>
#include <lockstep/launch/agent_store.h>
#include <lockstep/launch/failure_report.h>
#include <lockstep/launch/output_router.h>
#include <lockstep/launch/supervisor.h>
#include <lockstep/launch/worker_environment.h>
#include <lockstep/rendezvous/flight_directory.h>

namespace lockstep::launch {
namespace {

constexpr int kMostProcesses = 65536;

/// A folder of the run's own, for the ranks' error files.
class TemporaryFolder {
 public:
  TemporaryFolder() : path_(environment::text("TMPDIR").value_or("/tmp") + "/lockstep_XXXXXX") {
    TORCH_CHECK(::mkdtemp(path_.data()) != nullptr, "can't make a folder ", path_, ": ", std::strerror(errno),
                "; set TMPDIR to a folder that can be written");
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string error_file(int rank) const { return path_ + "/error_" + std::to_string(rank) + ".json"; }
  /// What it may hold, and then itself.
  std::vector<std::string> paths(int nprocs) const {
    std::vector<std::string> all;
    for (int rank = 0; rank < nprocs; ++rank) all.push_back(error_file(rank));
    all.push_back(path_);
    return all;
  }

 private:
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

void say(const std::string& text) {
  write_all(STDERR_FILENO, text);
}

int visible_gpus() {
  int devices = count_nvidia_cards("/dev");
  std::error_code ignored;
  // At least one on WSL, which has one node for all.
  if (devices == 0 && std::filesystem::exists("/dev/dxg", ignored)) devices = 1;
  const char* visible = ::getenv("CUDA_VISIBLE_DEVICES");  // empty means none, unset means all
  return visible == nullptr ? devices : std::min(devices, count_visible_devices(visible));
}

std::optional<std::string> read_error(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  return error_file_message(std::string(std::istreambuf_iterator<char>(file), {}));
}

/// Whether a rank has written a flight record in this folder since then.
bool has_flight_records(const std::string& folder, std::filesystem::file_time_type since) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename();
    const bool record = name.starts_with("rank_") && name.ends_with(".json");
    if (record && entry.last_write_time(ignored) >= since) return true;
  }
  return false;
}

WorkerEnvironment common_environment(const RunOptions& options, const OutputRouter& output) {
  auto result = WorkerEnvironment::inherited();
  result.set("LOCKSTEP_RUN", "1");
  result.unset("LOCKSTEP_TERMINAL_COLUMNS");
  if (size_t columns = output.worker_columns(); columns > 0) {
    result.set("LOCKSTEP_TERMINAL_COLUMNS", std::to_string(columns));
  }
  if (!result.has("OMP_NUM_THREADS") && options.nprocs > 1) {
    result.set("OMP_NUM_THREADS", "1");
    say("lockstep run: OMP_NUM_THREADS is not set; each of the " + std::to_string(options.nprocs) +
        " processes gets OMP_NUM_THREADS=1, so that they do not overload the machine\n");
  }
  return result;
}

}  // namespace

int parse_nprocs(const std::string& text) {
  if (text == "cpu") return usable_cores();
  if (text == "gpu" || text == "auto") {
    const int gpus = visible_gpus();
    TORCH_CHECK_VALUE(gpus > 0 || text == "auto",
                      "--nproc-per-node gpu: no CUDA device is visible here; use a number, ", "cpu or auto");
    return gpus > 0 ? gpus : usable_cores();
  }
  int number = 0;
  const char* end = text.data() + text.size();
  auto [stop, error] = std::from_chars(text.data(), end, number);
  TORCH_CHECK_VALUE(error == std::errc() && stop == end, "--nproc-per-node is '", text,
                    "'; it takes a number, auto, cpu or gpu");
  TORCH_CHECK_VALUE(number >= 1 && number <= kMostProcesses, "--nproc-per-node is ", number,
                    "; it takes a number from 1 to ", kMostProcesses, ", auto, cpu or gpu");
  return number;
}

int run(const RunOptions& options) {
  TORCH_CHECK_VALUE(options.nprocs >= 1 && options.nprocs <= kMostProcesses, "the number of processes is ",
                    options.nprocs, "; it must lie in 1 to ", kMostProcesses);
  TORCH_CHECK_VALUE(options.grace_period.count() >= 0, "the grace period is ",
                    to_seconds(options.grace_period), " seconds; it can't be negative");
  TORCH_CHECK_VALUE(!options.command.empty(), "no program to start was given");
  const std::string program = find_program(options.command.front());
  const bool prefix = options.prefix && options.nprocs > 1;

  prepare_descriptors(options.nprocs);
  const auto started_at = std::filesystem::file_time_type::clock::now();
  std::string flight_folder;
  IgnoredBrokenPipe no_broken_pipe;
  TemporaryFolder folder;
  OutputRouter output({.nprocs = options.nprocs,
                       .prefix = prefix,
                       .targets = options.output,
                       .observe = options.observe_output});
  std::vector<Ending> endings;
  std::optional<int> interrupted_by;
  {
    // The guardian's fork comes before the store's threads; the store outlives the workers.
    Supervisor supervisor(options.nprocs,
                          {.grace_period = options.grace_period, .temporary = folder.paths(options.nprocs)});
    const AgentStore store(options.master_port, [&] { return supervisor.interrupted(); });
    const WorkerEnvironment common = common_environment(options, output);
    const UniqueFd nothing(::open("/dev/null", O_RDWR | O_CLOEXEC));
    RankVariables variables{.nprocs = options.nprocs, .store_port = store.port(), .run_id = make_run_id()};
    for (int rank = 0; rank < options.nprocs && !supervisor.interrupted(); ++rank) {
      auto streams = output.open_next();
      WorkerEnvironment mine = common;
      variables.rank = rank;
      variables.apply(mine);
      flight_folder = flight_directory([&](const char* name) { return mine.get(name); });
      mine.set("TORCHELASTIC_ERROR_FILE", folder.error_file(rank));
      mine.set(ExitStatusTable::kVariable, supervisor.exit_status().environment_value());
      const int input = rank == 0 && ::isatty(STDIN_FILENO) == 0 ? -1 : nothing.get();
      supervisor.start({.program = program,
                        .arguments = options.command,
                        .environment = mine.strings(),
                        .standard = {input, streams[0].get(), streams[1].get()},
                        .inherited = {}});
    }
    endings = supervisor.run(output);
    interrupted_by = supervisor.interrupted_by();
  }
  output.close();

  std::vector<RankEvidence> evidence;
  for (int rank = 0; rank < options.nprocs; ++rank) {
    evidence.push_back({read_error(folder.error_file(rank)), output.last_lines(rank)});
  }
  const std::string report = failure_report(endings, evidence);
  say(report);
  if ((!report.empty() || interrupted_by) && has_flight_records(flight_folder, started_at)) {
    say("lockstep run: the ranks' last operations: lockstep inspect flight " + flight_folder + "\n");
  }
  // They were stopped and ask to be started again (RobustLoop): the process that started this job is to know.
  constexpr int kTryAgain = 75;  // EX_TEMPFAIL
  if (!endings.empty() && std::all_of(endings.begin(), endings.end(), [](const Ending& ending) {
        return WIFEXITED(ending.wait_status) && WEXITSTATUS(ending.wait_status) == kTryAgain;
      })) {
    return kTryAgain;
  }
  if (interrupted_by) {
    const char* name = ::sigabbrev_np(*interrupted_by);
    say(std::string("lockstep run: ended by SIG") + (name == nullptr ? "?" : name) + "\n");
    return 128 + *interrupted_by;
  }
  const bool failed = std::any_of(endings.begin(), endings.end(), [](const Ending& e) { return e.failed(); });
  return failed ? 1 : 0;
}

}  // namespace lockstep::launch
