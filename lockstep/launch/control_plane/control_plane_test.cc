#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <future>
#include <gmock/gmock.h>
#include <memory>
#include <mutex>
#include <netinet/in.h>
#include <optional>
#include <poll.h>
#include <set>
#include <stdlib.h>
#include <string>
#include <string_view>
#include <sys/socket.h>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/base/boot_clock.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/control_plane/agent_link.h>
#include <lockstep/launch/control_plane/control_plane.h>
#include <lockstep/launch/control_plane/frames.h>
#include <lockstep/launch/control_plane/sockets.h>
#include <lockstep/launch/control_plane/testing/few_descriptors.h>
#include <lockstep/launch/control_plane/testing/scene.h>
#include <lockstep/launch/control_plane/tls.h>
#include <lockstep/launch/control_plane/watch_greeting.h>
#include <lockstep/launch/control_plane/watch_server.h>

namespace lockstep::launch::control_plane_test {
namespace {

using namespace testing;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(ControlPlane, TwoAgentsAndACoordinatorRunAWorldAndEndIt) {
  Scene scene;
  scene.run_world();
  EXPECT_EQ(scene.agents[0]->state.place(), (Place{1, 0, 2, 0, 2, 0, 0, 2}));
  EXPECT_EQ(scene.agents[1]->state.place(), (Place{1, 1, 2, 1, 2, 0, 1, 2}));
  EXPECT_EQ(scene.agents[0]->link.local_address(), "127.0.0.1");
  for (auto& agent : scene.agents) agent->state.workers_ended(0, "", BootClock::now());
  scene.until([&] { return scene.server->done(); }, "the job ends");
  EXPECT_EQ(scene.server->exit_status(), 0);
  for (auto& agent : scene.agents) EXPECT_EQ(agent->state.phase(), AgentState::Phase::kEnded);
}

TEST(ControlPlane, AnAgentWithOtherOptionsEndsAndIsToldWhich) {
  Scene scene;
  scene.run_world();
  const std::string before = scene.state();
  MembershipOptions others = scene.membership;
  others.max_hosts = 3;
  AgentState state({.id = {9}, .host = "node-9"}, others, BootClock::now());
  AgentLink link(scene.loop, scene.key, {loopback(scene.port)}, others, state);
  scene.until(
      [&] {
        link.serve(BootClock::now(), false);
        state.advance(BootClock::now());
        return state.phase() == AgentState::Phase::kEnded;
      },
      "the agent is refused");
  EXPECT_EQ(state.exit_status(), 1);
  const std::string why =
      "node-9 has --nnodes=2:3 where the coordinator has --nnodes=2; give all hosts of a job the same";
  EXPECT_EQ(state.reason(), why);
  EXPECT_THAT(scene.said, ElementsAre(why));
  scene.expect_unharmed(before);
}

TEST(ControlPlane, AnAgentWithoutWorkersSaysWhatItWaitsForAndAgainOnlyWhenThatHasChanged) {
  Scene scene;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> said;
  ControlPlane plane({.membership = scene.membership,
                      .self = {.id = {9}, .host = "node-9"},
                      .endpoint = {.addresses = {loopback(scene.port)}, .listener = {}},
                      .key = scene.key,
                      .say =
                          [&](const std::string& text) {
                            const std::lock_guard lock(mutex);
                            said.push_back(text);
                            changed.notify_all();
                          },
                      .before_wait_is_said = milliseconds(10)});
  const std::string place = " the coordinator at 127.0.0.1 port " + std::to_string(scene.port);
  {
    std::unique_lock lock(mutex);  // the server has not had a turn
    ASSERT_TRUE(changed.wait_for(lock, seconds(60), [&] { return !said.empty(); }));
    EXPECT_EQ(said.front(), "waits for an answer of" + place);
  }
  const std::string waits = "is connected to" + place + ", and waits: 1 host of at least 2 is here: node-9";
  scene.until(
      [&] {
        const std::lock_guard lock(mutex);
        return said.back() == waits;
      },
      "it waits for another host");
  const auto& members = scene.server->coordinator().members();
  for (int heartbeats = 0; heartbeats < 10; ++heartbeats) {
    const BootTime heard_at = members.at(0).heard_at;
    scene.until([&] { return members.at(0).heard_at > heard_at; }, "the agent is heard again");
  }
  const std::lock_guard lock(mutex);
  EXPECT_EQ(std::set<std::string>(said.begin(), said.end()).size(), said.size());
}

TEST(ControlPlane, AnAgentThatReachesNoneOfSeveralAddressesSaysOnceThatItWaits) {
  uint16_t deaf = 0;
  uint16_t mute = 0;
  listen_on_loopback(deaf);                            // and closed again: connections are refused
  const UniqueFd listener = listen_on_loopback(mute);  // where they are accepted, and closed
  std::mutex mutex;
  std::vector<std::string> said;
  const ControlPlane plane({.membership = Scene::two_hosts(),
                            .self = {.id = {9}, .host = "node-9"},
                            .endpoint = {.addresses = {loopback(deaf), loopback(mute)}, .listener = {}},
                            .key = TlsKey(kTestSecret, "job"),
                            .say =
                                [&](const std::string& text) {
                                  const std::lock_guard lock(mutex);
                                  said.push_back(text);
                                },
                            .before_wait_is_said = milliseconds(10)});
  for (int attempt = 0; attempt < 3; ++attempt) {  // an attempt at the other address is before each
    pollfd come = {listener.get(), POLLIN, 0};
    ASSERT_EQ(::poll(&come, 1, 60'000), 1);
    accept_one(listener.get());
  }
  const std::lock_guard lock(mutex);
  EXPECT_EQ(
      std::count_if(said.begin(), said.end(),
                    [](const std::string& text) { return text.starts_with("waits for the coordinator: "); }),
      1);
}

TEST(ControlPlane, ReportsReachTheHostsThatWatch) {
  Scene scene;
  scene.run_world();
  std::array<std::vector<Report>, 2> heard;
  for (size_t i = 0; i < 2; ++i) {
    scene.agents[i]->link.set_listener([&heard, i](const Report& report) { heard[i].push_back(report); });
  }
  EXPECT_FALSE(scene.agents[0]->state.watched());
  scene.agents[1]->state.set_watches(true);
  scene.until([&] { return scene.agents[0]->state.watched() && scene.agents[1]->state.watched(); },
              "both hosts are asked for reports");
  const std::string large(kMostReportBytes - 100, 'x');
  scene.agents[0]->link.send_report(std::string(kMostReportBytes, 'y'));  // too long: not sent
  scene.agents[0]->link.send_report(large);
  scene.agents[1]->link.send_report("its own");
  scene.until([&] { return heard[1].size() == 2; }, "the host that watches hears both");
  for (const Report& report : heard[1]) {
    EXPECT_EQ(report.text, report.agent == AgentId{1} ? large : "its own");
  }
  EXPECT_TRUE(heard[0].empty()) << "the other one does not watch";
  scene.agents[1]->state.set_watches(false);
  scene.until([&] { return !scene.agents[0]->state.watched(); }, "reports are not wanted any more");
}

TEST(ControlPlane, AllHostsHearAtOnceThatOneWatches) {
  MembershipOptions options = Scene::two_hosts();
  options.heartbeat_interval = std::chrono::hours(1);
  Scene scene(seconds(30), options);
  scene.run_world();
  Scene::Agent& watcher = *scene.agents[1];
  for (const bool watches : {true, false}) {
    EXPECT_TRUE(watcher.state.set_watches(watches));
    EXPECT_FALSE(watcher.state.set_watches(watches));
    watcher.link.serve(BootClock::now(), true);
    scene.until([&] { return scene.agents[0]->state.watched() == watches; }, "the other host hears of it");
  }
}

TEST(ControlPlane, AnAgentConnectsAgainAndHearsThatTheCoordinatorHasEnded) {
  MembershipOptions short_lease = Scene::two_hosts();
  short_lease.lease = seconds(2);
  short_lease.lost_after = seconds(3);
  Scene scene(seconds(30), short_lease);
  scene.run_world();
  scene.server.reset();
  AgentState& state = scene.agents[1]->state;
  const BootTime limit = BootClock::now() + seconds(60);
  while (state.phase() != AgentState::Phase::kEnded && BootClock::now() < limit) {
    scene.loop.run_once(BootClock::now() + milliseconds(20));
    scene.agents[1]->link.serve(BootClock::now(), false);
    if (state.advance(BootClock::now()) == AgentState::Action::kKill) {
      state.workers_ended(137, "", BootClock::now());
    }
  }
  EXPECT_EQ(state.reason(), "the coordinator has ended, and with it the job");
}

TEST(ControlPlane, ALinkStaysUpBetweenHeartbeatsThatAreFarApart) {
  MembershipOptions slow = Scene::two_hosts();
  slow.heartbeat_interval = seconds(5);
  slow.lease = seconds(15);
  slow.lost_after = seconds(20);
  Scene scene(seconds(30), slow);
  scene.run_world();
  AgentLink& link = scene.agents[1]->link;
  const BootTime now = BootClock::now();
  link.serve(now + seconds(14), false);
  EXPECT_EQ(link.trouble(), "");
  link.serve(now + seconds(16), false);
  EXPECT_EQ(link.trouble(), "no word on the connection at 127.0.0.1 port " + std::to_string(scene.port));
}

TEST(ControlPlane, ALinkStaysWithTheAddressThatHasAnswered) {
  Scene scene;
  scene.run_world();
  uint16_t deaf = 0;
  listen_on_loopback(deaf);  // and closed again: connections are refused
  AgentState state({.id = {9}, .host = "node-9"}, scene.membership, BootClock::now());
  AgentLink link(scene.loop, scene.key, {loopback(scene.port), loopback(deaf)}, scene.membership, state);
  const auto is_heard = [&] {
    return link.serve(BootClock::now(), false), state.lease_until() > BootClock::now();
  };
  scene.until(is_heard, "the agent is answered");
  const BootTime later = BootClock::now() + seconds(60);
  link.serve(later, false);  // as after a long silence
  EXPECT_EQ(link.trouble(), "no word on the connection at 127.0.0.1 port " + std::to_string(scene.port));
  EXPECT_EQ(reinterpret_cast<const sockaddr_in&>(link.coordinator().storage).sin_port, htons(scene.port));
}

TEST(ControlPlane, ALinkLooksForOtherAddressesUntilTheCoordinatorHasAnswered) {
  Scene scene;
  scene.run_world();
  uint16_t deaf = 0;
  listen_on_loopback(deaf);  // and closed again: connections are refused
  AgentState state({.id = {9}, .host = "node-9"}, scene.membership, BootClock::now());
  AgentLink link(scene.loop, scene.key, {loopback(deaf)}, scene.membership, state);
  const auto looks = std::make_shared<std::atomic<int>>(0);
  link.set_lookup([looks, port = scene.port] {
    ++*looks;
    return std::vector<SocketAddress>{loopback(port)};
  });
  const auto is_heard = [&] {
    return link.serve(BootClock::now(), false), state.lease_until() > BootClock::now();
  };
  scene.until(is_heard, "the agent is answered at the new address");
  const int before = *looks;
  EXPECT_GE(before, 1);
  link.serve(BootClock::now() + seconds(60), false);  // as after a long silence: it connects again
  const BootTime heard_until = state.lease_until();
  scene.until([&] { return is_heard() && state.lease_until() > heard_until; }, "the agent is answered again");
  EXPECT_EQ(*looks, before);
}

TEST(ControlPlane, ALinkThatIsFullAsksForNoTurnsToSendItsHeartbeat) {
  MembershipOptions slow = Scene::two_hosts();
  slow.heartbeat_interval = std::chrono::hours(1);
  Scene scene(seconds(30), slow);
  scene.run_world();
  AgentLink& link = scene.agents[1]->link;
  const BootTime now = BootClock::now();
  for (int i = 0; i < 64; ++i) {  // more than sockets hold, and the server reads nothing
    link.send_report(std::string(kMostReportBytes - 100, 'x'));
    link.serve(now, false);
  }
  const BootTime later = now + std::chrono::hours(2);
  EXPECT_GT(link.serve(later, false), later);
  EXPECT_EQ(link.trouble(), "");
}

TEST(ControlPlane, SaysWhereItListensWhereOtherHostsMayNotLook) {
  const Endpoint loopback = find_endpoint("127.0.0.1", 0, true);
  EXPECT_THAT(loopback.caution,
              HasSubstr("only agents of this host reach the coordinator at 127.0.0.1 port "));
  // TEST-NET-1 of RFC 5737: of no host.
  const Endpoint elsewhere = find_endpoint("192.0.2.1", 0, true);
  EXPECT_THAT(elsewhere.caution,
              HasSubstr("this host has no address of 192.0.2.1, and awaits the others at "));
}

TEST(ControlPlane, AFailureOfItsThreadEndsTheAgent) {
  uint16_t taken = 0;
  const UniqueFd other = listen_on_loopback(taken);
  Endpoint endpoint = find_endpoint("127.0.0.1", 0, true);
  ::setenv("LOCKSTEP_PORT_RANGE", std::to_string(taken).c_str(), 1);  // no port is left for the store
  std::string said;
  std::optional<ControlPlane::Task> task;
  {
    ControlPlane plane({.membership = {},
                        .self = {.id = {1}, .host = "node-1"},
                        .endpoint = std::move(endpoint),
                        .key = TlsKey(kTestSecret, "job"),
                        .say = [&](const std::string& text) { said += text; }});
    while (!task || task->kind != ControlPlane::Task::Kind::kEnd) {
      pollfd wait = {plane.fd(), POLLIN, 0};
      ASSERT_EQ(::poll(&wait, 1, 60000), 1);
      task = plane.take();
    }
  }
  ::unsetenv("LOCKSTEP_PORT_RANGE");
  EXPECT_EQ(task->exit_status, 1);
  EXPECT_THAT(said, HasSubstr("no port of LOCKSTEP_PORT_RANGE is free"));
}

TEST(ControlPlane, GoesOnWhereReportsCantBeMade) {
  std::promise<void> in_vain;
  ControlPlane plane({.membership = {},
                      .self = {.id = {1}, .host = "node-1"},
                      .endpoint = find_endpoint("127.0.0.1", 0, true),
                      .key = TlsKey(kTestSecret, "job"),
                      .say =
                          [&](const std::string& text) {
                            if (text.find("eventfd: ") != std::string::npos) in_vain.set_value();
                          },
                      .report = [](const KnownGeneration&) { return std::string("how its ranks do"); }});
  pollfd wait = {plane.fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&wait, 1, 60000), 1);
  EXPECT_EQ(plane.take()->kind, ControlPlane::Task::Kind::kStart);
  const UniqueFd top(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  {
    const FewDescriptors one(1);  // for the connection, and none for what tells of reports
    const SocketAddress address = abstract_address(WatchServer::own_name());
    ASSERT_EQ(::connect(top.get(), address.raw(), address.size), 0);
    const std::string greeting = encode(own_watch_greeting());
    ASSERT_EQ(::send(top.get(), greeting.data(), greeting.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(greeting.size()));
    ASSERT_EQ(in_vain.get_future().wait_for(seconds(60)), std::future_status::ready);
  }
  std::string heard;
  std::array<char, 256> bytes{};
  for (ssize_t got = 1; got > 0 && heard.find("how its ranks do") == std::string::npos;) {
    wait = {top.get(), POLLIN, 0};
    ASSERT_EQ(::poll(&wait, 1, 60000), 1);
    got = ::recv(top.get(), bytes.data(), bytes.size(), 0);
    heard.append(bytes.data(), static_cast<size_t>(std::max<ssize_t>(got, 0)));
  }
  EXPECT_THAT(heard, HasSubstr("how its ranks do")) << "once there was room";
  EXPECT_FALSE(plane.take()) << "the job runs on";
}

TEST(FrameReader, TakesMessagesOutOfAnyPieces) {
  const std::string bytes = framed("one") + framed(std::string(kMostMessageBytes, 'x')) + framed("three");
  for (const size_t piece : {size_t{1}, size_t{3}, size_t{1000}, bytes.size()}) {
    FrameReader reader;
    std::vector<std::string> messages;
    for (size_t at = 0; at < bytes.size(); at += piece) {
      reader.append(std::string_view(bytes).substr(at, piece));
      while (auto message = reader.next()) messages.push_back(*message);
    }
    ASSERT_EQ(messages.size(), 3U) << piece;
    EXPECT_EQ(messages[0], "one");
    EXPECT_EQ(messages[1].size(), kMostMessageBytes);
    EXPECT_EQ(messages[2], "three");
  }
  FrameReader reader;
  reader.append(framed(std::string(kMostMessageBytes + 1, 'x')));
  EXPECT_EQ(reader.next(), std::nullopt);
  EXPECT_TRUE(reader.broken());
}

}  // namespace
}  // namespace lockstep::launch::control_plane_test
