#include <cerrno>
#include <chrono>
#include <cstring>
#include <gmock/gmock.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/base/process/pidfd.h>
#include <lockstep/rendezvous/process_stat.h>
#include <lockstep/rendezvous/process_watch.h>

namespace lockstep::process_watch_test {
namespace {

using ::testing::StartsWith;

TEST(ProcessIdentity, IsReadAsItWasWritten) {
  const std::string text = "42 777 boot 4026531840/4026531836/4026531837 a host";
  const auto process = ProcessIdentity::parse(text);
  EXPECT_EQ(process.pid, 42);
  EXPECT_EQ(process.start, 777u);
  EXPECT_EQ(process.host.pid_namespace, 4026531836u);
  EXPECT_EQ(process.host.network_namespace, 4026531840u);
  EXPECT_EQ(process.host.hostname, "a host");
  EXPECT_EQ(process.to_string(), text);
  const auto own = this_process();
  EXPECT_EQ(own.pid, ::getpid());
  EXPECT_GT(own.start, 0u);
  EXPECT_EQ(ProcessIdentity::parse(own.to_string()).to_string(), own.to_string());
}

TEST(ProcessIdentity, RefusesWhatNoRankWrote) {
  for (const char* text : {"", "42", "42 777", "0 777 boot 1 host", "-1 777 boot 1 host", "42 -1 boot 1 host",
                           "42 777 boot host"}) {
    EXPECT_THROW(ProcessIdentity::parse(text), c10::ValueError) << text;
  }
}

TEST(ProcessWatch, TellsAProcessFromAnotherThatHasItsPid) {
  const auto own = this_process();
  EXPECT_FALSE(ProcessWatch(own, own).has_ended());
  auto earlier = own;
  --earlier.start;
  EXPECT_TRUE(ProcessWatch(earlier, own).has_ended());
}

TEST(ProcessWatch, SaysNothingOfProcessesElsewhere) {
  const auto own = this_process();
  auto elsewhere = own;
  --elsewhere.start;
  elsewhere.host.boot_id = "another";
  EXPECT_FALSE(ProcessWatch(elsewhere, own).can_tell());
  EXPECT_FALSE(ProcessWatch(elsewhere, own).has_ended());
  elsewhere.host = own.host;
  ++elsewhere.host.pid_namespace;
  EXPECT_FALSE(ProcessWatch(elsewhere, own).has_ended());
}

/// A process that does nothing for a minute.
pid_t spawn_sleep() {
  char name[] = "sleep";
  char seconds[] = "60";
  char* arguments[] = {name, seconds, nullptr};
  pid_t child = 0;
  EXPECT_EQ(::posix_spawnp(&child, name, nullptr, nullptr, arguments, environ), 0);
  return child;
}

TEST(ProcessWatch, NoticesAnEnd) {
  const pid_t child = spawn_sleep();
  auto process = this_process();
  process.pid = child;
  process.start = read_process_stat(child).value().start;
  const ProcessWatch watch(process, this_process());
  EXPECT_FALSE(watch.has_ended());
  ::kill(child, SIGKILL);
  pollfd end{watch.pidfd(), POLLIN, 0};
  if (watch.pidfd() >= 0) {
    EXPECT_EQ(::poll(&end, 1, 20'000), 1);
  }
  while (!watch.has_ended()) std::this_thread::yield();
  EXPECT_TRUE(ProcessWatch(process, this_process()).has_ended()) << "before its parent has asked how";
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(watch.has_ended());
  EXPECT_TRUE(ProcessWatch(process, this_process()).has_ended()) << "there is no such process any more";
  EXPECT_THAT(watch.describe_end(), StartsWith("(pid " + std::to_string(child) + ") "));
}

TEST(ProcessWatch, TellsThatAProcessIsStopped) {
  const pid_t child = spawn_sleep();
  auto process = this_process();
  process.pid = child;
  process.start = read_process_stat(child).value().start;
  const ProcessWatch watch(process, this_process());
  EXPECT_EQ(watch.describe_stop(), "");
  ::kill(child, SIGSTOP);
  EXPECT_EQ(::waitpid(child, nullptr, WUNTRACED), child);
  EXPECT_THAT(watch.describe_stop(), StartsWith("(pid " + std::to_string(child) +
                                                ") is stopped (by SIGSTOP, SIGTSTP or a debugger; "));
  EXPECT_FALSE(watch.has_ended());
  --process.start;
  EXPECT_EQ(ProcessWatch(process, this_process()).describe_stop(), "") << "another process that has its pid";
  ::kill(child, SIGCONT);
  EXPECT_EQ(::waitpid(child, nullptr, WCONTINUED), child);
  EXPECT_EQ(watch.describe_stop(), "");
  ::kill(child, SIGKILL);
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_EQ(watch.describe_stop(), "");
}

TEST(KnownEnd, AwaitsTheEndOfAProcessThatIsStillDying) {
  const pid_t child = spawn_sleep();
  const UniqueFd pidfd = open_pidfd(child);
  if (!pidfd) GTEST_SKIP() << "no pidfd_open(2) here: " << std::strerror(errno);
  std::jthread death([child] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // longer than the patience below
    ::kill(child, SIGKILL);
  });
  EXPECT_EQ(known_end(child, pidfd.get(), std::chrono::milliseconds(50)), "killed by signal 9 (SIGKILL)");
  death.join();
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
}

}  // namespace
}  // namespace lockstep::process_watch_test
