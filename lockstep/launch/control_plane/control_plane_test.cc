#include <array>
#include <deque>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <memory>
#include <netinet/in.h>
#include <optional>
#include <poll.h>
#include <random>
#include <signal.h>
#include <stdexcept>
#include <stdlib.h>
#include <string>
#include <sys/resource.h>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/launch/control_plane/agent_link.h>
#include <lockstep/launch/control_plane/control_plane.h>
#include <lockstep/launch/control_plane/coordinator_server.h>
#include <lockstep/launch/control_plane/frames.h>
#include <lockstep/launch/control_plane/greeting.h>
#include <lockstep/launch/control_plane/sockets.h>
#include <lockstep/launch/control_plane/tunnel_entrance.h>

namespace lockstep::launch::control_plane_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr const char* kTestSecret = "0123456789abcdef0123456789abcdef";

PeerAddress loopback(uint16_t port) {
  std::string why;
  return addresses_of("127.0.0.1", port, why).at(0);
}

/// A coordinator for two hosts, and everything else that happens, in one thread and one loop.
class Scene {
 public:
  explicit Scene(std::chrono::nanoseconds greeting_time = seconds(30), MembershipOptions chosen = two_hosts(),
                 bool is_open = false)
      : membership(chosen), listener_(listen_on_loopback(port)), store_(listen_on_loopback(store_port)) {
    ::signal(SIGPIPE, SIG_IGN);
    CoordinatorServer::Options options;
    options.membership = membership;
    options.job = {7};
    options.own = {1};
    options.greeting_time = greeting_time;
    if (is_open) options.open_port = port;
    options.start_store = [this](uint64_t) { return store_port; };
    server = std::make_unique<CoordinatorServer>(loop, key, std::move(listener_), std::move(options));
  }

  void turn() {
    loop.run_once(BootClock::now() + milliseconds(20));
    server->serve(BootClock::now());
    for (auto& agent : agents) {
      agent->state.advance(BootClock::now());
      agent->link.serve(BootClock::now(), false);
    }
  }
  /// Turns until it holds; fails where it does not in time.
  template <typename Condition>
  void until(Condition condition, const char* what) {
    const BootTime limit = BootClock::now() + seconds(60);
    while (!condition()) {
      if (BootClock::now() > limit) {
        std::string text = std::string("in vain: ") + what + "; the server: " + state();
        for (const auto& agent : agents) text += "; " + agent->state.reason() + ", " + agent->link.trouble();
        throw std::runtime_error(text);
      }
      turn();
    }
  }

  struct Agent {
    Agent(Scene& scene, uint8_t number, const TlsKey& key)
        : state({.id = {number}, .host = "node-" + std::to_string(number)}, scene.membership,
                BootClock::now()),
          link(scene.loop, key, {loopback(scene.port)}, scene.membership, state) {}
    AgentState state;
    AgentLink link;
  };
  Agent& add_agent(uint8_t number) {
    agents.push_back(std::make_unique<Agent>(*this, number, key));
    return *agents.back();
  }
  /// Both agents run generation 1.
  void run_world() {
    add_agent(1);
    add_agent(2);
    until(
        [&] { return agents[0]->state.place().generation == 1 && agents[1]->state.place().generation == 1; },
        "both hosts run");
  }
  /// What strangers must not change.
  std::string state() const {
    std::string text = std::to_string(static_cast<int>(server->coordinator().world().phase)) + " " +
                       std::to_string(server->coordinator().world().order);
    for (const Member& member : server->coordinator().members()) {
      text += " " + member.status.host + (member.connected ? "+" : "-") + std::to_string(member.losses);
    }
    return text;
  }
  /// The job goes on as before: both agents are still heard.
  void expect_unharmed(const std::string& before) {
    const BootTime now = BootClock::now();
    until(
        [&] {
          const auto& members = server->coordinator().members();
          return members.at(0).heard_at > now && members.at(1).heard_at > now;
        },
        "both agents are heard again");
    EXPECT_EQ(state(), before);
  }

  static MembershipOptions two_hosts() {
    MembershipOptions options;
    options.min_hosts = 2;
    options.max_hosts = 2;
    options.heartbeat_interval = milliseconds(50);
    return options;
  }

  MembershipOptions membership;
  EventLoop loop;
  TlsKey key{kTestSecret, "job"};
  uint16_t port = 0;
  uint16_t store_port = 0;

 private:
  UniqueFd listener_;

 public:
  std::unique_ptr<CoordinatorServer> server;
  std::vector<std::unique_ptr<Agent>> agents;
  /// The next connection to the store.
  UniqueFd accept_at_store() {
    UniqueFd socket;
    until([&] { return static_cast<bool>(socket = accept_one(store_.get())); },
          "a stream comes to the store");
    return socket;
  }
  bool store_was_reached() const { return static_cast<bool>(accept_one(store_.get())); }

 private:
  UniqueFd store_;
};

/// A TLS client by hand.
class Client {
 public:
  Client(Scene& scene, const TlsKey& key)
      : scene_(scene), tls_(key, begin_connect(loopback(scene.port)), TlsConnection::Side::kClient) {}

  /// Whether the handshake succeeds.
  bool open() {
    scene_.until([&] { return step(), tls_.phase() != TlsConnection::Phase::kHandshake; },
                 "a handshake ends");
    return tls_.phase() == TlsConnection::Phase::kOpen;
  }
  void send(std::string bytes) {
    scene_.until(
        [&] {
          bytes.erase(0, tls_.write(bytes));
          return bytes.empty() || tls_.phase() == TlsConnection::Phase::kClosed;
        },
        "bytes leave");
  }
  void expect_closed() {
    std::array<char, 4096> buffer;
    scene_.until(
        [&] {
          while (tls_.read(buffer) > 0) {
          }
          return tls_.phase() == TlsConnection::Phase::kClosed;
        },
        "the connection closes");
  }

 private:
  void step() { tls_.advance_handshake(); }

  Scene& scene_;
  TlsConnection tls_;
};

/// Reads from a socket that does not block until it closes.
void expect_plain_closed(Scene& scene, int socket) {
  std::array<char, 4096> buffer;
  scene.until(
      [&] {
        ssize_t got = 0;
        while ((got = ::recv(socket, buffer.data(), buffer.size(), MSG_DONTWAIT)) > 0) {
        }
        return got == 0 || (errno != EAGAIN && errno != ENOTCONN);
      },
      "the connection closes");
}

void send_plain(Scene& scene, int socket, std::string_view bytes) {
  scene.until(
      [&] {
        const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent > 0) bytes.remove_prefix(static_cast<size_t>(sent));
        return bytes.empty() || (sent < 0 && errno != EAGAIN);
      },
      "bytes leave");
}

std::string receive_plain(Scene& scene, int socket, size_t size) {
  std::string text;
  std::array<char, 65536> buffer;
  scene.until(
      [&] {
        const ssize_t got =
            ::recv(socket, buffer.data(), std::min(buffer.size(), size - text.size()), MSG_DONTWAIT);
        if (got > 0) text.append(buffer.data(), static_cast<size_t>(got));
        return text.size() == size || got == 0;
      },
      "bytes come");
  return text;
}

std::string random_bytes_of(std::mt19937_64& random, size_t size) {
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

TEST(ControlPlane, TwoAgentsAndACoordinatorRunAWorldAndEndIt) {
  Scene scene;
  scene.run_world();
  EXPECT_EQ(scene.agents[0]->state.place(), (Place{1, 0, 2, 0, 2}));
  EXPECT_EQ(scene.agents[1]->state.place(), (Place{1, 1, 2, 1, 2}));
  EXPECT_EQ(scene.agents[0]->link.local_address(), "127.0.0.1");
  for (auto& agent : scene.agents) agent->state.workers_ended(0, "", BootClock::now());
  scene.until([&] { return scene.server->done(); }, "the job ends");
  EXPECT_EQ(scene.server->exit_status(), 0);
  for (auto& agent : scene.agents) EXPECT_EQ(agent->state.phase(), AgentState::Phase::kEnded);
}

TEST(ControlPlane, AWrongSecretOrAnotherJobIsNoHandshake) {
  Scene scene;
  scene.run_world();
  const std::string before = scene.state();
  for (const TlsKey& key :
       {TlsKey("another secret, as long as the true", "job"), TlsKey(kTestSecret, "jab"), TlsKey("", "")}) {
    Client client(scene, key);
    EXPECT_FALSE(client.open());
  }
  scene.agents.push_back(std::make_unique<Scene::Agent>(scene, 3, TlsKey("wrong", "job")));
  scene.until([&] { return !scene.agents.back()->link.trouble().empty(); }, "the agent hears why");
  EXPECT_THAT(scene.agents.back()->link.trouble(), HasSubstr("have the same secret and --rdzv-id?"));
  scene.agents.pop_back();
  scene.expect_unharmed(before);
}

TEST(ControlPlane, AServerWithoutTheSecretIsNoCoordinator) {
  Scene scene;
  EventLoop& loop = scene.loop;
  uint16_t port = 0;
  const UniqueFd listener = listen_on_loopback(port);
  TlsConnection client(scene.key, begin_connect(loopback(port)), TlsConnection::Side::kClient);
  UniqueFd accepted;
  scene.until([&] { return static_cast<bool>(accepted = accept_one(listener.get())); }, "it connects");
  TlsConnection server(TlsKey("guess", "job"), std::move(accepted), TlsConnection::Side::kServer);
  scene.until(
      [&] {
        loop.run_once(BootClock::now());
        client.advance_handshake();
        server.advance_handshake();
        return client.phase() != TlsConnection::Phase::kHandshake;
      },
      "a handshake ends");
  EXPECT_EQ(client.phase(), TlsConnection::Phase::kClosed);
}

TEST(ControlPlane, BytesAtRandomChangeNothing) {
  Scene scene(milliseconds(100));  // some bytes are the beginning of something
  scene.run_world();
  const std::string before = scene.state();
  std::mt19937_64 random(1);
  for (int i = 0; i < 300; ++i) {
    const UniqueFd socket = begin_connect(loopback(scene.port));
    std::string bytes = random_bytes_of(random, 1 + random() % 2000);
    if (i % 2 == 0) bytes = "\x16\x03\x01" + bytes;  // as a TLS record begins
    send_plain(scene, socket.get(), bytes);
    if (i % 3 == 0) ::shutdown(socket.get(), SHUT_WR);
    if (i % 3 != 2) expect_plain_closed(scene, socket.get());
  }
  scene.expect_unharmed(before);
}

TEST(ControlPlane, AConnectionThatWasRecordedIsOfNoUseToAnother) {
  Scene scene;
  scene.run_world();
  // A third agent speaks through one who writes down all that passes.
  uint16_t proxy_port = 0;
  const UniqueFd proxy = listen_on_loopback(proxy_port);
  AgentState state({.id = {9}, .host = "node-9"}, scene.membership, BootClock::now());
  auto link = std::make_unique<AgentLink>(scene.loop, scene.key, std::vector{loopback(proxy_port)},
                                          scene.membership, state);
  UniqueFd near;
  UniqueFd far = begin_connect(loopback(scene.port));
  std::string recorded;
  const auto pass = [&](int from, int to, std::string* copy) {
    std::array<char, 4096> buffer;
    const ssize_t got = ::recv(from, buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (got <= 0) return;
    if (copy != nullptr) copy->append(buffer.data(), static_cast<size_t>(got));
    send_plain(scene, to, {buffer.data(), static_cast<size_t>(got)});
  };
  scene.until(
      [&] {
        link->serve(BootClock::now(), false);
        if (!near) near = accept_one(proxy.get());
        if (near) {
          pass(near.get(), far.get(), &recorded);
          pass(far.get(), near.get(), nullptr);
        }
        return scene.server->coordinator().members().size() == 3;
      },
      "the third agent joins");
  link.reset();
  near.reset();
  far.reset();
  scene.until([&] { return !scene.server->coordinator().members()[2].connected; }, "it is gone");
  const auto heard_at = scene.server->coordinator().members()[2].heard_at;
  const std::string before = scene.state();
  const UniqueFd replay = begin_connect(loopback(scene.port));
  send_plain(scene, replay.get(), recorded);
  expect_plain_closed(scene, replay.get());
  scene.expect_unharmed(before);
  EXPECT_EQ(scene.server->coordinator().members()[2].heard_at, heard_at);
}

TEST(ControlPlane, TenThousandConnectionsThatSayNothingChangeNothing) {
  Scene scene;
  scene.run_world();
  const std::string before = scene.state();
  std::deque<UniqueFd> open;  // as many as half of this process's descriptors, for the server has as many
  rlimit limit = {};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const size_t most = std::min<size_t>(limit.rlim_cur / 2 - 100, 2000);
  for (int i = 0; i < 10000; ++i) {
    if (open.size() >= most) open.pop_front();
    UniqueFd socket = begin_connect(loopback(scene.port));
    ASSERT_TRUE(socket);
    if (i % 2 == 0) ::send(socket.get(), "\x16\x03\x01\x02", 4, MSG_DONTWAIT | MSG_NOSIGNAL);
    open.push_back(std::move(socket));
    if (i % 16 == 0) scene.turn();
  }
  scene.expect_unharmed(before);
  // Another agent still gets through.
  scene.add_agent(3);
  scene.until([&] { return scene.server->coordinator().members().size() == 3; }, "a third agent joins");
}

TEST(ControlPlane, WhatIsNotAMessageClosesTheConnectionOfOneWhoKnowsTheSecret) {
  Scene scene;
  scene.run_world();
  const std::string before = scene.state();
  const std::string agent = framed(encode(Greeting{}));
  const std::string status = encode(Status{.id = {2}, .sent_at = 1, .host = "node-2"});
  const std::vector<std::string> bad = {
      std::string(4, '\0'),                // no length
      std::string("\xff\xff\xff\x7f", 4),  // too long
      framed("X"),                         // no greeting
      framed(encode(Greeting{}) + "x"),    // too long a one
      agent + framed("not a status"),
      agent + framed(status + "x"),
      agent + framed(status.substr(1)),
      agent + framed(encode(Order{})),
      agent + framed(status) + framed(encode(Status{.id = {1}, .sent_at = 1})),  // another agent's name
      agent + framed(encode(Report{.agent = {2}})),                   // before it has said who it is
      agent + framed(status) + framed(encode(Report{.agent = {1}})),  // another agent's report
  };
  for (const std::string& bytes : bad) {
    Client client(scene, scene.key);
    ASSERT_TRUE(client.open());
    client.send(bytes);
    client.expect_closed();
  }
  scene.expect_unharmed(before);
}

TEST(ControlPlane, AnAgentThatSendsTooMuchIsCutOff) {
  Scene scene;
  scene.run_world();
  Client client(scene, scene.key);
  ASSERT_TRUE(client.open());
  std::string bytes = framed(encode(Greeting{}));
  for (int i = 1; i <= 4 * CoordinatorServer::kMostStatuses; ++i) {
    bytes += framed(encode(Status{.id = {5}, .sent_at = i, .host = "node-5"}));
  }
  client.send(bytes);
  client.expect_closed();
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

TEST(ControlPlane, AStreamCarriesBytesBothWays) {
  Scene scene;
  scene.run_world();
  TunnelEntrance entrance(scene.loop, scene.key, loopback(scene.port), 1);
  const UniqueFd worker = begin_connect(loopback(entrance.port()));
  const UniqueFd store = scene.accept_at_store();
  std::mt19937_64 random(2);
  // More than both tunnels' ends and the kernel's buffers hold at once.
  const std::string there = random_bytes_of(random, 8 << 20);
  const std::string back = random_bytes_of(random, 3 << 20);
  std::string_view left(there);
  std::string arrived;
  std::array<char, 65536> buffer;
  scene.until(
      [&] {
        const ssize_t sent = ::send(worker.get(), left.data(), left.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent > 0) left.remove_prefix(static_cast<size_t>(sent));
        const ssize_t got = ::recv(store.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
        if (got > 0) arrived.append(buffer.data(), static_cast<size_t>(got));
        return arrived.size() == there.size();
      },
      "all bytes come");
  EXPECT_TRUE(arrived == there);
  std::string_view reply(back);
  std::string answered;
  scene.until(
      [&] {
        const ssize_t sent = ::send(store.get(), reply.data(), reply.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent > 0) reply.remove_prefix(static_cast<size_t>(sent));
        const ssize_t got = ::recv(worker.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
        if (got > 0) answered.append(buffer.data(), static_cast<size_t>(got));
        return answered.size() == back.size();
      },
      "all bytes come back");
  EXPECT_TRUE(answered == back);
}

TEST(ControlPlane, ASlowReaderSlowsItsWriterDownAndLosesNothing) {
  Scene scene;
  scene.run_world();
  TunnelEntrance entrance(scene.loop, scene.key, loopback(scene.port), 1);
  const UniqueFd worker = begin_connect(loopback(entrance.port()));
  const UniqueFd store = scene.accept_at_store();
  // Nothing reads: the writer is stopped after what the buffers hold.
  const std::string chunk(65536, 'x');
  size_t taken = 0;
  int turns_without = 0;
  scene.until(
      [&] {
        const ssize_t sent = ::send(worker.get(), chunk.data(), chunk.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        turns_without = sent > 0 ? 0 : turns_without + 1;
        taken += sent > 0 ? static_cast<size_t>(sent) : 0;
        return turns_without == 20 || taken > size_t{256} << 20;
      },
      "the writer is stopped");
  EXPECT_LT(taken, size_t{64} << 20);
  scene.expect_unharmed(scene.state());
  EXPECT_EQ(receive_plain(scene, store.get(), taken), std::string(taken, 'x'));
}

TEST(ControlPlane, TheEndOfOneSideIsTheEndOfTheOther) {
  Scene scene;
  scene.run_world();
  TunnelEntrance entrance(scene.loop, scene.key, loopback(scene.port), 1);
  UniqueFd worker = begin_connect(loopback(entrance.port()));
  UniqueFd store = scene.accept_at_store();
  send_plain(scene, worker.get(), "last words");
  worker.reset();
  EXPECT_EQ(receive_plain(scene, store.get(), 10), "last words");
  expect_plain_closed(scene, store.get());

  worker = begin_connect(loopback(entrance.port()));
  store = scene.accept_at_store();
  store.reset();
  expect_plain_closed(scene, worker.get());
}

TEST(ControlPlane, AStreamOfAnotherGenerationDoesNotReachTheStore) {
  Scene scene;
  scene.run_world();
  for (const uint64_t generation : {uint64_t{0}, uint64_t{2}, ~uint64_t{0}}) {
    TunnelEntrance entrance(scene.loop, scene.key, loopback(scene.port), generation);
    const UniqueFd worker = begin_connect(loopback(entrance.port()));
    send_plain(scene, worker.get(), "hello");
    expect_plain_closed(scene, worker.get());
  }
  EXPECT_FALSE(scene.store_was_reached());
  // The one that runs ends with its generation.
  TunnelEntrance entrance(scene.loop, scene.key, loopback(scene.port), 1);
  const UniqueFd worker = begin_connect(loopback(entrance.port()));
  const UniqueFd store = scene.accept_at_store();
  for (auto& agent : scene.agents) agent->state.workers_ended(1, "failed", BootClock::now());
  expect_plain_closed(scene, worker.get());
  expect_plain_closed(scene, store.get());
}

TEST(ControlPlane, WithoutTheTunnelTheStoreIsAtTheSamePort) {
  Scene scene(seconds(30), Scene::two_hosts(), /*is_open=*/true);
  const UniqueFd early = begin_connect(loopback(scene.port));
  send_plain(scene, early.get(), std::string("\0hello", 6));
  expect_plain_closed(scene, early.get());  // no generation runs
  EXPECT_FALSE(scene.store_was_reached());
  scene.run_world();
  EXPECT_EQ(scene.agents[0]->state.place().store_port, scene.port);
  EXPECT_EQ(scene.agents[1]->state.place().store_port, scene.port);
  const UniqueFd worker = begin_connect(loopback(scene.port));
  const std::string there = std::string(1, '\0') + std::string(1 << 18, 'x');
  send_plain(scene, worker.get(), there.substr(0, 100));
  UniqueFd store = scene.accept_at_store();
  send_plain(scene, worker.get(), there.substr(100));
  EXPECT_EQ(receive_plain(scene, store.get(), there.size()), there);
  send_plain(scene, store.get(), "answer");
  EXPECT_EQ(receive_plain(scene, worker.get(), 6), "answer");
  scene.expect_unharmed(scene.state());
  // Neither one that says nothing nor one that begins as TLS does, and is none, reaches the store.
  const UniqueFd silent = begin_connect(loopback(scene.port));
  const UniqueFd wrong = begin_connect(loopback(scene.port));
  send_plain(scene, wrong.get(), "\x16 no record of TLS");
  expect_plain_closed(scene, wrong.get());
  EXPECT_FALSE(scene.store_was_reached());
  // It ends with its generation.
  for (auto& agent : scene.agents) agent->state.workers_ended(1, "failed", BootClock::now());
  expect_plain_closed(scene, worker.get());
  expect_plain_closed(scene, store.get());
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
  EXPECT_EQ(link.trouble(), "no word on the connection");
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
  EXPECT_EQ(link.trouble(), "no word on the connection");
  EXPECT_EQ(reinterpret_cast<const sockaddr_in&>(link.coordinator().storage).sin_port, htons(scene.port));
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
