#include <cstdlib>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/rendezvous/exit_board.h>

namespace lockstep::exit_board_test {
namespace {

using namespace std::chrono_literals;

constexpr int kExitedWith3 = 3 << 8;

/// Sets LOCKSTEP_EXIT_BOARD_FD for one test.
class BoardVariable {
 public:
  explicit BoardVariable(const std::string& value) { ::setenv(ExitBoard::kVariable, value.c_str(), 1); }
  ~BoardVariable() { ::unsetenv(ExitBoard::kVariable); }
};

TEST(DescribeWaitStatus, NamesStatusAndSignal) {
  EXPECT_EQ(describe_wait_status(kExitedWith3), "exited with status 3");
  EXPECT_EQ(describe_wait_status(SIGKILL), "killed by signal 9 (SIGKILL)");
  EXPECT_EQ(describe_wait_status(SIGSEGV | 0x80), "killed by signal 11 (SIGSEGV)");  // with a core dump
  EXPECT_EQ(describe_wait_status(SIGRTMIN + 1), "killed by signal " + std::to_string(SIGRTMIN + 1));
}

TEST(ExitBoard, WorkerReadsWhatTheLauncherWrote) {
  auto board = ExitBoard::create(3);
  BoardVariable variable(board.environment_value());
  auto seen = ExitBoard::from_environment();
  ASSERT_TRUE(seen);
  EXPECT_EQ(seen->describe_end(100, Deadline::never()), std::nullopt)
      << "no worker has that pid: nothing to wait for";
  board.record_start(1, 100);
  EXPECT_EQ(seen->describe_end(100, Deadline::after(0ms)), std::nullopt) << "still running";
  board.record_end(1, kExitedWith3);
  EXPECT_EQ(seen->describe_end(100, Deadline::never()), "exited with status 3");
  board.record_start(2, 101);
  board.record_end(2, 0);
  EXPECT_EQ(seen->describe_end(101, Deadline::never()), "exited with status 0")
      << "0 must not look like running";
  board.record_start(1, 102);  // restarted
  EXPECT_EQ(seen->describe_end(100, Deadline::never()), std::nullopt);
  EXPECT_EQ(seen->describe_end(102, Deadline::after(0ms)), std::nullopt);
  EXPECT_EQ(seen->describe_end(0, Deadline::never()), std::nullopt) << "an unused entry has pid 0";
}

TEST(ExitBoard, WaitsForTheLaunchersNote) {
  auto board = ExitBoard::create(1);
  board.record_start(0, 100);
  BoardVariable variable(board.environment_value());
  auto seen = ExitBoard::from_environment();
  ASSERT_TRUE(seen);
  std::optional<std::string> words;
  std::thread waiter([&] { words = seen->describe_end(100, Deadline::never()); });
  board.record_end(0, SIGTERM);
  waiter.join();
  EXPECT_EQ(words, "killed by signal 15 (SIGTERM)");
}

TEST(ExitBoard, ServesThousandsAndOtherProcesses) {
  auto board = ExitBoard::create(4096);
  board.record_start(4095, 100);
  BoardVariable variable(board.environment_value());
  pid_t child = ::fork();
  if (child == 0) {
    auto seen = ExitBoard::from_environment();
    ::_exit(seen && seen->describe_end(100, Deadline::never()) == "exited with status 3" ? 0 : 1);
  }
  board.record_end(4095, kExitedWith3);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(ExitBoard, AWorkerTellsTheLauncherWhoMadeItFail) {
  auto board = ExitBoard::create(4096);
  BoardVariable variable(board.environment_value());
  int ready[2];
  ASSERT_EQ(::pipe2(ready, O_CLOEXEC), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char byte = 0;
    if (::read(ready[0], &byte, 1) != 1) ::_exit(1);
    auto seen = ExitBoard::from_environment();
    if (!seen) ::_exit(2);
    seen->record_culprit(101);  // the program catches this error and goes on
    seen->record_culprit(100);
    seen->record_culprit(77);  // no worker
    seen->record_culprit(::getpid());
    ::_exit(0);
  }
  board.record_start(0, 100);
  board.record_start(1, 101);
  board.record_start(4095, child);
  EXPECT_EQ(board.culprit_of(4095), std::nullopt);
  EXPECT_EQ(::write(ready[1], "x", 1), 1);
  ::close(ready[0]);
  ::close(ready[1]);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(board.culprit_of(4095), 0);
  EXPECT_EQ(board.culprit_of(0), std::nullopt);
  board.record_start(4095, 102);  // restarted
  EXPECT_EQ(board.culprit_of(4095), std::nullopt);
  auto seen = ExitBoard::from_environment();
  ASSERT_TRUE(seen);
  seen->record_culprit(100);  // this process is no worker
  for (int rank : {0, 1, 4095}) EXPECT_EQ(board.culprit_of(rank), std::nullopt);
  EXPECT_THROW(seen->culprit_of(0), c10::Error) << "the launcher's alone";
}

TEST(ExitBoard, ForeignOrMalformedDescriptorsAreNoBoard) {
  EXPECT_FALSE(ExitBoard::from_environment());
  auto board = ExitBoard::create(1);
  const std::string inode = board.environment_value().substr(board.environment_value().find(':'));
  UniqueFd other(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  for (const std::string& value : {std::string("x"), std::string("3"), std::string("3:"), std::string("-1:5"),
                                   std::string("99999:7"), std::to_string(other.get()) + inode,
                                   board.environment_value() + "1", board.environment_value() + "x"}) {
    BoardVariable variable(value);
    EXPECT_FALSE(ExitBoard::from_environment()) << value;
  }
  auto second = ExitBoard::create(1);  // a real board, but not the one that the variable names
  BoardVariable variable(std::to_string(second.fd()) + inode);
  EXPECT_FALSE(ExitBoard::from_environment());
}

TEST(ExitBoard, RefusesMisuse) {
  EXPECT_THROW(ExitBoard::create(0), c10::ValueError);
  EXPECT_THROW(ExitBoard::create(-1), c10::ValueError);
  auto board = ExitBoard::create(2);
  EXPECT_THROW(board.record_start(2, 100), c10::ValueError);
  EXPECT_THROW(board.record_start(-1, 100), c10::ValueError);
  EXPECT_THROW(board.record_start(0, 0), c10::ValueError);
  EXPECT_THROW(board.record_end(2, 0), c10::ValueError);
  BoardVariable variable(board.environment_value());
  auto seen = ExitBoard::from_environment();
  ASSERT_TRUE(seen);
  EXPECT_THROW(seen->record_end(0, 0), c10::Error) << "a worker's mapping is read-only";
}

}  // namespace
}  // namespace lockstep::exit_board_test
