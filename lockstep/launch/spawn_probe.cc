// A small program that calls spawn() as users do; spawn_test.cc runs it. The first argument says which case.
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <functional>
#include <future>
#include <signal.h>
#include <stdexcept>
#include <string>
#include <unistd.h>
#include <vector>

#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/spawn.h>

namespace {

// One write a line: several processes share the output.
void say(const std::string& line) {
  const std::string text = line + "\n";
  [[maybe_unused]] auto written = ::write(STDOUT_FILENO, text.data(), text.size());
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "-" : value;
}

void greet(int rank, const std::string& greeting, int number) {
  say(greeting + " " + std::to_string(rank) + " " + std::to_string(number));
}

struct SaysGoodbye {
  ~SaysGoodbye() { say("static destroyed"); }
};

void several_calls(const std::vector<std::string>& words) {
  int call = 0;
  for (const std::string& word : words) {
    lockstep::spawn([&](int rank) { say(word + std::to_string(rank)); }, ++call);
  }
  say("after");
}

void failing(const std::string& how) {
  lockstep::spawn(
      [&](int rank) {
        if (rank == 0) ::pause();  // ended by the parent
        if (how == "throw") throw std::invalid_argument("boom in rank " + std::to_string(rank));
        if (how == "throw-int") throw 3;
        if (how == "exit") ::_exit(7);
        ::raise(SIGKILL);
      },
      2);
}

/// A pipe whose ends children open by paths, for spawn() closes what it does not know.
struct Pipe {
  Pipe() {
    int ends[2] = {-1, -1};
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
    out.reset(ends[0]);
    in.reset(ends[1]);
  }
  static std::string path(const lockstep::UniqueFd& end) {
    return "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(end.get());
  }
  lockstep::UniqueFd out, in;
};

void tell(int fd) {
  if (::write(fd, "!", 1) != 1) throw std::runtime_error("nothing can be told");
}

void await(int fd) {
  char byte = 0;
  if (::read(fd, &byte, 1) != 1) throw std::runtime_error("nothing is told");
}

/// The call that began first ends while the other one's child still runs.
void calls_at_once_with_children_ignored() {
  ::signal(SIGCHLD, SIG_IGN);
  const bool is_child = variable("LOCKSTEP_SPAWN") != "-";
  std::future<void> first, second;  // their ends wait for the calls, which end with the pipes
  Pipe begun, go_first, go_second;
  const auto call = [&](const std::string& label, const Pipe& go) {
    lockstep::SpawnOptions options;
    options.label = label;
    options.environment = {{"PROBE_BEGUN", Pipe::path(begun.in)}, {"PROBE_GO", Pipe::path(go.out)}};
    const auto wait = [](int) {
      tell(lockstep::UniqueFd(::open(variable("PROBE_BEGUN").c_str(), O_WRONLY)).get());
      await(lockstep::UniqueFd(::open(variable("PROBE_GO").c_str(), O_RDONLY)).get());
    };
    lockstep::spawn(options, wait, 1);
  };
  first = std::async(std::launch::async, call, "first", std::cref(go_first));
  is_child ? first.wait() : await(begun.out.get());
  second = std::async(std::launch::async, call, "second", std::cref(go_second));
  if (!is_child) await(begun.out.get());
  tell(go_first.in.get());
  first.get();
  tell(go_second.in.get());
  second.get();
  say(::signal(SIGCHLD, SIG_DFL) == SIG_IGN ? "ignored again" : "not ignored any more");
}

int run(const std::string& name) {
  if (name == "arguments") {
    const std::string made_here = "hello";
    lockstep::spawn(greet, 2, made_here, 40 + 2);
    say("after");
  } else if (name == "environment") {
    lockstep::spawn(
        [](int rank) {
          std::string text = std::to_string(rank);
          for (const char* each : {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                                   "TORCHELASTIC_USE_AGENT_STORE", "PROBE"}) {
            text += " " + variable(each);
          }
          say(text + (std::stoi(variable("MASTER_PORT")) > 0 ? " port" : "") +
              (variable("LOCKSTEP_EXIT_STATUS_FD") != "-" ? " exit_status" : ""));
        },
        2);
  } else if (name == "calls") {
    several_calls({"a", "b", "c"});
  } else if (name == "statics") {
    static SaysGoodbye goodbye;
    lockstep::spawn([](int) { std::printf("buffered\n"); }, 1);
  } else if (name == "nested") {
    lockstep::spawn([](int) { lockstep::spawn([](int) {}, 1); }, 1);
  } else if (name == "disagree") {
    const bool child = variable("LOCKSTEP_SPAWN") != "-";
    lockstep::spawn([](int) { say("must not run"); }, child ? 3 : 2);
  } else if (name == "unreached") {
    if (variable("LOCKSTEP_SPAWN") != "-") return 0;
    lockstep::spawn([](int) {}, 2);
  } else if (name == "none") {
    lockstep::spawn([](int) {}, 0);
  } else if (name == "wait") {
    // Each rank has a child of its own; all tell their pids and wait. A failure of spawn() itself is told,
    // too.
    lockstep::spawn(
        [](int) {
          ::signal(SIGTERM, SIG_IGN);
          if (::fork() == 0) ::signal(SIGINT, SIG_IGN);
          say(std::to_string(::getpid()));
          while (true) ::pause();
        },
        2);
  } else if (name == "ignored") {
    calls_at_once_with_children_ignored();
  } else if (name == "descendants") {
    // A program that the function starts is no child of spawn(), though it inherits the environment.
    lockstep::spawn(
        [](int) {
          if (std::system("/proc/$PPID/exe arguments") != 0) throw std::runtime_error("failed");
        },
        1);
  } else {
    failing(name);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? argv[1] : "");
  } catch (const lockstep::ProcessRaisedException& error) {
    say("raised " + std::to_string(error.error_index()) + ": " + error.what());
  } catch (const lockstep::ProcessExitedException& error) {
    say("exited " + std::to_string(error.error_index()) + " code " + std::to_string(error.exit_code()) + " " +
        error.signal_name().value_or("no signal") + ": " + error.what());
  } catch (const std::exception& error) {
    say(std::string("error: ") + error.what());
  }
  return 3;
}
