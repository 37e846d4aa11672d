#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

namespace lockstep::transport {

/// What this rank holds of one on another host.
enum class PeerState : uint8_t {
  kAlive,
  kSuspected,    // has been silent for half of the limit, while this rank waits for it
  kEnded,        // its process has ended, as its host says or its connection shows
  kUnreachable,  // was silent for the limit
  kOwnFault,     // this process could not keep the connection: descriptors, memory
};

/// Whether one rank on another host lives: the states, and what leads from one to the next. The last three are final.
///
///     kAlive ── silent for half of the limit, while awaited ──► kSuspected ── for all of it ──► kUnreachable
///        ▲                                                        │    ▲
///        └─────────────────────── is heard ───────────────────────┘    └─ stays, as long as its host says: it is stopped
///
/// A rank that is awaited and silent is sent heartbeats, which it answers; one that is not awaited need not speak. Time in
/// which this process itself did not run (it was stopped, or has no processor) counts as no silence. The caller looks each
/// interval(). Not thread-safe; knows no clock.
class PeerLiveness {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Duration = std::chrono::nanoseconds;

  enum class Action {
    kNone,
    kHeartbeat,  // ask the rank for an answer
    kAskHost,    // ask the rank, and the others of its host how it is
    kGiveUp,     // it is unreachable from now on
  };

  explicit PeerLiveness(Duration limit) : limit_(limit) {}

  /// How often the caller looks within the limit.
  static constexpr int kLooks = 5;
  static Duration interval(Duration limit) { return limit / kLooks; }

  PeerState state() const { return state_; }
  /// Whether its host says that its process is stopped, and nothing was heard of it since. Of a rank that is not awaited
  /// it holds for one look: for an error that names it as the cause of a wait for another one.
  bool is_stopped() const { return stopped_; }
  /// For how long it has not spoken, though it was to.
  Duration silence() const { return silent_; }

  /// It has spoken: anything.
  void hear();
  /// Another rank of its host says how its process is.
  void hear_of(bool stopped);
  /// `awaited`: whether this rank waits for it.
  Action look(Time now, bool awaited);
  /// How it has ended, or why the connection is lost. The first word stays.
  void end(PeerState state);

 private:
  const Duration limit_;
  PeerState state_ = PeerState::kAlive;
  bool stopped_ = false;
  int stopped_holds_ = 0;       // looks for which its host's word holds, though it is not awaited
  Duration silent_{0};          // it
  Duration unspoken_{0};        // its host, since it said that it is stopped
  std::optional<Time> looked_;  // while it is awaited
};

}  // namespace lockstep::transport
