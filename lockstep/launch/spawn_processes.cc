#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string_view>
#include <sys/wait.h>
#include <typeinfo>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/exception_text.h>
#include <lockstep/base/files/write_all.h>
#include <lockstep/launch/agent_store.h>
#include <lockstep/launch/spawn_processes.h>
#include <lockstep/launch/worker_environment.h>

namespace lockstep::launch {
namespace {

// The messages of a child, over a pipe: kReached, then kReturned, or kRaised and a text up to the pipe's end.
constexpr char kReached = 'R';
constexpr char kReturned = 'D';
constexpr char kRaised = 'E';

/// In a process that spawn() started: what for. LOCKSTEP_SPAWN is "PARENT:RANK:NPROCS:DESCRIPTOR:CALL".
struct Role {
  int rank = 0;
  int nprocs = 0;
  int messages = -1;
  std::string call;
  bool running = false;
};

Role* role_of_this_process() {
  static std::optional<Role> role = []() -> std::optional<Role> {
    const auto text = environment::text("LOCKSTEP_SPAWN");
    if (!text) return std::nullopt;
    std::array<int, 4> numbers = {};
    const char* at = text->data();
    const char* end = text->data() + text->size();
    for (int& number : numbers) {
      auto [stop, error] = std::from_chars(at, end, number);
      TORCH_CHECK_VALUE(error == std::errc() && stop != end && *stop == ':',
                        "environment variable LOCKSTEP_SPAWN is '", *text,
                        "', which spawn() did not write; unset it");
      at = stop + 1;
    }
    // A program that the function started has the variable too, but another parent.
    if (numbers[0] != ::getppid()) return std::nullopt;
    ::fcntl(numbers[3], F_SETFD, FD_CLOEXEC);  // nor shall such a program hold the pipe open
    return Role{numbers[1], numbers[2], numbers[3], std::string(at, end)};
  }();
  return role ? &*role : nullptr;
}

void tell(int fd, std::string_view text) {
  write_all(fd, text);  // where that fails, the parent is gone, and this process with it
}

[[noreturn]] void run_in_child(Role& role, int nprocs, const std::function<void(int)>& function) {
  role.running = true;
  tell(role.messages, {&kReached, 1});
  std::string error;
  try {
    TORCH_CHECK_VALUE(role.nprocs == nprocs, "spawn() is called for ", nprocs,
                      " processes in this child but for ", role.nprocs,
                      " in its parent; the code before the call must compute the same in both");
    function(role.rank);
    tell(role.messages, {&kReturned, 1});
    std::exit(0);  // NOLINT(concurrency-mt-unsafe): flushes and runs atexit handlers, like a return from main
  } catch (const std::exception& raised) {
    error = c10::demangle(typeid(raised).name()) + ": " + text_of(raised);
  } catch (...) {
    error = "an exception that is no std::exception";
  }
  tell(role.messages, kRaised + error);
  std::cout.flush();
  std::cerr.flush();
  std::fflush(nullptr);
  ::_exit(1);  // the state that a failed function left may not survive its own destructors
}

/// Reads the children's messages.
class Messages : public Streams {
 public:
  struct Told {
    UniqueFd fd;
    std::string text;
    std::optional<Deadline::Clock::time_point> raised_at;
  };

  UniqueFd open_next() {
    int ends[2] = {-1, -1};
    TORCH_CHECK_WITH(DistBackendError, ::pipe2(ends, O_CLOEXEC) == 0,
                     "can't make a pipe: ", std::strerror(errno));
    ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
    told_.emplace_back();
    told_.back().fd.reset(ends[0]);
    return UniqueFd(ends[1]);
  }
  const std::vector<Told>& told() const { return told_; }

  void add_to(std::vector<pollfd>& waits) override {
    for (const Told& told : told_) waits.push_back({told.fd.get(), POLLIN, 0});  // -1 is skipped
  }
  void serve(const pollfd* begin, const pollfd*) override {
    for (size_t i = 0; i < told_.size(); ++i) {
      if (begin[i].fd >= 0 && begin[i].revents != 0) read_from(told_[i]);
    }
  }
  // All that an ended process said is in its pipe, though a process that it forked may hold that open.
  bool finished() const override { return true; }
  std::vector<int> failed_ranks() const override {
    std::vector<int> ranks;
    for (size_t i = 0; i < told_.size(); ++i) {
      const bool silent = !told_[i].fd && told_[i].text.empty();  // ended before it came to the call
      if (told_[i].raised_at || silent) ranks.push_back(static_cast<int>(i));
    }
    return ranks;
  }

 private:
  static void read_from(Told& told) {
    char buffer[4096];
    ssize_t got = 0;
    while ((got = ::read(told.fd.get(), buffer, sizeof(buffer))) > 0 || (got < 0 && errno == EINTR)) {
      if (got > 0) told.text.append(buffer, static_cast<size_t>(got));
    }
    if (got == 0) told.fd.reset();  // else EAGAIN: more may come
    if (!told.raised_at && told.text.size() > 1 && told.text[1] == kRaised)
      told.raised_at = Deadline::Clock::now();
  }

  std::vector<Told> told_;
};

std::string own_program() {
  // By its path, so that the child has the same name; but what runs here may have been built anew or deleted
  // since.
  std::string path(4096, '\0');
  const ssize_t length = ::readlink("/proc/self/exe", path.data(), path.size());
  if (length <= 0) return "/proc/self/exe";
  path.resize(static_cast<size_t>(length));
  return path.ends_with(" (deleted)") || ::access(path.c_str(), X_OK) != 0 ? "/proc/self/exe" : path;
}

std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  std::vector<std::string> arguments;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\0', begin), text.size());
    arguments.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  TORCH_CHECK(!arguments.empty(),
              "spawn() can't read this process's arguments from /proc/self/cmdline; is /proc mounted?");
  return arguments;
}

SpawnResult result_of(const std::vector<Ending>& endings, const std::vector<Messages::Told>& told) {
  SpawnResult result;
  result.outcomes.resize(told.size());
  std::vector<std::pair<Deadline::Clock::time_point, int>> failures;
  for (const Ending& ending : endings) {
    const auto rank = static_cast<size_t>(ending.local_rank);
    const std::string& text = told[rank].text;
    SpawnOutcome& outcome = result.outcomes[rank];
    outcome = {ending.pid, ending.wait_status, ending.asked_to_end, !text.empty(), std::nullopt};
    if (text.size() > 1 && text[1] == kRaised) outcome.exception = text.substr(2);
    if (outcome.failed()) failures.emplace_back(told[rank].raised_at.value_or(ending.at), ending.local_rank);
  }
  std::stable_sort(failures.begin(), failures.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [at, rank] : failures) result.failed.push_back(rank);
  if (failures.empty()) return result;
  // The cause first, though a victim of its failure may have told of its own error before.
  const int cause = cause_of_failure(endings, result.failed.front());
  std::stable_partition(result.failed.begin(), result.failed.end(), [&](int rank) { return rank == cause; });
  return result;
}

SpawnResult run_children(const SpawnRequest& request, const std::string& call) {
  const SpawnOptions& options = request.options;
  prepare_descriptors(request.nprocs);
  Messages messages;
  Supervisor supervisor(
      request.nprocs,
      {.grace_period = options.grace_period, .may_fail = request.may_fail, .deadline = request.deadline});
  const AgentStore store(0, [&] { return supervisor.interrupted(); });
  const std::string program = own_program();
  const std::vector<std::string> arguments = options.argv.empty() ? own_arguments() : options.argv;
  const UniqueFd nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  RankVariables variables{.nprocs = request.nprocs,
                          .world_size = request.nprocs,
                          .role_world_size = request.nprocs,
                          .store_port = store.port(),
                          .run_id = make_run_id()};
  for (int rank = 0; rank < request.nprocs && !supervisor.interrupted(); ++rank) {
    auto environment = WorkerEnvironment::inherited();
    variables.local_rank = rank;
    variables.apply(environment);
    for (const auto& [name, value] : options.environment) {
      value ? environment.set(name, *value) : environment.unset(name);
    }
    const UniqueFd pipe = messages.open_next();
    environment.set("LOCKSTEP_SPAWN", std::to_string(::getpid()) + ":" + std::to_string(rank) + ":" +
                                          std::to_string(request.nprocs) + ":" + std::to_string(pipe.get()) +
                                          ":" + call);
    environment.set(ExitStatusTable::kVariable, supervisor.exit_status().environment_value());
    const int output = request.outputs.empty() ? -1 : request.outputs.at(static_cast<size_t>(rank));
    supervisor.start({.program = program,
                      .arguments = arguments,
                      .environment = environment.strings(),
                      .standard = {nothing.get(), output, output},
                      .inherited = {pipe.get()},
                      .make_process = request.make_process});
  }
  const auto& endings = supervisor.run(messages);
  SpawnResult result = result_of(endings, messages.told());
  // An interrupt may have come before all were started.
  result.outcomes.resize(static_cast<size_t>(request.nprocs));
  result.deadline_passed = supervisor.deadline_passed();
  result.interrupted_by = supervisor.interrupted_by();
  return result;
}

}  // namespace

std::optional<SpawnResult> spawn_processes(const SpawnRequest& request,
                                           const std::function<void(int)>& function) {
  static std::atomic<int> calls{0};
  TORCH_CHECK_VALUE(request.nprocs >= 1, "spawn() for ", request.nprocs, " processes: at least 1 is needed");
  TORCH_CHECK_VALUE(request.options.grace_period.count() >= 0, "spawn(): a grace period of ",
                    to_seconds(request.options.grace_period), " seconds can't be negative");
  Role* role = role_of_this_process();
  TORCH_CHECK(role == nullptr || !role->running,
              "spawn() was called inside a function that spawn() itself started (rank ",
              role == nullptr ? 0 : role->rank, "); start all processes with one call");
  const std::string call =
      request.options.label.empty() ? "#" + std::to_string(calls++) : request.options.label;
  if (role != nullptr) {
    if (role->call != call) return std::nullopt;
    run_in_child(*role, request.nprocs, function);
  }
  return run_children(request, call);
}

std::string describe_failure(int rank, const SpawnOutcome& outcome) {
  const std::string process = "process " + std::to_string(rank);
  if (outcome.exception) {
    return "\n\n-- Process " + std::to_string(rank) + " terminated with the following error:\n" +
           *outcome.exception + "\n";
  }
  std::string text = process;
  if (WIFSIGNALED(outcome.wait_status)) {
    const char* name = ::sigabbrev_np(WTERMSIG(outcome.wait_status));
    text += " terminated with signal " +
            (name == nullptr ? "<Unknown signal " + std::to_string(WTERMSIG(outcome.wait_status)) + ">"
                             : "SIG" + std::string(name));
  } else {
    text += " terminated with exit code " + std::to_string(WEXITSTATUS(outcome.wait_status));
  }
  if (!outcome.reached) {
    text += " before it came to the spawn() call; the code before the call must lead every child to it";
  }
  return text;
}

}  // namespace lockstep::launch
