#include <arpa/inet.h>
#include <chrono>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <gmock/gmock.h>
#include <map>
#include <netinet/in.h>
#include <set>
#include <signal.h>
#include <sstream>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/agent/agent.h>
#include <lockstep/launch/agent/failure_report.h>
#include <lockstep/launch/testing/child_program.h>
#include <lockstep/launch/worker_environment.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::launch::agent_test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::program_path;

struct Launcher : testing::ChildProgram {
  explicit Launcher(std::vector<std::string> arguments,
                    const std::map<std::string, std::string>& environment = {})
      : ChildProgram(command(std::move(arguments)), environment) {}
  void kill(int signal) const { ::kill(pid(), signal); }

 private:
  static std::vector<std::string> command(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), program_path("lockstep"));
    return arguments;
  }
};

/// Runs `lockstep run /bin/sh -c SCRIPT` to its end.
struct Finished {
  int status;
  std::string out;
  std::string err;
};
Finished run_shell(int nprocs, const std::string& script, std::vector<std::string> flags = {}) {
  std::vector<std::string> arguments = {"run", "--nproc-per-node", std::to_string(nprocs)};
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  arguments.insert(arguments.end(), {"/bin/sh", "-c", script});
  Launcher launcher(arguments, {{"OMP_NUM_THREADS", "1"}});
  const int status = launcher.finish();
  return {status, launcher.out, launcher.err};
}

std::multiset<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::multiset<std::string> result;
  for (std::string line; std::getline(stream, line);) result.insert(line);
  return result;
}

TEST(FailureReport, NamesTheFirstThenTheOthers) {
  const auto start = Deadline::Clock::now();
  const std::vector<Ending> endings = {{2, 102, 0, false, start},
                                       {1, 101, SIGKILL, false, start},
                                       {0, 100, 1 << 8, false, start + std::chrono::milliseconds(7)},
                                       {4, 104, SIGTERM, true, start + std::chrono::milliseconds(9)},
                                       {3, 103, 0, true, start + std::chrono::milliseconds(9)}};
  const std::vector<RankEvidence> evidence = {
      {"RuntimeError: peer died\nmore", {}}, {std::nullopt, {"one", "two"}}, {}, {}, {}};
  EXPECT_EQ(failure_report(endings, evidence),
            "lockstep run: rank 1 (pid 101) failed first: killed by signal 9 (SIGKILL)\n"
            "  its last lines on standard error:\n    one\n    two\n"
            "lockstep run: then rank 0 (pid 100) exited with status 1, 7 ms later: RuntimeError: peer died\n"
            "lockstep run: ranks 3 and 4 were then ended\n"
            "lockstep run: docs/troubleshooting.md#what-lockstep-run-reports says what to do\n");
  EXPECT_EQ(failure_report({{0, 100, 0, false, start}}, evidence), "");
  const std::string over_hosts = failure_report(endings, evidence, 4, "host-b");
  EXPECT_THAT(over_hosts, HasSubstr("lockstep run: rank 5 (pid 101 on host-b) failed first: killed"));
  EXPECT_THAT(over_hosts, HasSubstr("lockstep run: then rank 4 (pid 100 on host-b) exited"));
}

TEST(FailureReport, NamesTheCauseThoughItsProcessEndsLater) {
  const auto start = Deadline::Clock::now();
  const std::vector<Ending> endings = {
      {0, 100, 1 << 8, false, start, 2},
      {1, 101, 1 << 8, false, start + std::chrono::milliseconds(2), 0},
      {2, 102, 3 << 8, false, start + std::chrono::milliseconds(5), std::nullopt}};
  const std::vector<RankEvidence> evidence = {
      {"ValueError: x\nat line 3", {"Traceback", "ValueError: x"}}, {}, {std::nullopt, {"no such data"}}};
  EXPECT_EQ(failure_report(endings, evidence),
            "lockstep run: rank 2 (pid 102) failed first: exited with status 3\n"
            "  its last lines on standard error:\n    no such data\n"
            "lockstep run: then rank 0 (pid 100) exited with status 1\n"
            "  its error:\n    ValueError: x\n    at line 3\n"
            "  its last lines on standard error:\n    Traceback\n    ValueError: x\n"
            "lockstep run: then rank 1 (pid 101) exited with status 1\n"
            "lockstep run: docs/troubleshooting.md#what-lockstep-run-reports says what to do\n");
  auto changed = endings;
  changed[2] = {2, 102, SIGTERM, true, start + std::chrono::seconds(1), std::nullopt};
  EXPECT_THAT(failure_report(changed, evidence),
              AllOf(HasSubstr("rank 2 (pid 102) is the cause, as the other ranks' errors say"),
                    HasSubstr("    no such data\n"), Not(HasSubstr("then ended"))));
  changed[2] = {2, 102, 0, false, start, std::nullopt};
  EXPECT_THAT(failure_report(changed, evidence),
              AllOf(HasSubstr("rank 2 (pid 102) ended before the others: exited with status 0, and they"),
                    HasSubstr("unequal numbers of batches: see join()")));
}

TEST(FailureReport, BlamesTheRankOfAnotherHostThatTheErrorNames) {
  const auto start = Deadline::Clock::now();
  std::vector<Ending> endings = {{0, 100, 1 << 8, false, start, 1},
                                 {1, 101, 1 << 8, false, start, std::nullopt, 5}};
  EXPECT_THAT(failure_report(endings, {{}, {}}, 2, "host-b"),
              AllOf(HasSubstr("rank 3 (pid 101 on host-b) failed because of rank 5 on another host, as its "
                              "error says: exited with status 1\n"),
                    HasSubstr("then rank 2 (pid 100 on host-b) exited"), Not(HasSubstr("failed first"))));
  endings[1].wait_status = SIGKILL;
  EXPECT_THAT(failure_report(endings, {{}, {}}, 2, "host-b"), HasSubstr("failed first: killed"));
}

TEST(CauseOfFailure, FollowsTheCulpritsToTheirEnd) {
  const auto now = Deadline::Clock::now();
  std::vector<Ending> endings = {{0, 1, 1 << 8, false, now, 1},
                                 {1, 2, SIGABRT, false, now, 2},
                                 {2, 3, 1 << 8, true, now, 3},
                                 {3, 4, 0, false, now, std::nullopt}};
  EXPECT_EQ(cause_of_failure(endings, 0), 3);
  endings[1].wait_status = SIGKILL;
  EXPECT_EQ(cause_of_failure(endings, 0), 1) << "what killed it is no rank";
  endings[1].wait_status = 1 << 8;
  endings[3].culprit = 1;
  EXPECT_EQ(cause_of_failure(endings, 0), 0) << "1, 2 and 3 blame each other";
  EXPECT_EQ(cause_of_failure({endings[0]}, 0), 0) << "1 has not ended";
}

TEST(CauseOfFailure, MayBeOnAnotherHost) {
  const auto now = Deadline::Clock::now();
  std::vector<Ending> endings = {{0, 1, 0, false, now, std::nullopt, 7},
                                 {1, 2, 1 << 8, false, now, 2},
                                 {2, 3, 1 << 8, false, now, std::nullopt, 5}};
  EXPECT_EQ(far_cause_of_failure(endings), 5) << "1 has failed because of 2";
  endings[2].wait_status = SIGKILL;
  EXPECT_EQ(far_cause_of_failure(endings), std::nullopt) << "what killed it is no rank";
  EXPECT_EQ(far_cause_of_failure({endings[0]}), std::nullopt) << "an error that the program caught";
}

TEST(FailureReport, ReadsTorchsErrorFiles) {
  EXPECT_EQ(
      error_file_message(R"({"message": {"message": "ValueError: x", "extraInfo": {"timestamp": "1"}}})"),
      "ValueError: x");
  EXPECT_EQ(error_file_message(R"({"message": "text"})"), "text");
  for (const char* bad :
       {"", "{", "[]", "{}", R"({"message": 3})", R"({"message": {"message": 3}})", "\xff"}) {
    EXPECT_EQ(error_file_message(bad), std::nullopt) << bad;
  }
}

TEST(FailureReport, TellsWantOfMemoryFromOtherKills) {
  const auto start = Deadline::Clock::now();
  Ending killed = {1, 101, SIGKILL, false, start};
  const Ending aborted = {0, 100, 1 << 8, false, start + std::chrono::milliseconds(7)};
  EXPECT_THAT(failure_report({killed, aborted}, {{}, {}}), Not(HasSubstr("memory")));
  killed.out_of_memory = "the kernel's log: Out of memory: Killed process 101 (train)";
  EXPECT_EQ(failure_report({killed, aborted}, {{}, {}}),
            "lockstep run: rank 1 (pid 101) failed first: killed by signal 9 (SIGKILL), by the kernel, for "
            "want of memory\n"
            "  the kernel's log: Out of memory: Killed process 101 (train)\n"
            "  what helps: smaller batches, fewer ranks on this host, or a higher limit on the job's memory\n"
            "  it wrote nothing to standard error\n"
            "lockstep run: then rank 0 (pid 100) exited with status 1, 7 ms later\n"
            "lockstep run: docs/troubleshooting.md#what-lockstep-run-reports says what to do\n");
}

TEST(OrderSimultaneous, ASignalIsTheCauseAndAnAbortAReaction) {
  const auto now = Deadline::Clock::now();
  std::vector<Ending> endings = {{0, 1, 0, false, now},
                                 {1, 2, SIGABRT, false, now},
                                 {2, 3, 1 << 8, false, now},
                                 {3, 4, SIGSEGV, false, now}};
  order_simultaneous(endings);
  std::vector<int> order;
  for (const Ending& ending : endings) order.push_back(ending.local_rank);
  EXPECT_EQ(order, (std::vector<int>{3, 1, 2, 0}));
}

TEST(ParseNprocs, TakesNumbersAndWords) {
  EXPECT_EQ(parse_nprocs("1"), 1);
  EXPECT_EQ(parse_nprocs("12"), 12);
  EXPECT_GE(parse_nprocs("auto"), 1);
  EXPECT_GE(parse_nprocs("cpu"), 1);
  for (const char* bad : {"0", "-1", "", "x", "2x", "1.5", "99999999999", "65537"}) {
    EXPECT_THROW(parse_nprocs(bad), c10::ValueError) << bad;
  }
  ::setenv("CUDA_VISIBLE_DEVICES", "", 1);
  EXPECT_THROW(parse_nprocs("gpu"), c10::ValueError);
  EXPECT_EQ(parse_nprocs("auto"), parse_nprocs("cpu"));
  ::unsetenv("CUDA_VISIBLE_DEVICES");
}

TEST(FindProgram, SaysWhyItCannotBeStarted) {
  EXPECT_EQ(find_program("/bin/sh"), "/bin/sh");
  EXPECT_THAT(find_program("sh"), HasSubstr("/sh"));
  auto complaint = [](const std::string& name) {
    try {
      return find_program(name);
    } catch (const c10::ValueError& error) {
      return std::string(error.what_without_backtrace());
    }
  };
  EXPECT_THAT(complaint("/nowhere/train"), HasSubstr("No such file"));
  EXPECT_THAT(complaint("/tmp"), HasSubstr("a directory"));
  const testing::TemporaryFolder folder;
  const std::string text = folder.write("text", "text\n");
  EXPECT_THAT(complaint(text), HasSubstr("not executable"));
  EXPECT_THAT(complaint("no-such-program-anywhere"), HasSubstr("PATH"));
  EXPECT_THAT(complaint(""), HasSubstr("no program"));
}

TEST(Run, GivesTorchrunsEnvironment) {
  const auto result = run_shell(
      2,
      "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE $ROLE_RANK "
      "$ROLE_WORLD_SIZE "
      "$ROLE_NAME $MASTER_ADDR $TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS "
      "$TORCHELASTIC_USE_AGENT_STORE "
      "$LOCKSTEP_RUN; test $LOCKSTEP_AGENT_STORE = $MASTER_ADDR:$MASTER_PORT/$TORCHELASTIC_RUN_ID && "
      "test $MASTER_PORT -gt 0 && test -n \"$TORCHELASTIC_RUN_ID$TORCHELASTIC_ERROR_FILE\" && "
      "test -e /proc/self/fd/${LOCKSTEP_EXIT_STATUS_FD%:*}");
  EXPECT_EQ(result.status, 0) << result.err;
  EXPECT_EQ(lines_of(result.out),
            (std::multiset<std::string>{"[rank 0] 0 0 2 2 0 1 0 2 default 127.0.0.1 0 0 True 1",
                                        "[rank 1] 1 1 2 2 0 1 1 2 default 127.0.0.1 0 0 True 1"}));
  EXPECT_EQ(result.err, "");
}

TEST(Run, SetsOmpNumThreadsOnceAndOnlyWhenUnset) {
  ::unsetenv("OMP_NUM_THREADS");
  Launcher launcher({"run", "--nproc_per_node=2", "--no-prefix", "sh", "-c", "echo $OMP_NUM_THREADS"});
  EXPECT_EQ(launcher.finish(), 0);
  EXPECT_EQ(launcher.out, "1\n1\n");
  EXPECT_THAT(launcher.err, AllOf(HasSubstr("OMP_NUM_THREADS"), HasSubstr("2 processes")));
  Launcher chosen({"run", "--nproc-per-node", "2", "--no_prefix", "sh", "-c", "echo $OMP_NUM_THREADS"},
                  {{"OMP_NUM_THREADS", "3"}});
  EXPECT_EQ(chosen.finish(), 0);
  EXPECT_EQ(chosen.out + chosen.err, "3\n3\n");
}

TEST(Run, MarksLinesAndKeepsStreamsApart) {
  const auto result = run_shell(2, "echo out; printf 'no newline' >&2");
  EXPECT_EQ(lines_of(result.out), (std::multiset<std::string>{"[rank 0] out", "[rank 1] out"}));
  EXPECT_EQ(lines_of(result.err), (std::multiset<std::string>{"[rank 0] no newline", "[rank 1] no newline"}));
  EXPECT_EQ(run_shell(1, "printf 'a\\rb'; printf c").out, "a\rbc")
      << "a single process's bytes pass as they are";
}

TEST(Run, LinesOfManyWritersStayWhole) {
  const auto result = run_shell(
      4, "i=0; while [ $i -lt 500 ]; do printf $RANK$RANK$RANK; echo $RANK$RANK$RANK; i=$((i+1)); done");
  EXPECT_EQ(result.status, 0);
  std::multiset<std::string> expected;
  for (int i = 0; i < 2000; ++i) {
    const std::string digit = std::to_string(i % 4);
    std::string line = "[rank " + digit + "] ";
    for (int k = 0; k < 6; ++k) line += digit;
    expected.insert(line);
  }
  EXPECT_EQ(lines_of(result.out), expected);
}

TEST(Run, ArgumentsAfterTheProgramAreItsOwn) {
  Launcher launcher({"run", "printf", "%s|", "--nproc-per-node", "-x", "--", "run", "--help"});
  EXPECT_EQ(launcher.finish(), 0);
  EXPECT_EQ(launcher.out, "--nproc-per-node|-x|--|run|--help|");
}

TEST(Run, StandardInputGoesToRankZeroOnly) {
  const testing::TemporaryFolder folder;
  const std::string input = folder.write("input", "typed\n");
  const int saved = ::dup(0);
  UniqueFd file(::open(input.c_str(), O_RDONLY));
  ::dup2(file.get(), 0);
  const auto result = run_shell(2, "cat; echo end");
  ::dup2(saved, 0);
  ::close(saved);
  EXPECT_EQ(lines_of(result.out),
            (std::multiset<std::string>{"[rank 0] typed", "[rank 0] end", "[rank 1] end"}));
}

TEST(Run, AFailureIsReportedWithItsLastLinesAndEndsTheRest) {
  const auto result = run_shell(
      3, "if [ $RANK = 1 ]; then for i in $(seq 25); do echo line $i >&2; done; exit 3; fi; exec sleep 1000");
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, ContainsRegex("rank 1 \\(pid [0-9]+\\) failed first: exited with status 3"));
  EXPECT_THAT(result.err, AllOf(HasSubstr("\n    line 6\n"), HasSubstr("\n    line 25\n"),
                                Not(HasSubstr("    line 5\n")), HasSubstr("ranks 0 and 2 were then ended")));
}

TEST(Run, ASignalIsNamedAndTheErrorFileRead) {
  const auto result =
      run_shell(2,
                "[ $RANK = 0 ] && exec sleep 1000; "
                "echo '{\"message\": {\"message\": \"ValueError: bad\"}}' > $TORCHELASTIC_ERROR_FILE; "
                "kill -KILL $$");
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("failed first: killed by signal 9 (SIGKILL)"), HasSubstr("ValueError: bad")));
}

TEST(Run, WhoIgnoresSigtermIsKilledWhenTheGracePeriodIsOver) {
  const auto result =
      run_shell(2, "trap '' TERM; if [ $RANK = 0 ]; then exit 4; fi; while :; do sleep 1000; done",
                {"--grace-period", "0.2"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, AllOf(HasSubstr("exited with status 4"), HasSubstr("rank 1 was then ended")));
}

TEST(Run, AStoppedWorkerIsEndedToo) {
  const auto result =
      run_shell(2, "if [ $RANK = 1 ]; then kill -STOP $$; fi; exit 5", {"--grace-period", "20"});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err, HasSubstr("rank 0"));
}

TEST(Run, BadCommandLinesAreRefusedBeforeAnythingStarts) {
  const testing::TemporaryFolder folder;
  const std::string text = folder.write("text", "text\n");
  const std::map<std::vector<std::string>, std::string> cases = {
      {{"run", "--nproc-per-node", "0", "sh"}, "from 1 to"},
      {{"run", "--nproc-per-node", "two", "sh"}, "'two'"},
      {{"run", "--nproc-per-node", "2"}, "PROGRAM"},
      {{"run"}, "PROGRAM"},
      {{"run", "--nprocs", "2", "sh"}, "--nprocs"},
      {{"run", "--master-port", "70000", "sh"}, "70000"},
      {{"run", "--grace-period", "-1", "sh"}, "grace"},
      {{"run", "/nowhere/program"}, "No such file"},
      {{"run", text}, "not executable"},
      {{"walk", "sh"}, "there is no command 'walk'"},
  };
  for (const auto& [arguments, words] : cases) {
    Launcher launcher(arguments);
    EXPECT_EQ(launcher.finish(), 2) << words;
    EXPECT_THAT(launcher.err, HasSubstr(words));
    EXPECT_EQ(launcher.out, "");
  }
}

TEST(Run, HelpAndVersion) {
  Launcher version({"--version"});
  EXPECT_EQ(version.finish(), 0);
  EXPECT_THAT(version.out, ContainsRegex("^lockstep [0-9]+\\.[0-9]+\\.[0-9]+\n$"));
  Launcher help({"run", "--help"});
  EXPECT_EQ(help.finish(), 0);
  EXPECT_THAT(help.out, AllOf(HasSubstr("--nproc-per-node"), HasSubstr("Examples:")));
}

TEST(Run, APortInUseIsSaid) {
  UniqueFd taken(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::bind(taken.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(::listen(taken.get(), 1), 0);
  socklen_t length = sizeof(address);
  ::getsockname(taken.get(), reinterpret_cast<sockaddr*>(&address), &length);
  const std::string port = std::to_string(ntohs(address.sin_port));
  const auto result = run_shell(1, "echo started", {"--master-port", port});
  EXPECT_EQ(result.status, 1);
  EXPECT_THAT(result.err,
              AllOf(HasSubstr("127.0.0.1:" + port), HasSubstr("in use"), HasSubstr("--master-port")));
  EXPECT_EQ(result.out, "");
}

TEST(Run, SignalsArePassedOnAndTheStatusSaysWhich) {
  for (int signal : {SIGINT, SIGTERM}) {
    Launcher launcher({"run", "--nproc-per-node", "2", "--no-prefix", "sh", "-c",
                       "trap 'echo caught; exit 0' INT TERM; echo ready; while :; do sleep 1000 > /dev/null "
                       "2>&1 & wait; done"});
    EXPECT_EQ(launcher.line() + launcher.line(), "readyready");
    launcher.kill(signal);
    EXPECT_EQ(launcher.finish(), 128 + signal);
    EXPECT_EQ(launcher.out, "caught\ncaught\n");
  }
}

TEST(Run, ASecondSignalKills) {
  Launcher launcher(
      {"run", "--no-prefix", "sh", "-c",
       "trap 'echo caught' INT; echo ready; while :; do sleep 1000 > /dev/null 2>&1 & wait $!; done"});
  EXPECT_EQ(launcher.line(), "ready");
  launcher.kill(SIGINT);
  EXPECT_EQ(launcher.line(), "caught");
  launcher.kill(SIGTERM);  // another SIGINT might come so soon that it counts for the same
  EXPECT_EQ(launcher.finish(), 128 + SIGINT);
}

TEST(Run, IgnoredSignalsStayIgnored) {
  // As under nohup. The launcher inherits the disposition.
  ::signal(SIGHUP, SIG_IGN);
  Launcher launcher({"run", "--no-prefix", "sh", "-c", "echo ready; kill -HUP $PPID; echo done"});
  EXPECT_EQ(launcher.finish(), 0);
  ::signal(SIGHUP, SIG_DFL);
  EXPECT_EQ(launcher.out, "ready\ndone\n");
}

// The workers tell their pids; as a subreaper the test adopts what the launcher leaves, and can wait for
// each.
TEST(Run, NothingOutlivesALauncherThatIsKilled) {
  ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
  std::vector<pid_t> members;
  {
    // Each worker has a child of its own in its process group, which ignores what can be ignored.
    Launcher launcher({"run", "--nproc-per-node", "2", "--no-prefix", "sh", "-c",
                       "trap '' INT TERM HUP; sh -c 'echo $$; exec sleep 1000' & echo $$; wait"});
    for (int i = 0; i < 4; ++i) members.push_back(std::stoi(launcher.line()));
    launcher.kill(SIGKILL);
    EXPECT_EQ(launcher.finish(), -SIGKILL)
        << "finish() reads to the end: no process holds the pipes open any more";
  }
  // Now they are children of the test: each ends, and so does the guardian, the last child.
  std::map<pid_t, int> ended;
  int status = 0;
  pid_t pid = 0;
  while ((pid = ::wait(&status)) > 0) ended[pid] = status;
  ::prctl(PR_SET_CHILD_SUBREAPER, 0);
  for (pid_t member : members) {
    ASSERT_TRUE(ended.count(member)) << member;
    EXPECT_EQ(ended[member], SIGKILL);
  }
}

TEST(Run, NothingOutlivesANormalEnd) {
  ASSERT_EQ(::prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
  const auto result = run_shell(1, "sleep 1000 > /dev/null 2>&1 & echo $!");
  EXPECT_EQ(result.status, 0);
  int status = 0;
  EXPECT_EQ(::waitpid(std::stoi(result.out), &status, 0), std::stoi(result.out));
  EXPECT_EQ(status, SIGKILL);
  ::prctl(PR_SET_CHILD_SUBREAPER, 0);
}

TEST(Run, OutputGoesOnWhenItsReaderIsGone) {
  const testing::TemporaryFolder folder;
  const std::string marker = folder.path("marker");
  Launcher launcher({"run", "/bin/sh", "-c",
                     program_path("lockstep") +
                         " run sh -c 'i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done; "
                         "echo finished > " +
                         marker + "' | head -1"});
  EXPECT_EQ(launcher.finish(), 0);
  EXPECT_EQ(launcher.out, "line 0\n");
  EXPECT_EQ(testing::content_of(marker), "finished\n");
}

}  // namespace
}  // namespace lockstep::launch::agent_test
