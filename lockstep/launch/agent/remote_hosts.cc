#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <mutex>
#include <optional>
#include <poll.h>
#include <signal.h>
#include <sstream>
#include <stdlib.h>
#include <string_view>
#include <sys/types.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/deadline.h>
#include <lockstep/base/files/write_all.h>
#include <lockstep/base/host_name.h>
#include <lockstep/base/process/background_thread.h>
#include <lockstep/base/text/parse_number.h>
#include <lockstep/base/try_again.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/agent/orphan_watch.h>
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
// A pipe takes them at once, also where no process reads.
constexpr size_t kMostInstructions = 60000;
// Beyond the grace period that the agents have themselves.
constexpr std::chrono::seconds kAgentsTime{10};
// Without a word in so long, an agent takes the command that started it for lost.
constexpr int kMostSilence = 60;  // seconds
constexpr std::chrono::seconds kBetweenWords{5};
// How a shell ends that can't start a command, by POSIX: one that is no program, or is not there.
constexpr int kNotExecuted = 126;
constexpr int kNotFound = 127;
// And how one ends whose command a signal has killed: this and the signal's number.
constexpr int kBySignal = 128;
// An agent that gets one of these ends its workers, and with kBySignal and its number. It catches no others.
constexpr std::array<int, 5> kSignalsOfAgents = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1};

RemoteHost parse_host(const std::string& text, const std::string& all) {
  RemoteHost host = {.name = text};
  const size_t colon = text.rfind(':');
  const size_t bracket = text.rfind(']');
  if (colon != std::string::npos && (bracket == std::string::npos || colon > bracket)) {
    host.name = text.substr(0, colon);
    const auto slots = parse_number<int>(std::string_view(text).substr(colon + 1));
    TORCH_CHECK_VALUE(slots && *slots >= 1 && *slots <= kMostSlots, "-H has '", text,
                      "'; it takes HOST or HOST:SLOTS");
    host.processes = *slots;
  }
  const bool in_brackets = host.name.starts_with('[') && host.name.ends_with(']');
  if (in_brackets) host.name = host.name.substr(1, host.name.size() - 2);
  // A remote shell would take it for an option.
  const bool good = !host.address().empty() && !host.name.starts_with('-') &&
                    (in_brackets || host.name.find(':') == std::string::npos);
  TORCH_CHECK_VALUE(good, "-H is '", all, "'; it takes HOST:SLOTS,…, and an IPv6 address in brackets");
  return host;
}

/// The agents' standard inputs. From keep_alive() on a thread of its own says there that this process lives: the one that
/// passes on what the agents write may wait for a terminal for long. Thread-safe.
class AgentInputs {
 public:
  AgentInputs() = default;
  AgentInputs(const AgentInputs&) = delete;
  AgentInputs& operator=(const AgentInputs&) = delete;
  ~AgentInputs() {
    close();
    thread_.join();
  }

  void add(UniqueFd input) {
    const std::lock_guard lock(mutex_);
    inputs_.push_back(std::move(input));
  }
  void keep_alive() {
    thread_.start("lockstep-alive", [this] {
      std::unique_lock lock(mutex_);
      while (!closing_.wait_for(lock, kBetweenWords, [this] { return closed_; })) write("\n");
    });
  }
  void tell(const std::string& line) {
    const std::lock_guard lock(mutex_);
    write(line);
  }
  /// Then the agents end.
  void close() {
    const std::lock_guard lock(mutex_);
    inputs_.clear();
    closed_ = true;
    closing_.notify_one();
  }

 private:
  void write(const std::string& line) {
    for (const UniqueFd& input : inputs_) {
      // All of it or nothing, for it is shorter than PIPE_BUF.
      [[maybe_unused]] const ssize_t written = ::write(input.get(), line.data(), line.size());
    }
  }

  std::mutex mutex_;
  std::condition_variable closing_;
  bool closed_ = false;
  std::vector<UniqueFd> inputs_;
  BackgroundThread thread_;
};

/// The remote shell of one host, or the agent itself where that is this one.
struct Shell {
  WorkerProcess process;
  std::optional<int> status = {};  // wait status
  bool was_told_to_end = false;
};

class RemoteAgents {
 public:
  explicit RemoteAgents(const RemoteRun& run)
      : run_(run),
        guardian_(static_cast<int>(run.agents.size())),
        output_({.nprocs = static_cast<int>(run.agents.size()),
                 .prefix = false,
                 .targets = run.output,
                 .observe = run.observe_output}) {}

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
    const auto signal = output_.drain(signals_, signal_ != 0);
    if (signal && signal_ == 0) signal_ = *signal;
    if (all_try_again()) return kTryAgain;  // to a signal, too, which the agents passed on
    if (signal_ != 0) return 128 + signal_;
    return first_failed_ ? exit_status(*first_failed_) : 0;
  }

 private:
  void start() {
    const nlohmann::json instructions = {
        {"secret", run_.secret},
        {"variables", run_.variables},
        {"most_silence", kMostSilence},
        {"end_time", std::chrono::ceil<std::chrono::seconds>(run_.grace_period + kAgentsTime).count()}};
    const std::string line =
        instructions.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace) + "\n";
    TORCH_CHECK_VALUE(line.size() <= kMostInstructions, "the variables for the hosts have ", line.size(),
                      " bytes, more than the ", kMostInstructions, " that are passed on");
    const std::vector<std::string> environment = WorkerEnvironment::inherited().strings();
    inputs_.keep_alive();  // the last of many shells may start when the first agents have run for long
    for (const RemoteRun::Agent& agent : run_.agents) {
      int ends[2] = {-1, -1};
      TORCH_CHECK_WITH(DistBackendError, ::pipe2(ends, O_CLOEXEC) == 0,
                       "can't make a pipe: ", std::strerror(errno));
      UniqueFd theirs(ends[0]);
      UniqueFd ours(ends[1]);
      write_all(ours.get(), line);
      ::fcntl(ours.get(), F_SETFL, O_NONBLOCK);  // a shell that reads no more keeps nothing from the others
      auto streams = output_.open_next({});
      const std::vector<std::string> words = start_words(run_, agent);
      shells_.push_back(
          {.process = WorkerProcess::start({.program = find_program(words.front()),
                                            .arguments = words,
                                            .environment = environment,
                                            .standard = {theirs.get(), streams[0].get(), streams[1].get()}},
                                           &guardian_)});
      inputs_.add(std::move(ours));
    }
  }

  bool all_ended() const {
    return std::all_of(shells_.begin(), shells_.end(),
                       [](const Shell& shell) { return shell.status.has_value(); });
  }

  bool all_try_again() const {
    return std::all_of(shells_.begin(), shells_.end(), [](const Shell& shell) {
      return WIFEXITED(*shell.status) && WEXITSTATUS(*shell.status) == kTryAgain;
    });
  }

  void wait_once(Deadline until) {
    std::vector<pollfd> waits = {{signals_.fd(), POLLIN, 0}};
    for (const Shell& shell : shells_)
      waits.push_back({shell.status ? -1 : shell.process.pidfd(), POLLIN, 0});
    const auto own = static_cast<std::ptrdiff_t>(waits.size());
    output_.add_to(waits);
    const Deadline wake_at = earlier(earlier(until, orphans_.wake_at()), output_.wake_at());
    if (::poll(waits.data(), waits.size(), wake_at.poll_milliseconds()) < 0) {
      for (pollfd& wait : waits) wait.revents = 0;
    }
    output_.serve(waits.data() + own, waits.data() + waits.size());
    for (size_t i = 0; i < shells_.size(); ++i) collect(i);
    std::vector<pid_t> shells;
    for (const Shell& shell : shells_) shells.push_back(shell.process.pid());
    orphans_.look(shells);
    while (const auto signal = signals_.take()) pass_on(*signal);
  }

  void collect(size_t i) {
    Shell& shell = shells_[i];
    if (shell.status || !(shell.status = shell.process.wait_status()) || *shell.status == 0) return;
    if (shell.was_told_to_end || first_failed_) return;
    first_failed_ = i;
    // The other agents know of workers that failed, not of an agent that is not there. And that of the first host, the
    // coordinator, is the last to end where it has met them.
    if (i == 0 || is_lost(i) || exit_status(i) == 2) return end_all();
    end_at_ = Deadline::after(run_.grace_period + kAgentsTime);
  }

  bool could_not_start(size_t i) const {
    const int status = *shells_[i].status;
    return WIFEXITED(status) && (WEXITSTATUS(status) == kNotExecuted || WEXITSTATUS(status) == kNotFound);
  }
  /// The shell has ended, and not with a status of its agent: of lockstep run, or one that asks for another start.
  bool is_lost(size_t i) const {
    if (!WIFEXITED(*shells_[i].status)) return true;
    const int status = WEXITSTATUS(*shells_[i].status);
    const bool by_signal = std::any_of(kSignalsOfAgents.begin(), kSignalsOfAgents.end(),
                                       [&](int signal) { return status == kBySignal + signal; });
    return !(status <= 2 || status == kTryAgain || by_signal);
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
    inputs_.tell(std::to_string(signal) + "\n");
    for (Shell& shell : shells_) shell.was_told_to_end = shell.was_told_to_end || signal != SIGUSR2;
  }

  void end_all() {
    end_at_ = Deadline::never();
    kill_at_ = earlier(kill_at_, Deadline::after(run_.grace_period + kAgentsTime));
    inputs_.close();
    for (Shell& shell : shells_) shell.was_told_to_end = true;
  }

  void kill_all() {
    kill_at_ = Deadline::never();
    inputs_.close();
    for (Shell& shell : shells_) {
      shell.was_told_to_end = true;
      if (!shell.status) shell.process.signal_group(SIGKILL);
    }
  }

  void tell_user(const std::string& text) { output_.append("lockstep run: " + text + "\n"); }

  /// What follows the host's name.
  std::string how_it_was_lost(size_t i) const {
    const int status = *shells_[i].status;
    const std::string end = (WIFEXITED(status) ? "" : "was ") + describe_wait_status(status);
    if (run_.agents[i].host.is_here()) return ": the agent " + end;
    if (could_not_start(i)) return ": the agent could not be started: its shell " + end;
    const int signal = WIFEXITED(status) ? WEXITSTATUS(status) - kBySignal : 0;
    if (signal > 0 && signal < NSIG)
      return ": the agent was " + describe_wait_status(signal) + ", as its shell says, which " + end;
    // With 255 ssh ends for each of these.
    return " can't be reached, its remote shell was lost, or its agent was killed: the shell " + end;
  }

  void report(size_t i) {
    const RemoteHost& host = run_.agents[i].host;
    if (!is_lost(i)) {
      if (exit_status(i) == 2) tell_user("nothing could be started on " + host.name);
      return;
    }
    tell_user(host.name + how_it_was_lost(i) +
              "; started as: " + shell_words(start_words(run_, run_.agents[i])));
    for (const std::string& line : output_.last_lines(static_cast<int>(i)))
      output_.append("    " + line + "\n");
  }

  const RemoteRun& run_;
  SignalCatcher signals_;
  Guardian guardian_;
  OutputRouter output_;
  std::vector<Shell> shells_;
  OrphanWatch orphans_;
  AgentInputs inputs_;
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

/// False where nothing has come for so long.
bool comes_within(int fd, std::chrono::seconds time) {
  const Deadline until = Deadline::after(time);
  pollfd wait = {fd, POLLIN, 0};
  do {
    ::poll(&wait, 1, until.poll_milliseconds());
  } while (wait.revents == 0 && !until.expired());
  return wait.revents != 0;
}

void raise_what_comes(int fd, std::chrono::seconds most_silence, std::chrono::seconds end_time) {
  bool heard = true;
  while ((heard = comes_within(fd, most_silence))) {
    const auto line = read_line(fd);
    if (!line) break;
    for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2}) {
      if (*line == std::to_string(signal)) ::kill(::getpid(), signal);
    }
  }
  if (!heard) {
    // Where the connection is cut, what this process writes may wait for ever, and its main thread with it. The guardian
    // ends what it leaves.
    start_detached_thread("lockstep-end", [end_time] {
      std::this_thread::sleep_for(end_time);
      ::_exit(1);
    });
    pollfd error_output = {STDERR_FILENO, POLLOUT, 0};
    if (::poll(&error_output, 1, 0) == 1) {
      write_all(
          STDERR_FILENO,
          "lockstep run: ends, for the lockstep run -H that started this agent has not been heard of for " +
              std::to_string(most_silence.count()) +
              " s: it was stopped, or its host or the network to it is down\n");
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
  // A status that no agent ends with: that of cd is the shell's choice.
  words.push_back("cd " + shell_words({std::filesystem::current_path().string()}) + " || exit " +
                  std::to_string(kNotExecuted) + "; exec " + shell_words(agent.words));
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
  const auto is_number = [&](const char* name) {
    return instructions.contains(name) && instructions[name].is_number_unsigned();
  };
  const bool good = instructions.is_object() && instructions.contains("secret") &&
                    instructions["secret"].is_string() && instructions.contains("variables") &&
                    instructions["variables"].is_array() && is_number("most_silence") &&
                    is_number("end_time");
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
  const std::chrono::seconds most_silence(instructions["most_silence"].get<int>());
  const std::chrono::seconds end_time(instructions["end_time"].get<int>());
  start_detached_thread("lockstep-shell", [fd = input.release(), most_silence, end_time] {
    raise_what_comes(fd, most_silence, end_time);
  });
}

}  // namespace lockstep::launch
