#include <array>
#include <chrono>
#include <random>
#include <string>
#include <string_view>
#include <sys/socket.h>

#include <gtest/gtest.h>

#include <lockstep/base/boot_clock.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/control_plane/sockets.h>
#include <lockstep/launch/control_plane/testing/scene.h>
#include <lockstep/launch/control_plane/tunnel_entrance.h>

namespace lockstep::launch::tunnel_test {
namespace {

using namespace testing;
using std::chrono::seconds;

TEST(Tunnel, AStreamCarriesBytesBothWays) {
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

TEST(Tunnel, ASlowReaderSlowsItsWriterDownAndLosesNothing) {
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

TEST(Tunnel, TheEndOfOneSideIsTheEndOfTheOther) {
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

TEST(Tunnel, AStreamOfAnotherGenerationDoesNotReachTheStore) {
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

TEST(Tunnel, AStreamLastsUntilTheHostsOfItsGenerationHaveStopped) {
  MembershipOptions options = Scene::two_hosts();
  options.max_restarts = 1;
  options.reaction_time = seconds(0);
  Scene scene(seconds(30), options);
  scene.run_world();
  TunnelEntrance entrance(scene.loop, scene.key, loopback(scene.port), 1);
  const UniqueFd worker = begin_connect(loopback(entrance.port()));
  const UniqueFd store = scene.accept_at_store();
  AgentState& saving = scene.agents[1]->state;
  scene.agents[0]->state.workers_ended(1, "failed", BootClock::now());
  scene.until([&] { return saving.phase() == AgentState::Phase::kStopping; }, "the other host has to stop");
  send_plain(scene, worker.get(), "saved?");
  EXPECT_EQ(receive_plain(scene, store.get(), 6), "saved?");
  send_plain(scene, store.get(), "saved");
  EXPECT_EQ(receive_plain(scene, worker.get(), 5), "saved");
  const UniqueFd late = begin_connect(loopback(entrance.port()));
  expect_plain_closed(scene, late.get());
  EXPECT_EQ(scene.server->coordinator().world().generation, 1U);
  saving.workers_ended(143, "", BootClock::now());
  expect_plain_closed(scene, worker.get());
  expect_plain_closed(scene, store.get());
  EXPECT_EQ(scene.server->coordinator().world().generation, 2U);
}

TEST(Tunnel, WithoutTheTunnelTheStoreIsAtTheSamePort) {
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

}  // namespace
}  // namespace lockstep::launch::tunnel_test
