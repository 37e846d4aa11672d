#include <cstdlib>
#include <fcntl.h>
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
#include <lockstep/launch/testing/child_program.h>
#include <lockstep/rendezvous/exit_status_table.h>

namespace lockstep::spawn_test {
namespace {

using ::testing::HasSubstr;

using Lines = std::multiset<std::string>;

/// spawn_probe in a process of its own.
struct Probe : testing::ChildProgram {
  explicit Probe(const std::string& name)
      : ChildProgram({testing::program_path("spawn_probe"), name}, {{"PROBE", "from the test"}}) {}
  Lines lines() const {
    Lines lines;
    std::istringstream stream(out);
    for (std::string each; std::getline(stream, each);) lines.insert(each);
    return lines;
  }
};

TEST(Spawn, CallsTheFunctionWithRankAndArguments) {
  Probe probe("arguments");
  EXPECT_EQ(probe.finish(), 0);
  EXPECT_EQ(probe.lines(), (Lines{"hello 0 42", "hello 1 42", "after"}))
      << "only the parent goes on after the call";
}

TEST(Spawn, GivesTheEnvironmentForInitProcessGroup) {
  Probe probe("environment");
  EXPECT_EQ(probe.finish(), 0);
  EXPECT_EQ(probe.lines(), (Lines{"0 0 0 2 2 127.0.0.1 True from the test port exit_status",
                                  "1 1 1 2 2 127.0.0.1 True from the test port exit_status"}));
}

TEST(Spawn, SeveralCallsAreToldApart) {
  Probe probe("calls");
  EXPECT_EQ(probe.finish(), 0);
  EXPECT_EQ(probe.lines(), (Lines{"a0", "b0", "b1", "c0", "c1", "c2", "after"}));
}

TEST(Spawn, ChildrenFlushAndDestroyStatics) {
  Probe probe("statics");
  EXPECT_EQ(probe.finish(), 0);
  EXPECT_EQ(probe.lines(), (Lines{"buffered", "static destroyed", "static destroyed"}));
}

TEST(Spawn, RethrowsTheMessageOfTheFirstFailure) {
  Probe probe("throw");
  EXPECT_EQ(probe.finish(), 3);
  EXPECT_EQ(probe.out,
            "raised 1: \n\n-- Process 1 terminated with the following error:\nstd::invalid_argument: boom in "
            "rank 1\n\n");
  Probe other("throw-int");
  EXPECT_EQ(other.finish(), 3);
  EXPECT_THAT(other.out, HasSubstr("no std::exception"));
}

TEST(Spawn, TellsExitCodesAndSignals) {
  Probe exits("exit");
  EXPECT_EQ(exits.finish(), 3);
  EXPECT_EQ(exits.out, "exited 1 code 7 no signal: process 1 terminated with exit code 7\n");
  Probe killed("kill");
  EXPECT_EQ(killed.finish(), 3);
  EXPECT_EQ(killed.out, "exited 1 code -9 SIGKILL: process 1 terminated with signal SIGKILL\n");
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
    EXPECT_THAT(probe.out, HasSubstr(words)) << name;
  }
}

TEST(Spawn, CallsAtOnceGetTheStatusesOfChildrenThatTheProgramIgnores) {
  Probe probe("ignored");
  EXPECT_EQ(probe.finish(), 0);
  EXPECT_EQ(probe.lines(), (Lines{"ignored again"}));
}

TEST(Spawn, AProgramStartedByTheFunctionIsNoChildOfSpawn) {
  Probe probe("descendants");
  EXPECT_EQ(probe.finish(), 0);
  EXPECT_EQ(probe.lines(), (Lines{"hello 0 42", "hello 1 42", "after"}));
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
