#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <memory>
#include <random>
#include <signal.h>
#include <stdexcept>
#include <string>
#include <string_view>
#include <sys/socket.h>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/base/boot_clock.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/control_plane/agent_link.h>
#include <lockstep/launch/control_plane/coordinator_server.h>
#include <lockstep/launch/control_plane/event_loop.h>
#include <lockstep/launch/control_plane/sockets.h>
#include <lockstep/launch/control_plane/tls.h>

/// What the tests of the control plane have in common.
namespace lockstep::launch::testing {

inline constexpr const char* kTestSecret = "0123456789abcdef0123456789abcdef";

inline SocketAddress loopback(uint16_t port) {
  std::string why;
  return addresses_of("127.0.0.1", port, why).at(0);
}

/// A coordinator for two hosts, and everything else that happens, in one thread and one loop.
class Scene {
 public:
  explicit Scene(std::chrono::nanoseconds greeting_time = std::chrono::seconds(30),
                 MembershipOptions chosen = two_hosts(), bool is_open = false,
                 size_t streams_of_host = TunnelEntrance::kMostStreams)
      : membership(chosen), listener_(listen_on_loopback(port)), store_(listen_on_loopback(store_port)) {
    ::signal(SIGPIPE, SIG_IGN);
    CoordinatorServer::Options options;
    options.membership = membership;
    options.job = {7};
    options.own = {1};
    options.greeting_time = greeting_time;
    options.most_streams_of_host = streams_of_host;
    options.report = [this](const std::string& text) { said.push_back(text); };
    if (is_open) options.open_port = port;
    options.start_store = [this](uint64_t) { return store_port; };
    server = std::make_unique<CoordinatorServer>(loop, key, std::move(listener_), std::move(options));
  }

  void turn() {
    loop.run_once(BootClock::now() + std::chrono::milliseconds(20));
    server->serve(BootClock::now());
    for (auto& agent : agents) {
      agent->state.advance(BootClock::now());
      agent->link.serve(BootClock::now(), false);
    }
  }
  /// Turns until it holds; fails where it does not in time.
  template <typename Condition>
  void until(Condition condition, const char* what) {
    const BootTime limit = BootClock::now() + std::chrono::seconds(60);
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
  /// One of an agent that there may be.
  Status status_of(uint8_t number, int64_t sent_at = 1) const {
    return {.id = {number},
            .sent_at = sent_at,
            .host = "node-" + std::to_string(number),
            .options = common_options(membership)};
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
    options.heartbeat_interval = std::chrono::milliseconds(50);
    return options;
  }

  MembershipOptions membership;
  EventLoop loop;
  TlsKey key{kTestSecret, "job"};
  uint16_t port = 0;
  uint16_t store_port = 0;
  std::vector<std::string> said;  // by the coordinator

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
inline void expect_plain_closed(Scene& scene, int socket) {
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

inline void send_plain(Scene& scene, int socket, std::string_view bytes) {
  scene.until(
      [&] {
        const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent > 0) bytes.remove_prefix(static_cast<size_t>(sent));
        return bytes.empty() || (sent < 0 && errno != EAGAIN);
      },
      "bytes leave");
}

inline std::string receive_plain(Scene& scene, int socket, size_t size) {
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

inline std::string random_bytes_of(std::mt19937_64& random, size_t size) {
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

}  // namespace lockstep::launch::testing
