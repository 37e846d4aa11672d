#include <algorithm>
#include <array>
#include <deque>
#include <gmock/gmock.h>
#include <memory>
#include <random>
#include <string>
#include <sys/resource.h>
#include <sys/socket.h>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/base/boot_clock.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/control_plane/agent_link.h>
#include <lockstep/launch/control_plane/coordinator_server.h>
#include <lockstep/launch/control_plane/event_loop.h>
#include <lockstep/launch/control_plane/frames.h>
#include <lockstep/launch/control_plane/greeting.h>
#include <lockstep/launch/control_plane/sockets.h>
#include <lockstep/launch/control_plane/testing/scene.h>
#include <lockstep/launch/control_plane/tls.h>
#include <lockstep/rendezvous/protocol_version.h>

namespace lockstep::launch::strangers_test {
namespace {

using namespace testing;
using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Strangers, AWrongSecretOrAnotherJobIsNoHandshake) {
  Scene scene;
  scene.run_world();
  const std::string before = scene.state();
  for (const TlsKey& key : {TlsKey("another secret, as long as the true", "job"), TlsKey(kTestSecret, "jab"),
                            TlsKey("", ""), TlsKey(kTestSecret, "job", "Lockstep 9.9\033")}) {
    Client client(scene, key);
    EXPECT_FALSE(client.open());
  }
  scene.agents.push_back(std::make_unique<Scene::Agent>(scene, 3, TlsKey("wrong", "job")));
  scene.until([&] { return !scene.agents.back()->link.trouble().empty(); }, "the agent hears why");
  EXPECT_THAT(
      scene.agents.back()->link.trouble(),
      HasSubstr("have the same secret, --rdzv-id and version of Lockstep? This one is " + own_version()));
  EXPECT_THAT(scene.said, ElementsAre(HasSubstr("from 127.0.0.1 has failed in the TLS handshake; if that is"),
                                      AllOf(HasSubstr("it says that it is 'Lockstep 9.9?'"),
                                            HasSubstr("this coordinator is '" + own_version()),
                                            HasSubstr("install the same Lockstep on all hosts"))));
  scene.agents.pop_back();
  scene.expect_unharmed(before);
}

TEST(Strangers, AServerWithoutTheSecretIsNoCoordinator) {
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

TEST(Strangers, BytesAtRandomChangeNothing) {
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

TEST(Strangers, AConnectionThatWasRecordedIsOfNoUseToAnother) {
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

TEST(Strangers, TenThousandConnectionsThatSayNothingChangeNothing) {
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

TEST(Strangers, WhatIsNotAMessageClosesTheConnectionOfOneWhoKnowsTheSecret) {
  Scene scene;
  scene.run_world();
  const std::string before = scene.state();
  const std::string agent = framed(encode(Greeting{}));
  const std::string status = encode(scene.status_of(2));
  const std::vector<std::string> bad = {
      std::string(4, '\0'),                // no length
      std::string("\xff\xff\xff\x7f", 4),  // too long
      framed("X"),                         // no greeting
      framed(encode(Greeting{}) + "x"),    // too long a one
      agent + framed("not a status"),
      agent + framed(status + "x"),
      agent + framed(status.substr(1)),
      agent + framed(encode(Order{})),
      agent + framed(status) + framed(encode(scene.status_of(1))),    // another agent's name
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

TEST(Strangers, AnAgentThatDoesNotSayWhoItIsIsClosedInTime) {
  Scene scene(std::chrono::seconds(2));  // in which its handshake ends on a busy machine, too
  scene.run_world();
  const std::string before = scene.state();
  Client client(scene, scene.key);
  ASSERT_TRUE(client.open());
  client.send(framed(encode(Greeting{})));
  client.expect_closed();
  scene.expect_unharmed(before);
}

TEST(Strangers, AgentsThatDoNotSayWhoTheyAreGiveWayToOthers) {
  Scene scene;
  scene.run_world();
  const std::string before = scene.state();
  std::deque<Client> silent;
  for (size_t i = 0; i <= CoordinatorServer::Options().most_pending; ++i) {
    silent.emplace_back(scene, scene.key);
    ASSERT_TRUE(silent.back().open());
    silent.back().send(framed(encode(Greeting{})));
  }
  silent.front().expect_closed();
  EXPECT_THAT(scene.said, ElementsAre(HasSubstr("256 connections to the coordinator's port have not said")));
  scene.expect_unharmed(before);
}

TEST(Strangers, OfAnAgentsConnectionsTheLastOneStays) {
  Scene scene;
  scene.run_world();
  std::deque<Client> clients;
  for (int i = 1; i <= 3; ++i) {
    clients.emplace_back(scene, scene.key);
    ASSERT_TRUE(clients.back().open());
    clients.back().send(framed(encode(Greeting{})) + framed(encode(scene.status_of(5, i))));
    if (i > 1) clients[clients.size() - 2].expect_closed();
  }
  scene.until([&] { return scene.server->coordinator().members().at(2).status.sent_at == 3; },
              "the last status is heard");
  EXPECT_TRUE(scene.server->coordinator().members().at(2).connected);
}

TEST(Strangers, AConnectionWhoseFirstStatusIsLateEndsNoNewerOne) {
  Scene scene;
  scene.run_world();
  Client late(scene, scene.key);
  ASSERT_TRUE(late.open());
  late.send(framed(encode(Greeting{})));
  Client newer(scene, scene.key);
  ASSERT_TRUE(newer.open());
  newer.send(framed(encode(Greeting{})) + framed(encode(scene.status_of(5, 2))));
  const auto& members = scene.server->coordinator().members();
  scene.until([&] { return members.size() == 3; }, "the newer connection's status is heard");
  late.send(framed(encode(scene.status_of(5, 1))));
  late.expect_closed();
  newer.send(framed(encode(scene.status_of(5, 3))));
  scene.until([&] { return members[2].status.sent_at == 3; }, "the newer connection is still heard");
  EXPECT_TRUE(members[2].connected);
}

TEST(Strangers, AnAgentThatHasGoneAtOnceIsNotConnected) {
  Scene scene;
  scene.run_world();
  {
    Client client(scene, scene.key);
    ASSERT_TRUE(client.open());
    client.send(framed(encode(Greeting{})) + framed(encode(scene.status_of(5))));
  }
  const auto& members = scene.server->coordinator().members();
  scene.until([&] { return members.size() == 3 && !members[2].connected; }, "it has come and gone");
}

TEST(Strangers, HostsHaveNoMoreStreamsThanTheyMay) {
  Scene scene(std::chrono::seconds(30), Scene::two_hosts(), false, /*streams_of_host=*/1);
  scene.run_world();
  const std::string before = scene.state();
  std::deque<Client> clients;
  std::vector<UniqueFd> at_store;
  for (int i = 0; i < 3; ++i) {
    clients.emplace_back(scene, scene.key);
    ASSERT_TRUE(clients.back().open());
    clients.back().send(framed(encode(Greeting{.kind = Greeting::Kind::kStream, .generation = 1})));
    if (i < 2) at_store.push_back(scene.accept_at_store());
  }
  clients.back().expect_closed();
  EXPECT_FALSE(scene.store_was_reached());
  EXPECT_THAT(scene.said, ElementsAre(HasSubstr("2 connections to the store, and more are refused")));
  scene.expect_unharmed(before);
}

TEST(Strangers, AnAgentThatSendsTooMuchIsCutOff) {
  Scene scene;
  scene.run_world();
  Client client(scene, scene.key);
  ASSERT_TRUE(client.open());
  std::string bytes = framed(encode(Greeting{}));
  for (int i = 1; i <= 4 * CoordinatorServer::kMostStatuses; ++i) {
    bytes += framed(encode(scene.status_of(5, i)));
  }
  client.send(bytes);
  client.expect_closed();
}

}  // namespace
}  // namespace lockstep::launch::strangers_test
