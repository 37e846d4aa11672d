#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <optional>
#include <poll.h>
#include <signal.h>
#include <sstream>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/deadline.h>
#include <lockstep/base/files/write_all.h>
#include <lockstep/base/host_name.h>
#include <lockstep/base/process/background_thread.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/agent/output_router.h>
#include <lockstep/launch/agent/remote_hosts.h>
#include <lockstep/launch/agent/shell_words.h>
#include <lockstep/launch/guardian.h>
#include <lockstep/launch/signal_catcher.h>
#include <lockstep/launch/supervisor.h>
#include <lockstep/launch/worker_environment.h>
#include <lockstep/launch/worker_process.h>
#include <lockstep/rendezvous/exit_status_table.h>

namespace lockstep::launch {
namespace {

constexpr int kMostSlots = 65536;
// A pipe takes them at once, also where no one reads.
constexpr size_t kMostInstructions = 60000;
// Beyond the grace period that the agents have themselves.
constexpr std::chrono::seconds kAgentsTime{10};

RemoteHost parse_host(const std::string& text, const std::string& all) {
  RemoteHost host = {.name = text};
  const size_t colon = text.rfind(':');
  const size_t bracket = text.rfind(']');
  if (colon != std::string::npos && (bracket == std::string::npos || colon > bracket)) {
    host.name = text.substr(0, colon);
    const char* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data() + colon + 1, end, host.processes);
    TORCH_CHECK_VALUE(
        error == std::errc() && stop == end && host.processes >= 1 && host.processes <= kMostSlots,
        "-H has '", text, "'; it takes HOST or HOST:SLOTS");
  }
  const bool in_brackets = host.name.starts_with('[') && host.name.ends_with(']');
  if (in_brackets) host.name = host.name.substr(1, host.name.size() - 2);
  // A remote shell would take it for an option.
  const bool good = !host.address().empty() && !host.name.starts_with('-') &&
                    (in_brackets || host.name.find(':') == std::string::npos);
  TORCH_CHECK_VALUE(good, "-H is '", all, "'; it takes HOST:SLOTS,…, and an IPv6 address in brackets");
  return host;
}

void tell_user(const std::string& text) {
  write_all(STDERR_FILENO, "lockstep run: " + text + "\n");
}

/// The remote shell of one host, or the agent itself where that is this one.
struct Shell {
  WorkerProcess process;
  UniqueFd input;                  // of the agent; closed: it ends
  std::optional<int> status = {};  // wait status
  bool was_told_to_end = false;
};

class RemoteAgents {
 public:
  explicit RemoteAgents(const RemoteRun& run)
      : run_(run),
        guardian_(static_cast<int>(run.agents.size())),
        output_({.nprocs = static_cast<int>(run.agents.size()), .prefix = false}) {}

  int run() {
    start();
    while (!all_ended()) {
      wait_once(earlier(end_at_, kill_at_));
      if (end_at_.expired()) end_all();
      if (kill_at_.expired()) kill_all();
    }
    const Deadline drained = Deadline::after(Supervisor::kDrainTime);
    while (!output_.finished() && !drained.expired()) wait_once(drained);
    for (Shell& shell : shells_) shell.process.reap();
    output_.close();
    if (first_failed_) report(*first_failed_);
    if (signal_ != 0) return 128 + signal_;
    return first_failed_ ? exit_status(*first_failed_) : 0;
  }

 private:
  void start() {
    const nlohmann::json instructions = {{"secret", run_.secret}, {"variables", run_.variables}};
    const std::string line =
        instructions.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace) + "\n";
    TORCH_CHECK_VALUE(line.size() <= kMostInstructions, "the variables for the hosts have ", line.size(),
                      " bytes, more than the ", kMostInstructions, " that are passed on");
    const std::vector<std::string> environment = WorkerEnvironment::inherited().strings();
    for (const RemoteRun::Agent& agent : run_.agents) {
      int ends[2] = {-1, -1};
      TORCH_CHECK_WITH(DistBackendError, ::pipe2(ends, O_CLOEXEC) == 0,
                       "can't make a pipe: ", std::strerror(errno));
      UniqueFd theirs(ends[0]);
      UniqueFd ours(ends[1]);
      write_all(ours.get(), line);
      auto streams = output_.open_next({});
      const std::vector<std::string> words = start_words(run_, agent);
      shells_.push_back(
          {.process = WorkerProcess::start({.program = find_program(words.front()),
                                            .arguments = words,
                                            .environment = environment,
                                            .standard = {theirs.get(), streams[0].get(), streams[1].get()}},
                                           guardian_),
           .input = std::move(ours)});
    }
  }

  bool all_ended() const {
    return std::all_of(shells_.begin(), shells_.end(),
                       [](const Shell& shell) { return shell.status.has_value(); });
  }

  void wait_once(Deadline until) {
    std::vector<pollfd> waits = {{signals_.fd(), POLLIN, 0}};
    for (const Shell& shell : shells_)
      waits.push_back({shell.status ? -1 : shell.process.pidfd(), POLLIN, 0});
    const auto own = static_cast<std::ptrdiff_t>(waits.size());
    output_.add_to(waits);
    if (::poll(waits.data(), waits.size(), earlier(until, output_.wake_at()).poll_milliseconds()) < 0) {
      for (pollfd& wait : waits) wait.revents = 0;
    }
    output_.serve(waits.data() + own, waits.data() + waits.size());
    for (size_t i = 0; i < shells_.size(); ++i) collect(i);
    while (const auto signal = signals_.take()) pass_on(*signal);
  }

  void collect(size_t i) {
    Shell& shell = shells_[i];
    if (shell.status || !(shell.status = shell.process.wait_status()) || *shell.status == 0) return;
    if (shell.was_told_to_end || first_failed_) return;
    first_failed_ = i;
    // The other agents know of workers that failed, not of an agent that is not there.
    if (is_lost(i) || exit_status(i) == 2) return end_all();
    end_at_ = Deadline::after(run_.grace_period + kAgentsTime);
  }

  /// The shell has ended, and not with a status of its agent: 255 is ssh's, 126 and 127 those of a shell that could not
  /// start it.
  bool is_lost(size_t i) const {
    const int status = *shells_[i].status;
    return !WIFEXITED(status) || (WEXITSTATUS(status) >= 126 && WEXITSTATUS(status) <= 127) ||
           WEXITSTATUS(status) == 255;
  }
  int exit_status(size_t i) const { return is_lost(i) ? 1 : WEXITSTATUS(*shells_[i].status); }

  void pass_on(int signal) {
    if (signal == SIGUSR2) return tell(signal);  // which ends nothing
    if (signal_ != 0) return kill_all();
    signal_ = signal;
    tell(signal);
    kill_at_ = earlier(kill_at_, Deadline::after(run_.grace_period + kAgentsTime));
  }

  void tell(int signal) {
    const std::string line = std::to_string(signal) + "\n";
    for (Shell& shell : shells_) {
      if (shell.input) write_all(shell.input.get(), line);
      shell.was_told_to_end = shell.was_told_to_end || signal != SIGUSR2;
    }
  }

  void end_all() {
    end_at_ = Deadline::never();
    kill_at_ = earlier(kill_at_, Deadline::after(run_.grace_period + kAgentsTime));
    for (Shell& shell : shells_) {
      shell.input.reset();
      shell.was_told_to_end = true;
    }
  }

  void kill_all() {
    kill_at_ = Deadline::never();
    for (Shell& shell : shells_) {
      shell.input.reset();
      shell.was_told_to_end = true;
      if (!shell.status) shell.process.signal_group(SIGKILL);
    }
  }

  void report(size_t i) const {
    const RemoteHost& host = run_.agents[i].host;
    if (!is_lost(i)) {
      if (exit_status(i) == 2) tell_user("nothing could be started on " + host.name);
      return;
    }
    tell_user(
        host.name +
        (host.is_here() ? ": the agent was " : " can't be reached, or its remote shell was lost: it was ") +
        describe_wait_status(*shells_[i].status) +
        "; started as: " + shell_words(start_words(run_, run_.agents[i])));
    for (const std::string& line : output_.last_lines(static_cast<int>(i)))
      write_all(STDERR_FILENO, "    " + line + "\n");
  }

  const RemoteRun& run_;
  SignalCatcher signals_;
  Guardian guardian_;
  OutputRouter output_;
  std::vector<Shell> shells_;
  std::optional<size_t> first_failed_;
  int signal_ = 0;  // the first that came
  Deadline end_at_ = Deadline::never();
  Deadline kill_at_ = Deadline::never();
};

/// Up to the line's end, which is left out; nothing when the input ends before. Byte by byte: what follows is another's.
std::optional<std::string> read_line(int fd) {
  std::string line;
  for (char letter = 0; line.size() <= kMostInstructions;) {
    const ssize_t got = ::read(fd, &letter, 1);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return std::nullopt;
    if (letter == '\n') return line;
    line += letter;
  }
  return std::nullopt;
}

void raise_what_comes(int fd) {
  while (const auto line = read_line(fd)) {
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2}) {
      if (*line == std::to_string(signal)) ::kill(::getpid(), signal);
    }
  }
  ::kill(::getpid(), SIGTERM);
}

}  // namespace

bool RemoteHost::is_here() const {
  return name == "localhost" || name.starts_with("127.") || name == "::1" || name == host_name();
}

std::vector<RemoteHost> parse_remote_hosts(const std::string& text, int processes) {
  std::vector<RemoteHost> hosts;
  std::istringstream items(text);
  int slots = 0;
  for (std::string item; std::getline(items, item, ',');) {
    RemoteHost host = parse_host(item, text);
    const bool again =
        std::any_of(hosts.begin(), hosts.end(), [&](const RemoteHost& one) { return one.name == host.name; });
    TORCH_CHECK_VALUE(!again, "-H names ", host.name, " twice; give it all its slots at once");
    if (processes > 0) host.processes = std::min(host.processes, processes - slots);
    slots += host.processes;
    if (host.processes > 0) hosts.push_back(std::move(host));
  }
  TORCH_CHECK_VALUE(!hosts.empty(), "-H names no host");
  TORCH_CHECK_VALUE(slots >= processes, "-n is ", processes, ", and the hosts of -H have ", slots, " slots");
  return hosts;
}

std::vector<std::string> start_words(const RemoteRun& run, const RemoteRun::Agent& agent) {
  if (agent.host.is_here()) return agent.words;
  std::vector<std::string> words = run.shell;
  words.push_back(agent.host.name);
  words.push_back("cd " + shell_words({std::filesystem::current_path().string()}) + " && exec " +
                  shell_words(agent.words));
  return words;
}

int run_on_remote_hosts(const RemoteRun& run) {
  prepare_descriptors(static_cast<int>(run.agents.size()), 1);
  struct sigaction ignore = {};
  ignore.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &ignore, nullptr);  // an agent that has ended reads no more
  return RemoteAgents(run).run();
}

void obey_remote_launcher() {
  const auto line = read_line(STDIN_FILENO);
  const auto instructions = nlohmann::json::parse(line.value_or(""), nullptr, /*allow_exceptions=*/false);
  const bool good = instructions.is_object() && instructions.contains("secret") &&
                    instructions["secret"].is_string() && instructions.contains("variables") &&
                    instructions["variables"].is_array();
  TORCH_CHECK_VALUE(
      good, "--started-by-shell is for lockstep run -H alone, which tells by standard input what to do");
  for (const auto& variable : instructions["variables"]) {
    const std::string text = variable.is_string() ? variable.get<std::string>() : std::string();
    const size_t equals = text.find('=');
    if (equals != std::string::npos) ::setenv(text.substr(0, equals).c_str(), text.c_str() + equals + 1, 1);
  }
  ::setenv("LOCKSTEP_JOB_SECRET", instructions["secret"].get<std::string>().c_str(), 1);
  UniqueFd input(::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3));
  const UniqueFd nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  TORCH_CHECK_WITH(DistBackendError, input && nothing && ::dup2(nothing.get(), STDIN_FILENO) >= 0,
                   "can't replace standard input: ", std::strerror(errno));
  start_detached_thread("lockstep-shell", [fd = input.release()] { raise_what_comes(fd); });
}

}  // namespace lockstep::launch
