#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <gmock/gmock.h>
#include <map>
#include <set>
#include <signal.h>
#include <sstream>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/spawn.h>
#include <lockstep/launch/spawn_processes.h>
#include <lockstep/rendezvous/exit_status_table.h>

namespace lockstep::spawn_test {
namespace {

using ::testing::HasSubstr;

/// spawn_probe in a process of its own, its output in a pipe.
class Probe {
 public:
  explicit Probe(const std::string& name) {
    const std::string folder =
        environment::text("LOCKSTEP_BIN_DIR")
            .value_or(std::filesystem::read_symlink("/proc/self/exe").parent_path().string());
    const std::string path = folder + "/spawn_probe";
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(ends[1], 1);
      ::setenv("PROBE", "from the test", 1);
      ::execl(path.c_str(), path.c_str(), name.c_str(), nullptr);
      ::_exit(126);
    }
    ::close(ends[1]);
    out_.reset(ends[0]);
  }
  ~Probe() {
    if (pid_ > 0) finish();
  }
  pid_t pid() const { return pid_; }
  std::string line() {
    std::string text;
    char byte = 0;
    while (::read(out_.get(), &byte, 1) == 1 && byte != '\n') text += byte;
    return text;
  }
  /// Exit status or minus the signal; `lines` and `text` hold the rest of the output.
  int finish() {
    char buffer[4096];
    ssize_t got = 0;
    while ((got = ::read(out_.get(), buffer, sizeof(buffer))) > 0)
      text.append(buffer, static_cast<size_t>(got));
    std::istringstream stream(text);
    for (std::string each; std::getline(stream, each);) lines.insert(each);
    int status = -1;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

  std::string text;
  std::multiset<std::string> lines;

 private:
  pid_t pid_ = -1;
  UniqueFd out_;
};

using Lines = std::multiset<std::string>;

TEST(Spawn, CallsTheFunctionWithRankAndArguments) {
  Probe probe("arguments");
  EXPECT_EQ(probe.finish(), 0);
  EXPECT_EQ(probe.lines, (Lines{"hello 0 42", "hello 1 42", "behind"}))
      << "only the parent goes on behind the call";
}

TEST(Spawn, GivesTheEnvironmentForInitProcessGroup) {
  Probe probe("environment");
  EXPECT_EQ(probe.finish(), 0);
  EXPECT_EQ(probe.lines, (Lines{"0 0 0 2 2 127.0.0.1 True from the test port exit_status",
                                "1 1 1 2 2 127.0.0.1 True from the test port exit_status"}));
}

TEST(Spawn, SeveralCallsAreToldApart) {
  Probe probe("calls");
  EXPECT_EQ(probe.finish(), 0);
  EXPECT_EQ(probe.lines, (Lines{"a0", "b0", "b1", "c0", "c1", "c2", "behind"}));
}

TEST(Spawn, ChildrenFlushAndDestroyStatics) {
  Probe probe("statics");
  EXPECT_EQ(probe.finish(), 0);
  EXPECT_EQ(probe.lines, (Lines{"buffered", "static destroyed", "static destroyed"}));
}

TEST(Spawn, RethrowsTheMessageOfTheFirstFailure) {
  Probe probe("throw");
  EXPECT_EQ(probe.finish(), 3);
  EXPECT_EQ(probe.text,
            "raised 1: \n\n-- Process 1 terminated with the following error:\nstd::invalid_argument: boom in "
            "rank 1\n\n");
  Probe other("throw-int");
  EXPECT_EQ(other.finish(), 3);
  EXPECT_THAT(other.text, HasSubstr("no std::exception"));
}

TEST(Spawn, TellsExitCodesAndSignals) {
  Probe exits("exit");
  EXPECT_EQ(exits.finish(), 3);
  EXPECT_EQ(exits.text, "exited 1 code 7 no signal: process 1 terminated with exit code 7\n");
  Probe killed("kill");
  EXPECT_EQ(killed.finish(), 3);
  EXPECT_EQ(killed.text, "exited 1 code -9 SIGKILL: process 1 terminated with signal SIGKILL\n");
}

TEST(Spawn, MisuseIsAClearError) {
  const std::map<std::string, std::string> cases = {
      {"nested", "inside a function that spawn() itself started"},
      {"disagree", "3 processes in this child but for 2 in its parent"},
      {"unreached", "before it came to the spawn() call"},
      {"none", "at least 1"},
  };
  for (const auto& [name, words] : cases) {
    Probe probe(name);
    EXPECT_EQ(probe.finish(), 3) << name;
    EXPECT_THAT(probe.text, HasSubstr(words)) << name;
  }
}

TEST(Spawn, AProgramStartedByTheFunctionIsNoChildOfSpawn) {
  Probe probe("descendants");
  EXPECT_EQ(probe.finish(), 0);
  EXPECT_EQ(probe.lines, (Lines{"hello 0 42", "hello 1 42", "behind"}));
}

TEST(Spawn, AnInterruptEndsTheChildrenAndThenTheParent) {
  Probe probe("wait");
  for (int i = 0; i < 4; ++i) EXPECT_NE(probe.line(), "");
  ::kill(probe.pid(), SIGINT);
  // The end of the output: none of the four holds the pipe any more, those that ignore SIGINT included.
  EXPECT_EQ(probe.finish(), -SIGINT);
}

TEST(Spawn, NothingOutlivesAParentThatIsKilled) {
  ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
  std::set<pid_t> members;
  {
    Probe probe("wait");
    for (int i = 0; i < 4; ++i) members.insert(std::stoi(probe.line()));
    ::kill(probe.pid(), SIGKILL);
    EXPECT_EQ(probe.finish(), -SIGKILL);
  }
  std::set<pid_t> killed;
  int status = 0;
  for (pid_t pid = 0; (pid = ::wait(&status)) > 0;) {
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) killed.insert(pid);
  }
  ::prctl(PR_SET_CHILD_SUBREAPER, 0);
  EXPECT_EQ(killed, members);
}

// In this program spawn() needs a way to the same call: this test alone, and a label.
TEST(Spawn, OptionsLeadTheChildrenToALabelledCall) {
  SpawnOptions options;
  options.argv = {"launch_tests", "--gtest_filter=Spawn.OptionsLeadTheChildrenToALabelledCall",
                  "--gtest_brief=1"};
  options.environment = {{"LOCKSTEP_PROBE_SET", "yes"}, {"HOME", std::nullopt}};
  options.label = "earlier";
  spawn(
      options, [](int) {}, 1);
  options.label = "this one";
  EXPECT_NO_THROW(spawn(
      options,
      [](int rank, const std::string& word) {
        TORCH_CHECK(rank < 2 && word == "word");
        TORCH_CHECK(environment::text("LOCKSTEP_PROBE_SET") == "yes" && std::getenv("HOME") == nullptr);
      },
      2, std::string("word")));
  try {
    options.label = "failing";
    spawn(
        options, [](int) { TORCH_CHECK_VALUE(false, "no good"); }, 1);
    FAIL() << "the child's exception is lost";
  } catch (const ProcessRaisedException& error) {
    EXPECT_EQ(error.error_index(), 0);
    EXPECT_GT(error.error_pid(), 0);
    EXPECT_THAT(error.what(), HasSubstr("c10::ValueError: no good\n")) << "without a C++ stack";
  }
}

TEST(Spawn, APeersEndStandsOnTheExitBoard) {
  launch::SpawnRequest request;
  request.options.argv = {"launch_tests", "--gtest_filter=Spawn.APeersEndStandsOnTheExitBoard",
                          "--gtest_brief=1"};
  request.options.label = "table";
  request.nprocs = 2;
  request.may_fail = {true, true};
  request.deadline = Deadline::after(std::chrono::seconds(60));
  // Rank 1's pid reaches rank 0 through a fifo named by their parent's; descriptors of the test are closed in
  // children.
  const auto result = launch::spawn_processes(request, [](int rank) {
    const std::string path = "/tmp/lockstep_board_" + std::to_string(::getppid());
    TORCH_CHECK(::mkfifo(path.c_str(), 0600) == 0 || errno == EEXIST);
    if (rank == 1) {
      UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
      const pid_t pid = ::getpid();
      TORCH_CHECK(::write(fd.get(), &pid, sizeof(pid)) == sizeof(pid));
      ::raise(SIGKILL);
    }
    UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    pid_t pid = 0;
    TORCH_CHECK(::read(fd.get(), &pid, sizeof(pid)) == sizeof(pid));
    ::unlink(path.c_str());
    auto table = ExitStatusTable::from_environment();
    TORCH_CHECK(table, "no table");
    const auto words = table->describe_end(pid, Deadline::never());
    TORCH_CHECK(words == "killed by signal 9 (SIGKILL)", words.value_or("nothing"));
  });
  ASSERT_TRUE(result);
  EXPECT_FALSE(result->outcomes[0].failed()) << result->outcomes[0].exception.value_or("");
  EXPECT_EQ(result->failed, std::vector<int>{1});
  EXPECT_EQ(result->outcomes[1].wait_status, SIGKILL);
}

}  // namespace
}  // namespace lockstep::spawn_test
