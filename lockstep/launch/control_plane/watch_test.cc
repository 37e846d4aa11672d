#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <gmock/gmock.h>
#include <memory>
#include <mutex>
#include <optional>
#include <poll.h>
#include <stdexcept>
#include <string>
#include <unistd.h>
#include <vector>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/launch/control_plane/host_reporter.h>
#include <lockstep/launch/control_plane/job_watch.h>
#include <lockstep/launch/control_plane/watch_server.h>

// How a program on an agent's host hears the reports of all hosts; that they come is in tests/top_test.py.
namespace lockstep::launch::watch_test {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

void turn_until(EventLoop& loop, const std::function<bool()>& holds) {
  const BootTime limit = BootClock::now() + std::chrono::seconds(60);
  while (!holds()) {
    ASSERT_LT(BootClock::now(), limit);
    loop.run_once(BootClock::now() + std::chrono::milliseconds(5));
  }
}

TEST(WatchServer, TellsAllThatWatch) {
  EventLoop loop;
  WatchServer server(loop);
  EXPECT_THAT(JobWatch::agents(), Contains(::getpid()));
  server.send({.text = "no one hears this"});
  {
    JobWatch one(::getpid()), other(::getpid());
    turn_until(loop, [&] { return server.watched(); });
    loop.run_once(BootClock::now());
    const Report large = {.agent = {2},
                          .text = std::string(kMostReportBytes - 100, 'x')};  // more than a socket holds
    server.send({.agent = {1}, .text = "first"});
    server.send(large);
    for (JobWatch* watch : {&one, &other}) {
      std::vector<Report> reports;
      turn_until(loop, [&] {
        EXPECT_TRUE(watch->read(reports));
        return reports.size() == 2;
      });
      EXPECT_THAT(reports, ElementsAre(Report{.agent = {1}, .text = "first"}, large));
    }
    EXPECT_TRUE(server.watched());
  }
  turn_until(loop, [&] { return !server.watched(); });
}

TEST(WatchServer, ForgetsWhatAWatcherDoesNotRead) {
  EventLoop loop;
  WatchServer server(loop);
  JobWatch watch(::getpid());
  turn_until(loop, [&] { return server.watched(); });
  for (int i = 0; i < 30; ++i) server.send({.text = std::string(kMostReportBytes - 100, 'x')});
  std::vector<Report> reports;
  turn_until(loop, [&] {
    EXPECT_TRUE(watch.read(reports));
    return reports.size() >= WatchServer::kMostWaitingBytes / kMostReportBytes;
  });
  EXPECT_LT(reports.size(), 15) << "the rest was not kept for it";
}

TEST(WatchServer, EndsWithItsAgent) {
  EventLoop loop;
  auto server = std::make_unique<WatchServer>(loop);
  JobWatch watch(::getpid());
  turn_until(loop, [&] { return server->watched(); });
  server.reset();
  std::vector<Report> reports;
  EXPECT_FALSE(watch.read(reports));
  EXPECT_THAT(JobWatch::agents(), Not(Contains(::getpid())));
  try {
    JobWatch again(::getpid());
    FAIL() << "nothing listens there";
  } catch (const c10::DistNetworkError& error) {
    EXPECT_THAT(error.what_without_backtrace(), HasSubstr("does not answer: Connection refused"));
  }
}

TEST(HostReporter, ReportsAgainAndAgainWhateverOneOfThemThrows) {
  std::atomic<int> calls{0};
  HostReporter reporter([&calls]() -> std::string {
    if (++calls == 1) throw std::runtime_error("a first look that fails");
    return "report " + std::to_string(calls);
  });
  pollfd wait = {reporter.fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&wait, 1, 60'000), 1);
  EXPECT_EQ(reporter.take(), "report 2");
  EXPECT_EQ(reporter.take(), std::nullopt) << "each once";
  EXPECT_EQ(::poll(&wait, 1, 0), 0);
}

TEST(HostReporter, DoesNotWaitForOneThatHangs) {
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool entered = false;
    bool open = false;
    bool left = false;
  };
  const auto gate = std::make_shared<Gate>();
  auto reporter = std::make_unique<HostReporter>([gate] {
    std::unique_lock lock(gate->mutex);
    gate->entered = true;
    gate->changed.notify_all();
    gate->changed.wait(lock, [&] { return gate->open; });
    gate->left = true;
    gate->changed.notify_all();
    return std::string("late");
  });
  std::unique_lock lock(gate->mutex);
  gate->changed.wait(lock, [&] { return gate->entered; });
  lock.unlock();
  reporter->stop();
  EXPECT_FALSE(reporter->is_over()) << "the report is under way";
  auto again = std::make_unique<HostReporter>([] { return std::string("in time"); });
  again->stop();
  while (!again->is_over()) std::this_thread::yield();
  reporter.reset();  // returns, though the report is under way
  lock.lock();
  gate->open = true;
  gate->changed.notify_all();
  gate->changed.wait(lock, [&] { return gate->left; });
}

}  // namespace
}  // namespace lockstep::launch::watch_test
