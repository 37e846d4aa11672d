#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>

#include <lockstep/launch/control_plane/event_loop.h>
#include <lockstep/launch/control_plane/forwarding.h>
#include <lockstep/launch/control_plane/listener.h>
#include <lockstep/launch/control_plane/tls.h>
#include <lockstep/launch/control_plane/tunnel_entrance.h>
#include <lockstep/launch/membership/coordinator.h>

namespace lockstep::launch {

/// The coordinator's end of all connections: a Coordinator with a port. Nothing of a connection counts before its
/// handshake has shown that the other end knows the key, and each has bounds:
/// - in time: a connection that has not said what it is for, an agent's not whose, after `greeting_time` is closed; of more
///   than `most_pending` such the oldest is;
/// - in number: of an agent's connections the last one stays, there are no more agents than Coordinator::kMostMembers, and of
///   each host of the generation no more than `most_streams_of_host` streams;
/// - in size: messages up to kMostMessageBytes, an agent's up to kMostReportBytes, streams up to Forwarding::kMostBytes
///   each way;
/// - in rate: an agent that sends more than kMostStatuses messages a second is cut off.
/// A stream of another generation than the one that runs is closed, and so is one that comes once its workers have to end.
/// Those that are there last until its hosts have stopped. One without the tunnel tells no generation, and is closed with the
/// one in which it came.
class CoordinatorServer : public EventHandler {
 public:
  static constexpr int kMostStatuses = 200;
  static constexpr size_t kMostOpenStreams = 4096;
  struct Options {
    MembershipOptions membership = {};
    std::array<uint8_t, 16> job = {};
    AgentId own = {};
    /// Makes the store of a generation, and ends the former one; its port on 127.0.0.1.
    std::function<uint16_t(uint64_t)> start_store = {};
    /// Is told each decision whose reason is new.
    std::function<void(const MembershipDecision&)> observe = {};
    /// Is told what other hosts report of workers that failed, and, once each, that a bound was reached, and from where
    /// connections have failed in their handshake.
    std::function<void(const std::string&)> report = {};
    /// Workers reach the store without the tunnel, at this server's own port, which this is: what does not begin as TLS does
    /// is passed on to the store. 0: by the tunnel alone.
    uint16_t open_port = 0;
    std::chrono::nanoseconds greeting_time = std::chrono::seconds(5);
    size_t most_pending = 256;
    size_t most_streams_of_host = TunnelEntrance::kMostStreams;
  };

  /// `listener` listens, and does not block.
  CoordinatorServer(EventLoop& loop, TlsKey key, UniqueFd listener, Options options);
  ~CoordinatorServer() override;

  void on_events(int fd, short events) override;
  /// What the clock asks for, and what has been asked for; returns when to call again at the latest. To be called
  /// after each turn of the loop.
  BootTime serve(BootTime now);
  /// All agents have ended their workers: nothing is left to do.
  bool done() const { return done_; }
  int exit_status() const { return coordinator_.exit_status(); }
  const Coordinator& coordinator() const { return coordinator_; }
  uint16_t store_port() const { return store_port_; }

 private:
  class Peer;
  void accept_some(BootTime now);
  void decide(BootTime now);
  void push_orders();
  void pass_on(const AgentId& agent, const std::string& report);
  void drop_closed();
  void begin_stream(Peer& peer);
  void become_only_connection(Peer& peer);
  /// `what`: lines of which it is the same are said once; empty: the text itself.
  void say_once(const std::string& text, const std::string& what = {});

  EventLoop& loop_;
  TlsKey key_;
  Listener listener_;
  Options options_;
  Coordinator coordinator_;
  std::list<std::unique_ptr<Peer>> pending_;  // in the order in which they came
  std::list<std::unique_ptr<Peer>> agents_;
  std::list<std::unique_ptr<Forwarding>> streams_;  // of the last generation
  std::map<AgentId, std::string> reports_;          // the newest of each that have come, encoded
  uint16_t store_port_ = 0;
  bool news_ = true;      // since the last decision
  bool watched_ = false;  // at the last decision
  BootTime look_again_at_ = {};
  std::string last_reason_;
  std::set<std::string> said_;  // by say_once()
  bool done_ = false;
};

}  // namespace lockstep::launch
