#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <gmock/gmock.h>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <poll.h>
#include <stdexcept>
#include <string>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/control_plane/frames.h>
#include <lockstep/launch/control_plane/host_reporter.h>
#include <lockstep/launch/control_plane/job_watch.h>
#include <lockstep/launch/control_plane/sockets.h>
#include <lockstep/launch/control_plane/testing/few_descriptors.h>
#include <lockstep/launch/control_plane/watch_greeting.h>
#include <lockstep/launch/control_plane/watch_server.h>

// How a program on an agent's host hears the reports of all hosts; that they come is in tests/launch/top_test.py.
namespace lockstep::launch::watch_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

void turn_until(EventLoop& loop, const std::function<bool()>& holds) {
  const BootTime limit = BootClock::now() + std::chrono::seconds(60);
  while (!holds()) {
    ASSERT_LT(BootClock::now(), limit);
    loop.run_once(BootClock::now() + std::chrono::milliseconds(5));
  }
}

/// A connection to the agent that is this process.
UniqueFd connect_to_self() {
  auto agents = JobWatch::agents();
  return std::move(agents.at(::getpid()));
}

JobWatch watch_self() {
  return {::getpid(), connect_to_self()};
}

TEST(WatchServer, TellsAllThatWatch) {
  EventLoop loop;
  WatchServer server(loop, {});
  EXPECT_TRUE(JobWatch::agents().contains(::getpid()));
  server.send({.text = "no watcher reads this"});
  {
    JobWatch one = watch_self(), other = watch_self();
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
  WatchServer server(loop, {});
  JobWatch watch = watch_self();
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
  auto server = std::make_unique<WatchServer>(loop, nullptr);
  JobWatch watch = watch_self();
  turn_until(loop, [&] { return server->watched(); });
  server.reset();
  std::vector<Report> reports;
  EXPECT_FALSE(watch.read(reports));
  EXPECT_FALSE(JobWatch::agents().contains(::getpid()));
}

TEST(WatchServer, HasAPlaceForThoseThatGreetHoweverManyDoNot) {
  EventLoop loop;
  WatchServer server(loop, {});
  std::vector<UniqueFd> silent;
  for (size_t i = 0; i < 3 * WatchServer::kMostWatchers; ++i) silent.push_back(connect_to_self());
  JobWatch watch = watch_self();
  turn_until(loop, [&] { return server.watched(); });
  for (size_t i = 0; i < 3 * WatchServer::kMostWatchers; ++i) silent.push_back(connect_to_self());
  std::vector<Report> reports;
  turn_until(loop, [&] {
    server.send({.text = "a report"});
    EXPECT_TRUE(watch.read(reports));
    return reports.size() > 10;
  });
}

TEST(WatchServer, SaysThatItHasNoPlace) {
  EventLoop loop;
  WatchServer server(loop, {});
  std::list<JobWatch> watches;
  while (watches.size() < WatchServer::kMostWatchers) watches.push_back(watch_self());
  turn_until(loop, [&] {
    server.send({.text = "a report"});
    return std::all_of(watches.begin(), watches.end(), [](JobWatch& watch) {
      std::vector<Report> reports;
      EXPECT_TRUE(watch.read(reports));
      return !reports.empty();
    });
  });
  std::vector<Report> reports;
  JobWatch late = watch_self();
  std::string said;
  turn_until(loop, [&] {
    try {
      EXPECT_TRUE(late.read(reports));
    } catch (const c10::DistNetworkError& error) {
      said = error.what_without_backtrace();
    }
    return !said.empty();
  });
  EXPECT_THAT(said, HasSubstr("has no place for another lockstep top; end one of those"));
  watches.pop_back();
  JobWatch next = watch_self();
  turn_until(loop, [&] {
    server.send({.text = "a report"});
    EXPECT_TRUE(next.read(reports));
    return !reports.empty();
  });
}

TEST(WatchServer, LeavesAWatcherForLaterWhereNoDescriptorIsLeft) {
  EventLoop loop;
  WatchServer server(loop, {});
  JobWatch watch = watch_self();
  EXPECT_EQ(server.serve(BootClock::now()), BootTime::max());
  {
    const testing::FewDescriptors none(0);
    turn_until(loop, [&] { return server.serve({}) < BootTime::max(); });
  }
  server.serve(server.serve({}));
  turn_until(loop, [&] { return server.watched(); });
}

/// What the other side sends, and what it gets, where it is of another release.
class OtherRelease {
 public:
  /// Connects to the agent that is this process.
  OtherRelease() : socket_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const SocketAddress address = abstract_address(WatchServer::own_name());
    EXPECT_EQ(::connect(socket_.get(), address.raw(), address.size), 0);
  }
  /// Takes the connection of a JobWatch.
  explicit OtherRelease(int listener) : socket_(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC)) {}

  void send(const std::string& bytes) const {
    EXPECT_EQ(::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  /// Appends what has come. False once the connection has ended.
  bool read(std::string& all) const {
    std::array<char, 256> bytes{};
    ssize_t got = 0;
    while ((got = ::recv(socket_.get(), bytes.data(), bytes.size(), MSG_DONTWAIT)) > 0)
      all.append(bytes.data(), static_cast<size_t>(got));
    return got < 0 && errno == EAGAIN;
  }

 private:
  UniqueFd socket_;
};

TEST(WatchGreeting, HasALayoutThatStays) {
  const WatchGreeting greeting = {.version = 0x01020304, .release = "12.34.56"};
  std::string bytes = std::string(
                          "lockstep\x04\x03\x02\x01"
                          "12.34.56") +
                      std::string(12, '\0');
  EXPECT_EQ(encode(greeting), bytes);
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::string part = bytes.substr(0, i);
    EXPECT_EQ(take_watch_greeting(part), std::nullopt) << i;
  }
  bytes += "more";
  EXPECT_EQ(take_watch_greeting(bytes), greeting);
  EXPECT_EQ(bytes, "more");
  std::string others = framed("a report of a release that does not greet");
  EXPECT_EQ(take_watch_greeting(others)->version, 0);
  const WatchGreeting longest = {.version = 7, .release = std::string(20, 'x')};
  std::string cut = encode({.version = 7, .release = std::string(30, 'x')});
  EXPECT_EQ(take_watch_greeting(cut), longest);
}

TEST(WatchServer, SaysThatAWatchersVersionDiffersAndTellsItNothing) {
  EventLoop loop;
  std::vector<std::string> said;
  WatchServer server(loop, [&](const std::string& text) { said.push_back(text); });
  const std::string own = encode(own_watch_greeting());
  for (const std::string& begin :
       {encode({.version = 0xffff, .release = "9.9\033"}), std::string("GET / HTTP")}) {
    const OtherRelease other;
    other.send(begin);
    std::string got;
    turn_until(loop, [&] {
      server.send({.text = "not for it"});
      EXPECT_FALSE(server.watched());
      return !other.read(got);
    });
    EXPECT_EQ(got, own) << "by which it can tell";
  }
  ASSERT_EQ(said.size(), 1) << "however often one comes";
  EXPECT_THAT(said[0],
              AllOf(HasSubstr("a `lockstep top` of Lockstep 9.9? (messages of version 65535) can't watch"),
                    HasSubstr("this job, which runs with " + describe(own_watch_greeting())),
                    HasSubstr("control_plane_tests top " + std::to_string(::getpid()))));
}

TEST(JobWatch, SaysThatTheAgentsVersionDiffers) {
  const SocketAddress address = abstract_address(WatchServer::own_name());
  const UniqueFd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  ASSERT_EQ(::bind(listener.get(), address.raw(), address.size), 0);
  ASSERT_EQ(::listen(listener.get(), 4), 0);
  const WatchGreeting other = {.version = own_watch_greeting().version + 1, .release = "0.2.0"};
  const std::string greeting = encode(other);
  const std::string report = framed(encode(Report{.text = "of a release before greetings"}));
  for (const auto& [begin, words] :
       {std::pair(greeting, "is of " + describe(other) + ", and"),
        std::pair(report, std::string("is of a Lockstep that does not tell its version, and"))}) {
    JobWatch watch = watch_self();
    const OtherRelease agent(listener.get());
    std::vector<Report> reports;
    EXPECT_TRUE(watch.read(reports)) << "nothing has come yet";
    agent.send(begin + "what this release can't read");
    try {
      watch.read(reports);
      FAIL() << words;
    } catch (const c10::DistNetworkError& error) {
      EXPECT_THAT(error.what_without_backtrace(),
                  AllOf(HasSubstr(words), HasSubstr("this lockstep top of " + describe(own_watch_greeting())),
                        HasSubstr("use the program that has started the job: "),
                        HasSubstr("control_plane_tests top " + std::to_string(::getpid()))));
    }
    EXPECT_TRUE(reports.empty());
  }
}

TEST(HostReporter, ReportsAgainAndAgainWhateverSomeOfThemThrow) {
  std::atomic<int> calls{0};
  ::testing::internal::CaptureStderr();
  HostReporter reporter([&calls]() -> std::string {
    if (++calls < 3) throw std::runtime_error("a look that fails");
    return "report " + std::to_string(calls);
  });
  pollfd wait = {reporter.fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&wait, 1, 60'000), 1);
  const std::string log = ::testing::internal::GetCapturedStderr();
  const size_t first = log.find("a look that fails");
  EXPECT_NE(first, std::string::npos);
  EXPECT_EQ(log.find("a look that fails", first + 1), std::string::npos) << "once: " << log;
  EXPECT_EQ(reporter.take(), "report 3");
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
