#include <cstdlib>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/rendezvous/exit_status_table.h>

namespace lockstep::exit_status_table_test {
namespace {

using namespace std::chrono_literals;

constexpr int kExitedWith3 = 3 << 8;

/// Sets LOCKSTEP_EXIT_STATUS_FD for one test.
class TableVariable {
 public:
  explicit TableVariable(const std::string& value) { ::setenv(ExitStatusTable::kVariable, value.c_str(), 1); }
  ~TableVariable() { ::unsetenv(ExitStatusTable::kVariable); }
};

TEST(DescribeWaitStatus, NamesStatusAndSignal) {
  EXPECT_EQ(describe_wait_status(kExitedWith3), "exited with status 3");
  EXPECT_EQ(describe_wait_status(SIGKILL), "killed by signal 9 (SIGKILL)");
  EXPECT_EQ(describe_wait_status(SIGSEGV | 0x80), "killed by signal 11 (SIGSEGV)");  // with a core dump
  EXPECT_EQ(describe_wait_status(SIGRTMIN + 1), "killed by signal " + std::to_string(SIGRTMIN + 1));
}

TEST(ExitStatusTable, WorkerReadsWhatTheLauncherWrote) {
  auto table = ExitStatusTable::create(3);
  TableVariable variable(table.environment_value());
  auto seen = ExitStatusTable::from_environment();
  ASSERT_TRUE(seen);
  EXPECT_EQ(seen->describe_end(100, Deadline::never()), std::nullopt)
      << "no worker has that pid: nothing to wait for";
  table.record_start(1, 100);
  EXPECT_EQ(seen->describe_end(100, Deadline::after(0ms)), std::nullopt) << "still running";
  table.record_end(1, kExitedWith3);
  EXPECT_EQ(seen->describe_end(100, Deadline::never()), "exited with status 3");
  table.record_start(2, 101);
  table.record_end(2, 0);
  EXPECT_EQ(seen->describe_end(101, Deadline::never()), "exited with status 0")
      << "0 must not look like running";
  table.record_start(1, 102);  // restarted
  EXPECT_EQ(seen->describe_end(100, Deadline::never()), std::nullopt);
  EXPECT_EQ(seen->describe_end(102, Deadline::after(0ms)), std::nullopt);
  EXPECT_EQ(seen->describe_end(0, Deadline::never()), std::nullopt) << "an unused entry has pid 0";
}

TEST(ExitStatusTable, WaitsForTheLaunchersNote) {
  auto table = ExitStatusTable::create(1);
  table.record_start(0, 100);
  TableVariable variable(table.environment_value());
  auto seen = ExitStatusTable::from_environment();
  ASSERT_TRUE(seen);
  std::optional<std::string> words;
  std::thread waiter([&] { words = seen->describe_end(100, Deadline::never()); });
  table.record_end(0, SIGTERM);
  waiter.join();
  EXPECT_EQ(words, "killed by signal 15 (SIGTERM)");
}

TEST(ExitStatusTable, ServesThousandsAndOtherProcesses) {
  auto table = ExitStatusTable::create(4096);
  table.record_start(4095, 100);
  TableVariable variable(table.environment_value());
  pid_t child = ::fork();
  if (child == 0) {
    auto seen = ExitStatusTable::from_environment();
    ::_exit(seen && seen->describe_end(100, Deadline::never()) == "exited with status 3" ? 0 : 1);
  }
  table.record_end(4095, kExitedWith3);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(ExitStatusTable, AWorkerTellsTheLauncherWhoMadeItFail) {
  auto table = ExitStatusTable::create(4096);
  TableVariable variable(table.environment_value());
  int ready[2];
  ASSERT_EQ(::pipe2(ready, O_CLOEXEC), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    char byte = 0;
    if (::read(ready[0], &byte, 1) != 1) ::_exit(1);
    auto seen = ExitStatusTable::from_environment();
    if (!seen) ::_exit(2);
    seen->record_culprit(101);  // the program catches this error and goes on
    seen->record_culprit(100);
    seen->record_culprit(77);  // no worker
    seen->record_culprit(::getpid());
    if (::read(ready[0], &byte, 1) != 1) ::_exit(3);
    seen->record_far_culprit(4711);
    ::_exit(0);
  }
  table.record_start(0, 100);
  table.record_start(1, 101);
  table.record_start(4095, child);
  EXPECT_EQ(table.culprit_of(4095), std::nullopt);
  EXPECT_EQ(::write(ready[1], "x", 1), 1);
  while (table.culprit_of(4095) != 0) std::this_thread::yield();
  EXPECT_EQ(table.far_culprit_of(4095), std::nullopt);
  EXPECT_EQ(table.culprit_of(0), std::nullopt);
  EXPECT_EQ(::write(ready[1], "x", 1), 1);
  ::close(ready[0]);
  ::close(ready[1]);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(table.culprit_of(4095), std::nullopt) << "it is on another host";
  EXPECT_EQ(table.far_culprit_of(4095), 4711);
  table.record_start(4095, 102);  // restarted
  EXPECT_EQ(table.culprit_of(4095), std::nullopt);
  EXPECT_EQ(table.far_culprit_of(4095), std::nullopt);
  auto seen = ExitStatusTable::from_environment();
  ASSERT_TRUE(seen);
  seen->record_culprit(100);  // this process is no worker
  for (int rank : {0, 1, 4095}) EXPECT_EQ(table.culprit_of(rank), std::nullopt);
  EXPECT_THROW(seen->culprit_of(0), c10::Error) << "the launcher's alone";
}

TEST(ExitStatusTable, AWorkerTellsTheLauncherForWhomItWaits) {
  auto table = ExitStatusTable::create(100);
  TableVariable variable(table.environment_value());
  auto seen = ExitStatusTable::from_environment();
  ASSERT_TRUE(seen);
  seen->record_wait(ExitStatusTable::LongWait{"rank 1 (pid 7)", "", 5});
  for (int rank = 0; rank < 100; ++rank) EXPECT_FALSE(table.wait_of(rank)) << "this process is no worker";
  table.record_start(99, ::getpid());
  table.record_start(98, 1);
  EXPECT_FALSE(table.wait_of(99));
  seen->record_wait(ExitStatusTable::LongWait{"rank 1 (pid 7)", "it is\nstopped", 5});
  auto wait = table.wait_of(99);
  ASSERT_TRUE(wait);
  EXPECT_EQ(wait->awaited, "rank 1 (pid 7)");
  EXPECT_EQ(wait->state, "it is?stopped") << "one line";
  EXPECT_EQ(wait->since_ns, 5);
  EXPECT_FALSE(table.wait_of(98));
  seen->record_wait(ExitStatusTable::LongWait{std::string(1000, 'a'), std::string(1000, 'b'), 6});
  wait = table.wait_of(99);
  ASSERT_TRUE(wait);
  EXPECT_EQ(wait->awaited, std::string(103, 'a'));
  EXPECT_EQ(wait->state, std::string(143, 'b'));
  seen->record_wait(std::nullopt);
  EXPECT_FALSE(table.wait_of(99));
  seen->record_wait(ExitStatusTable::LongWait{"rank 1", "", 7});
  table.record_start(99, 102);  // restarted
  EXPECT_FALSE(table.wait_of(99));
  EXPECT_THROW(seen->wait_of(99), c10::Error) << "the launcher's alone";
}

TEST(ExitStatusTable, ForeignOrMalformedDescriptorsAreNoBoard) {
  EXPECT_FALSE(ExitStatusTable::from_environment());
  auto table = ExitStatusTable::create(1);
  const std::string inode = table.environment_value().substr(table.environment_value().find(':'));
  UniqueFd other(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  for (const std::string& value : {std::string("x"), std::string("3"), std::string("3:"), std::string("-1:5"),
                                   std::string("99999:7"), std::to_string(other.get()) + inode,
                                   table.environment_value() + "1", table.environment_value() + "x"}) {
    TableVariable variable(value);
    EXPECT_FALSE(ExitStatusTable::from_environment()) << value;
  }
  auto second = ExitStatusTable::create(1);  // a real table, but not the one that the variable names
  TableVariable variable(std::to_string(second.fd()) + inode);
  EXPECT_FALSE(ExitStatusTable::from_environment());
}

TEST(ExitStatusTable, RefusesMisuse) {
  EXPECT_THROW(ExitStatusTable::create(0), c10::ValueError);
  EXPECT_THROW(ExitStatusTable::create(-1), c10::ValueError);
  auto table = ExitStatusTable::create(2);
  EXPECT_THROW(table.record_start(2, 100), c10::ValueError);
  EXPECT_THROW(table.record_start(-1, 100), c10::ValueError);
  EXPECT_THROW(table.record_start(0, 0), c10::ValueError);
  EXPECT_THROW(table.record_end(2, 0), c10::ValueError);
  TableVariable variable(table.environment_value());
  auto seen = ExitStatusTable::from_environment();
  ASSERT_TRUE(seen);
  EXPECT_THROW(seen->record_end(0, 0), c10::Error) << "a worker's mapping is read-only";
}

}  // namespace
}  // namespace lockstep::exit_status_table_test
