#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <optional>
#include <poll.h>
#include <regex>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/cgroups.h>
#include <lockstep/launch/fork_server.h>
#include <lockstep/launch/guardian.h>
#include <lockstep/launch/program_libraries.h>
#include <lockstep/launch/testing/child_program.h>
#include <lockstep/launch/worker_process.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::launch::fork_server_test {
namespace {

using lockstep::testing::program_path;

/// With what sanitizers are told.
std::vector<std::string> with_settings(std::vector<std::string> environment) {
  for (const char* name : {"ASAN_OPTIONS", "UBSAN_OPTIONS", "LSAN_OPTIONS", "TSAN_OPTIONS"}) {
    if (const char* value = std::getenv(name)) environment.push_back(std::string(name) + "=" + value);
  }
  return environment;
}

WorkerSpec probe(const std::string& name = "process_probe") {
  return {.program = program_path(name),
          .arguments = {name, "common"},
          .environment = with_settings({"PATH=/usr/bin:/bin", "COMMON=1"})};
}

/// How one ended, and what it has written.
struct Told {
  int wait_status = -1;
  std::string text;
};

std::string read_line(int fd) {
  std::string text;
  char byte = 0;
  while (::read(fd, &byte, 1) == 1 && byte != '\n') text += byte;
  return text;
}

/// Starts it, and reads what it says up to its end.
Told run(WorkerSpec spec) {
  const Guardian guardian(1);
  int ends[2] = {-1, -1};
  EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd in(ends[0]);
  UniqueFd out(ends[1]);
  const UniqueFd nothing(::open("/dev/null", O_RDWR | O_CLOEXEC));
  spec.standard = {nothing.get(), out.get(), nothing.get()};
  auto worker = WorkerProcess::start(spec, &guardian);
  out.reset();
  Told told;
  for (char byte = 0; ::read(in.get(), &byte, 1) == 1;) told.text += byte;
  pollfd ended = {worker.pidfd(), POLLIN, 0};
  EXPECT_EQ(::poll(&ended, 1, 60'000), 1);
  told.wait_status = worker.wait_status().value_or(-1);
  return told;
}

MakeProcess from(ForkServer& server) {
  return [&server](const WorkerSpec& spec) { return server.fork(spec); };
}

/// These tests want programs that have one thread when their libraries are loaded.
class ForkServerTest : public ::testing::Test {
 protected:
  void SetUp() override {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "ThreadSanitizer has a thread of its own";
#endif
  }
};

TEST_F(ForkServerTest, AForkedProcessIsAsOneThatIsExecuted) {
  const UniqueFd file(::open("/dev/zero", O_RDONLY | O_CLOEXEC));
  WorkerSpec spec = probe();
  spec.arguments = {"process_probe", "its own", ""};
  spec.environment = with_settings({"PATH=/usr/bin:/bin", "COMMON=2", "OWN=text with = and spaces"});
  spec.inherited = {file.get()};
  const Told executed = run(spec);
  ForkServer server(probe());
  spec.make_process = from(server);
  const auto before = std::filesystem::current_path();
  for (int i = 0; i < 3; ++i) {
    const Told forked = run(spec);
    EXPECT_EQ(forked.wait_status, 0);
    // Their pipes are two.
    const std::regex pipe("pipe:\\[[0-9]*\\]");
    EXPECT_EQ(
        std::regex_replace(forked.text, pipe, "pipe"),
        "forked\n" + std::regex_replace(executed.text.substr(executed.text.find('\n') + 1), pipe, "pipe"));
  }
  // The server was started in another folder than this process is in by now.
  std::filesystem::current_path("/");
  EXPECT_NE(run(spec).text.find("\nfolder /\n"), std::string::npos);
  std::filesystem::current_path(before);
}

TEST_F(ForkServerTest, ForksIntoACgroup) {
  const auto cgroup = WorkerCgroup::make();
  if (!cgroup) GTEST_SKIP() << "this process may not make cgroups";
  ForkServer server(probe());
  WorkerSpec spec = probe();
  spec.arguments.emplace_back("stay");
  spec.cgroup = cgroup->fd();
  const auto made = server.fork(spec);
  ASSERT_TRUE(made);
  std::ifstream members(cgroup->folder() + "/cgroup.procs");
  std::vector<pid_t> pids;
  for (pid_t pid = 0; members >> pid;) pids.push_back(pid);
  EXPECT_EQ(pids, std::vector<pid_t>{made->pid});
  cgroup->kill();
  EXPECT_EQ(::waitpid(made->pid, nullptr, 0), made->pid);
}

TEST_F(ForkServerTest, AProcessThatIsNotTakenOverEndsBeforeItBegins) {
  ForkServer server(probe());
  int ends[2] = {-1, -1};
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd in(ends[0]);
  UniqueFd out(ends[1]);
  WorkerSpec spec = probe();
  spec.standard[1] = out.get();
  auto made = server.fork(spec);
  ASSERT_TRUE(made);
  out.reset();
  made->go.reset();
  EXPECT_EQ(read_line(in.get()), "");
  int status = 0;
  EXPECT_EQ(::waitpid(made->pid, &status, 0), made->pid);
  EXPECT_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -1, 127);
}

TEST_F(ForkServerTest, ProcessesAreExecutedWhereTheServerHasEnded) {
  ForkServer server(probe());
  WorkerSpec spec = probe();
  spec.make_process = from(server);
  EXPECT_EQ(run(spec).text.substr(0, 7), "forked\n");
  ASSERT_EQ(::kill(server.pid(), SIGKILL), 0);
  EXPECT_EQ(run(spec).text.substr(0, 9), "executed\n");
}

TEST(ForkServer, ProcessesAreExecutedWhereLibrariesHaveStartedThreads) {
  ForkServer server(probe("threaded_process_probe"));
  EXPECT_FALSE(server.await(Deadline::after(std::chrono::minutes(1))));
  while (!server.has_ended()) server.await(Deadline::after(std::chrono::minutes(1)));
  WorkerSpec spec = probe("threaded_process_probe");
  spec.make_process = from(server);
  EXPECT_EQ(run(spec).text.substr(0, 9), "executed\n");
}

TEST_F(ForkServerTest, ProcessesAreExecutedWhereTheServerHasNoRoomForTheirEnvironment) {
  ForkServer server(probe());
  WorkerSpec spec = probe();
  spec.make_process = from(server);
  spec.environment.push_back("LONG=" + std::string(100'000, 'x'));
  EXPECT_EQ(run(spec).text.substr(0, 9), "executed\n");
}

TEST_F(ForkServerTest, EndsWithItsObject) {
  std::optional<ForkServer> server(std::in_place, probe());
  ASSERT_TRUE(server->await(Deadline::after(std::chrono::minutes(1))));
  const pid_t pid = server->pid();
  server.reset();
  EXPECT_EQ(::kill(pid, 0), -1);
  EXPECT_EQ(errno, ESRCH);
  EXPECT_TRUE(::waitpid(-1, nullptr, WNOHANG) == -1 && errno == ECHILD) << "a process is left";
}

TEST(ForkServer, AProgramThatNeverAnswersIsNotWaitedFor) {
  ForkServer server({.program = "/bin/sleep", .arguments = {"sleep", "1000"}, .environment = {}});
  EXPECT_FALSE(server.await(Deadline::after(std::chrono::nanoseconds(0))));
  EXPECT_FALSE(server.has_ended());
}

TEST(ForkServer, TellsWhatLoadsThisLibrary) {
  const lockstep::testing::TemporaryFolder folder;
  const std::string script = folder.path() / "script";
  std::ofstream(script) << "#!" << program_path("process_probe") << "\n";
  EXPECT_TRUE(links_this_library(program_path("process_probe"), {}));
  EXPECT_FALSE(links_this_library("/bin/sh", {}));
  EXPECT_FALSE(links_this_library(script, {}));
  EXPECT_FALSE(links_this_library(folder.path() / "missing", {}));
  EXPECT_FALSE(links_this_library(folder.path(), {}));
}

}  // namespace
}  // namespace lockstep::launch::fork_server_test
