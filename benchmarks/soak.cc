// Lets ranks fail in all ways, round after round, and writes down what the others were told, when, and
// whether a byte of their tensors changed afterwards; scripts/bench soak runs it and judges. By hand:
//
//     bench_soak [ROUNDS [SEED [STORE [KEEPER KEEPER]]]]        (10 rounds, from seed 1, on one host, unless told)
//
// Round i is drawn from SEED + i (soak_plan.h), and is played by processes of its own, which are forked from
// this one. Each prints one line of JSON.
//
// With STORE (tcp://ADDRESS:PORT) ranks are on two hosts, and rank 0 has the store there: pretended hosts, or the
// namespaces of the processes KEEPER (tests/hosts.py). To have the second one cut off and connected again this program
// prints {"wire": "cut"} and {"wire": "heal"}, and waits for a line.
#include <algorithm>
#include <arpa/inet.h>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <netinet/in.h>
#include <new>
#include <optional>
#include <sched.h>
#include <string>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "command_loop.h"
#include "soak_board.h"
#include "soak_plan.h"
#include "soak_rank.h"

namespace {

using lockstep::benchmarks::Board;
using lockstep::benchmarks::Calls;
using lockstep::benchmarks::Failure;
using lockstep::benchmarks::Report;
using lockstep::benchmarks::SoakPlan;
using lockstep::benchmarks::State;
using nlohmann::json;
using namespace std::chrono_literals;

/// What a rank has for what takes milliseconds, on a machine that is busy.
constexpr auto kStartPatience = 60s;
constexpr auto kPatience = 20s;
/// To make a group of those that are left, where some can't be reached.
constexpr auto kShrinkPatience = 90s;
/// Shorter than the silence after which a host counts as lost.
constexpr auto kBriefCut = 3s;
constexpr int64_t kCallsAfterCut = 5;
/// In which peers that are late may do what they must not.
constexpr auto kWhile = 20ms;

std::atomic<bool> interrupted{false};

void interrupt(int) {
  interrupted = true;
}

struct Interrupted {};

/// Looks again and again whether `done`; false when `patience` is over. Throws Interrupted.
template <class Done>
bool await(Done&& done, std::chrono::nanoseconds patience) {
  const auto until = std::chrono::steady_clock::now() + patience;
  while (!done()) {
    if (interrupted) throw Interrupted();
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(500us);
  }
  return true;
}

/// Where the ranks are.
struct Hosting {
  std::string store;           // empty: on one host
  std::vector<pid_t> keepers;  // none: hosts are pretended

  lockstep::benchmarks::Hosts hosts() const {
    if (store.empty()) return lockstep::benchmarks::Hosts::kOne;
    return keepers.empty() ? lockstep::benchmarks::Hosts::kPretended : lockstep::benchmarks::Hosts::kWired;
  }

  /// Puts this process, which has one thread, on that host.
  void enter(int host) const {
    if (keepers.empty()) {
      ::setenv("LOCKSTEP_TEST_HOST", host == 0 ? "host-a" : "host-b", 1);
      return;
    }
    std::vector<int> namespaces;
    for (const char* kind : {"net", "uts", "ipc", "mnt"}) {
      const std::string path = c10::str("/proc/", keepers[static_cast<size_t>(host)], "/ns/", kind);
      namespaces.push_back(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
      TORCH_CHECK(namespaces.back() >= 0, "can't open ", path);
    }
    for (const int each : namespaces) {
      TORCH_CHECK(::setns(each, 0) == 0, "can't enter a namespace of host ", host);
      ::close(each);
    }
  }
};

/// Has the wire cut or healed by who started this program.
void tell_wire(const char* what) {
  std::cout << json{{"wire", what}}.dump() << std::endl;
  std::string done;
  if (!std::getline(std::cin, done)) throw Interrupted();
}

/// Forks a process that ends with this one; 0 in it.
pid_t fork_child() {
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  TORCH_CHECK(pid >= 0, "fork failed");
  if (pid > 0) return pid;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(1);
  ::signal(SIGINT, SIG_DFL);
  ::signal(SIGTERM, SIG_DFL);
  ::signal(SIGPIPE, SIG_DFL);
  return 0;
}

/// A store in a process that nothing befalls, as a launcher's is.
class StoreProcess {
 public:
  explicit StoreProcess(Board& board) : pid_(fork_child()) {
    if (pid_ == 0) serve(board);
  }
  StoreProcess(const StoreProcess&) = delete;
  StoreProcess& operator=(const StoreProcess&) = delete;
  ~StoreProcess() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

 private:
  [[noreturn]] static void serve(Board& board) {
    try {
      c10d::TCPStoreOptions options;
      options.isServer = true;
      options.waitWorkers = false;
      options.masterListenFd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      socklen_t size = sizeof address;
      auto* const place = reinterpret_cast<sockaddr*>(&address);
      TORCH_CHECK(::bind(*options.masterListenFd, place, size) == 0 &&
                      ::listen(*options.masterListenFd, SOMAXCONN) == 0 &&
                      ::getsockname(*options.masterListenFd, place, &size) == 0,
                  "the store can't listen");
      options.port = ntohs(address.sin_port);
      const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
      board.store_port = options.port;
      while (true) ::pause();
    } catch (const std::exception& error) {
      std::cerr << error.what() << std::endl;
    }
    ::_exit(1);
  }

  pid_t pid_;
};

/// A rank's process. It is not reaped before the round is over: until then the others can ask the kernel how
/// it ended.
class Process {
 public:
  Process(const SoakPlan& plan, int rank, Board& board, const std::string& folder, const Hosting& hosting)
      : output_(folder + "/output-" + std::to_string(rank)) {
    pid_ = fork_child();
    if (pid_ > 0) return;
    const int output = ::open(output_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
    ::dup2(output, STDOUT_FILENO);
    ::dup2(output, STDERR_FILENO);
    int status = 0;
    try {
      if (!plan.host_of.empty()) hosting.enter(plan.host_of[static_cast<size_t>(rank)]);
      lockstep::benchmarks::SoakRank(plan, rank, board)
          .play(hosting.store.empty() ? folder + "/store-" + std::to_string(plan.seed) : hosting.store);
    } catch (const lockstep::benchmarks::OutOfIdeas&) {
    } catch (const std::exception& error) {
      std::cerr << error.what() << std::endl;
      status = 1;
    }
    std::exit(status);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  Process(Process&& other) noexcept : pid_(std::exchange(other.pid_, 0)), output_(std::move(other.output_)) {}
  Process& operator=(Process&&) = delete;
  ~Process() {
    if (pid_ == 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  pid_t pid() const { return pid_; }
  bool ended() const { return !end().empty(); }
  /// "exit 0", "signal 9"; empty while it runs.
  std::string end() const {
    siginfo_t info{};
    ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT);
    if (info.si_pid == 0) return "";
    return (info.si_code == CLD_EXITED ? "exit " : "signal ") + std::to_string(info.si_status);
  }
  /// The last of what it printed.
  std::string output() const {
    std::ifstream file(output_);
    const std::string text(std::istreambuf_iterator<char>(file), {});
    return text.substr(text.size() - std::min<size_t>(text.size(), 2000));
  }

 private:
  pid_t pid_ = 0;
  std::string output_;
};

class Round {
 public:
  Round(const SoakPlan& plan, Board& board, const std::string& folder, const Hosting& hosting)
      : plan_(plan), board_(board) {
    board.may_strike = !plan.cuts();
    if (plan.calls == Calls::kInit) {
      store_.emplace(board);
      TORCH_CHECK(await([&] { return board.store_port != 0; }, kStartPatience), "the store does not start");
    }
    for (int rank = 0; rank < plan.ranks; ++rank) processes_.emplace_back(plan, rank, board, folder, hosting);
  }

  json play() {
    const Process& victim = processes_[static_cast<size_t>(plan_.victim)];
    const auto all_ready = [&] {
      return std::all_of(board_.ready.begin(), board_.ready.begin() + plan_.ranks,
                         [](auto& one) { return one.load(); });
    };
    if (plan_.cuts()) {
      await([&] { return all_ready() || any_ended_early(); }, kStartPatience);
      cut();
      board_.may_strike = plan_.failure == Failure::kBriefCut;
    }
    await([&] { return (all_ready() && struck()) || any_ended_early() || has_reported(plan_.victim); },
          kStartPatience);
    await([&] { return survivors_have_reported(); }, kPatience);
    ::kill(victim.pid(), SIGCONT);
    await([&] { return victim.ended() || (!plan_.ends_victim() && has_reported(plan_.victim)); }, kPatience);
    std::this_thread::sleep_for(kWhile);
    board_.compare = true;
    await(
        [&] {
          return std::all_of(processes_.begin(), processes_.end(), [](auto& one) { return one.ended(); });
        },
        plan_.goes_on() ? kShrinkPatience : kPatience);
    if (plan_.failure == Failure::kCut) tell_wire("heal");
    return result();
  }

 private:
  /// Cuts the wire in the midst of the calls; a brief cut is over when this returns, and calls are made again.
  void cut() {
    const auto has_made = [&](int64_t steps) {
      return [this, steps] {
        return board_.made[0] >= steps || any_ended_early() || has_reported(plan_.victim);
      };
    };
    await(has_made(plan_.steps), kStartPatience);
    if (plan_.failure == Failure::kCut) board_.failed_at[0] = lockstep::benchmarks::wall_clock();
    tell_wire("cut");
    if (plan_.failure == Failure::kCut) return;
    await([] { return false; }, kBriefCut);
    tell_wire("heal");
    await(has_made(board_.made[0] + kCallsAfterCut), kPatience);
  }

  int lanes_of(int rank) const { return plan_.has_member(rank) ? plan_.lanes() : 1; }
  bool struck() const {
    return std::all_of(board_.failed_at.begin(), board_.failed_at.begin() + plan_.lanes(),
                       [](auto& at) { return at != 0; });
  }
  bool has_reported(int rank) const {
    for (int lane = 0; lane < lanes_of(rank); ++lane) {
      if (board_.reports[rank][lane].state == State::kRunning) return false;
    }
    return true;
  }
  bool survivors_have_reported() const {
    for (int rank = 0; rank < plan_.ranks; ++rank) {
      if (!plan_.expects_error(rank) && (rank == plan_.victim || !plan_.has_member(rank))) continue;
      if (!has_reported(rank) && !processes_[static_cast<size_t>(rank)].ended()) return false;
    }
    return true;
  }
  bool any_ended_early() const {
    for (int rank = 0; rank < plan_.ranks; ++rank) {
      if (rank != plan_.victim && processes_[static_cast<size_t>(rank)].ended()) return true;
    }
    return false;
  }

  json result() const {
    json ranks = json::array();
    for (int rank = 0; rank < plan_.ranks; ++rank) {
      const Process& process = processes_[static_cast<size_t>(rank)];
      const std::string end = process.end();
      const lockstep::benchmarks::Sequel& sequel = board_.sequels[static_cast<size_t>(rank)];
      json lanes = json::array();
      for (int lane = 0; lane < lanes_of(rank); ++lane) {
        const Report& report = board_.reports[rank][lane];
        const int64_t failed_at = board_.failed_at[lane];
        lanes.push_back(
            {{"state", lockstep::benchmarks::kStateNames[static_cast<size_t>(report.state.load())]},
             {"call", std::string(report.call)},
             {"error", std::string(report.error)},
             {"again", std::string(report.again)},
             {"after_ns", report.error_at != 0 && failed_at != 0 ? report.error_at - failed_at : 0},
             {"watched", report.watched},
             {"changed", report.changed}});
      }
      ranks.push_back({{"rank", rank},
                       {"pid", process.pid()},
                       {"member", plan_.has_member(rank)},
                       {"expects_error", plan_.expects_error(rank)},
                       {"sequel",
                        {{"done", sequel.done.load()},
                         {"size", sequel.size},
                         {"bits", sequel.bits},
                         {"error", std::string(sequel.error)}}},
                       {"end", end.empty() ? "running" : end},
                       {"output", end == "exit 0" ? "" : process.output()},
                       {"lanes", lanes}});
    }
    const auto name = [](const auto& names, auto value) { return names[static_cast<size_t>(value)]; };
    return {{"seed", plan_.seed},
            {"victim", plan_.victim},
            {"failure", name(lockstep::benchmarks::kFailureNames, plan_.failure)},
            {"calls", name(lockstep::benchmarks::kCallNames, plan_.calls)},
            {"memory", name(lockstep::benchmarks::kMemoryNames, plan_.memory)},
            {"size", name(lockstep::benchmarks::kSizeNames, plan_.size)},
            {"steps", plan_.steps},
            {"struck", struck()},
            {"host_of", plan_.host_of},
            {"failpoint", plan_.failpoint},
            {"goes_on", plan_.goes_on()},
            {"timeout_ns", std::chrono::nanoseconds(plan_.timeout()).count()},
            {"patience_ns", std::chrono::nanoseconds(kPatience).count()},
            {"ranks", ranks}};
  }

  const SoakPlan& plan_;
  Board& board_;
  std::optional<StoreProcess> store_;
  std::vector<Process> processes_;
};

/// Goes with what is in it.
class Folder {
 public:
  Folder() : path_((std::filesystem::temp_directory_path() / "lockstep-soak-XXXXXX").string()) {
    TORCH_CHECK(::mkdtemp(path_.data()) != nullptr, "cannot make a folder like ", path_);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

int soak(int64_t rounds, uint64_t seed, const Hosting& hosting) {
  void* shared = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(shared != MAP_FAILED, "mmap failed");
  const Folder folder;
  ::setenv("LOCKSTEP_FLIGHT_DIR", (folder.path() + "/flight").c_str(), 1);  // they would fill the user's
  for (int64_t i = 0; i < rounds; ++i) {
    const SoakPlan plan = lockstep::benchmarks::plan_of(seed + static_cast<uint64_t>(i), hosting.hosts());
    try {
      std::cout << Round(plan, *new (shared) Board, folder.path(), hosting)
                       .play()
                       .dump(-1, ' ', false, json::error_handler_t::replace)
                << std::endl;
    } catch (const Interrupted&) {
      return 130;
    }
    if (!std::cout) return 1;  // the driver is gone
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return lockstep::benchmarks::run([&] {
    const int64_t rounds = argc > 1 ? std::atoll(argv[1]) : 10;
    const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    Hosting hosting;
    if (argc > 3) hosting.store = argv[3];
    for (int i = 4; i < argc; ++i) hosting.keepers.push_back(std::atoi(argv[i]));
    TORCH_CHECK(rounds >= 1 && (argc <= 4 || argc == 6),
                "usage: bench_soak [ROUNDS [SEED [STORE [KEEPER KEEPER]]]]");
    ::signal(SIGINT, interrupt);
    ::signal(SIGTERM, interrupt);
    ::signal(SIGPIPE, SIG_IGN);
    return soak(rounds, seed, hosting);
  });
}
