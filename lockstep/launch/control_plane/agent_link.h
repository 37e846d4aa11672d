#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/launch/control_plane/event_loop.h>
#include <lockstep/launch/control_plane/frames.h>
#include <lockstep/launch/control_plane/name_lookup.h>
#include <lockstep/launch/control_plane/sockets.h>
#include <lockstep/launch/control_plane/tls.h>
#include <lockstep/launch/membership/agent_state.h>

namespace lockstep::launch {

/// An agent's connection to the coordinator: statuses one way, orders the other. Makes a new one when it closes, and
/// when nothing has come for a while, for after a cut TCP waits longer and longer with what it repeats.
class AgentLink : public EventHandler {
 public:
  static constexpr std::chrono::milliseconds kPause{200};  // between two attempts
  static constexpr std::chrono::seconds kBetweenLookups{2};

  /// `addresses` are tried in turn, and again, until the coordinator has answered at one. `state` lives as long as this
  /// object.
  AgentLink(EventLoop& loop, TlsKey key, std::vector<SocketAddress> addresses,
            const MembershipOptions& options, AgentState& state);
  ~AgentLink() override;

  void on_events(int fd, short events) override;
  /// Connects, sends a status where one is due, or where `news` says that it has changed. Returns when to call again
  /// at the latest. To be called after each turn of the loop.
  BootTime serve(BootTime now, bool news);
  /// How to look the coordinator's addresses up again, which may block, on another thread: a name may have an old address
  /// when the job starts. It is done after each round of attempts until the coordinator has answered.
  void set_lookup(std::function<std::vector<SocketAddress>()> find) { lookup_.emplace(std::move(find)); }
  /// What is told of hosts' reports, on the loop's thread; none: nothing is.
  void set_listener(std::function<void(const Report&)> listener) { listener_ = std::move(listener); }
  /// Sends this host's, in place of one that has not been sent yet, with the next serve(). Those of more than
  /// kMostReportBytes are not sent.
  void send_report(const std::string& text);
  /// This host's address, as it speaks to the coordinator; empty without a connection.
  const std::string& local_address() const { return local_address_; }
  /// The coordinator's address that the connection was made to.
  const SocketAddress& coordinator() const { return addresses_[attempt_ % addresses_.size()]; }
  /// Why the last connection failed; empty where none has.
  const std::string& trouble() const { return trouble_; }

 private:
  enum class Phase { kNone, kConnecting, kHandshake, kOpen };
  /// After which a connection is given up: that of a few heartbeats, whose answers come at once.
  std::chrono::nanoseconds longest_silence() const {
    return std::max<std::chrono::nanoseconds>(std::chrono::seconds(3), options_.heartbeat_interval * 3);
  }
  void connect(BootTime now);
  void look_up(BootTime now);
  /// `why` and the coordinator's address, followed by the question, become trouble(); "": none.
  void close(const std::string& why, const std::string& question = "");
  void take_orders();
  void flush();

  EventLoop& loop_;
  TlsKey key_;
  std::vector<SocketAddress> addresses_;
  std::optional<NameLookup> lookup_;
  BootTime look_up_at_ = {};  // at the earliest
  MembershipOptions options_;
  AgentState& state_;
  Phase phase_ = Phase::kNone;
  UniqueFd socket_;  // while it connects
  std::unique_ptr<TlsConnection> tls_;
  FrameReader frames_{kMostReportBytes};
  std::string out_;
  std::string report_due_;  // encoded; empty: none
  std::function<void(const Report&)> listener_;
  bool status_due_ = false;
  size_t attempt_ = 0;
  bool answered_ = false;   // the coordinator is at the present address
  BootTime heard_at_ = {};  // or begun
  BootTime connect_at_ = {};
  BootTime heartbeat_at_ = {};
  std::string local_address_;
  std::string trouble_;
};

}  // namespace lockstep::launch
