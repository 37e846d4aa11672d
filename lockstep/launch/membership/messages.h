#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

/// What agents and the coordinator tell each other. Both messages carry the whole state, never a change of it:
/// a message that is lost, late, or comes twice does no harm, because the next one says everything again.
namespace lockstep::launch {

/// Names one agent's process; drawn at random when it starts.
using AgentId = std::array<uint8_t, 16>;

/// What has become of the workers of one host.
enum class HostPhase : uint8_t {
  kIdle,      // there are none
  kRunning,   // there are, or may be
  kFinished,  // those of `generation` have all ended with status 0
  kFailed,    // one of `generation` has failed, and all have ended
};

/// From an agent to the coordinator, every heartbeat interval and whenever something in it changes.
struct Status {
  AgentId id = {};
  int64_t sent_at = 0;       // the agent's clock; the answer repeats it, and that renews the agent's lease
  std::string host = {};     // its name, for messages
  int32_t node_rank = -1;    // --node-rank; -1: any
  int32_t nproc = 1;         // workers on this host
  std::string role = {};     // --role: what they do
  std::string options = {};  // see common_options()
  HostPhase phase = HostPhase::kIdle;
  uint64_t generation = 0;  // of the workers that were started last; 0: none were
  uint64_t order = 0;       // the number of the last order that it has carried out
  int32_t exit_status = 0;  // with kFailed: what `lockstep run` on this host alone would return
  int32_t leaving = 0;      // the signal that asked this agent to end; 0: none did
  int32_t culprit =
      -1;  // with a failure: the rank on another host that is its cause, as its errors say; -1: none
  std::string failure =
      {};                // of `generation`, where a worker has failed by itself: what the host's report says
  uint64_t answers = 0;  // the last Order::question that it has heard
  bool watches = false;  // wants the reports of all hosts, for a `lockstep top` here looks at the job

  bool operator==(const Status&) const = default;
};

/// A worker group's place in a generation: torchrun's GROUP_RANK and what follows from it.
struct Place {
  uint64_t generation = 0;
  int32_t group_rank = 0;
  int32_t group_size = 1;
  int32_t first_rank = 0;  // of this host's workers
  int32_t world_size = 1;
  uint16_t store_port = 0;      // of the store at the coordinator's address; 0: the tunnel leads to it
  int32_t first_role_rank = 0;  // of this host's workers, among those of all hosts with its role
  int32_t role_world_size = 1;  // how many these are

  bool operator==(const Place&) const = default;
};

enum class Command : uint8_t {
  kIdle,   // run no workers
  kRun,    // run those of `place`
  kEnd,    // run no workers, and end with `exit_status`
  kYield,  // those of `place` are asked to stop as by a signal, and how they end counts as before
};

/// From the coordinator to an agent: the answer to each status, and whenever it changes.
struct Order {
  std::array<uint8_t, 16> job = {};  // names the coordinator's process
  uint64_t number = 0;         // grows with each decision; an agent ignores what is older than it has seen
  int64_t status_sent_at = 0;  // of the last status that came
  Command command = Command::kIdle;
  uint64_t question = 0;    // a status that answers it is wanted at once; 0: none is
  bool watched = false;     // some host watches: a Report every second, please
  Place place = {};         // with kRun and kYield
  uint64_t generation = 0;  // the last one that was started, on whichever hosts
  int32_t exit_status = 0;  // with kEnd
  std::string reason = {};  // of the decision, for people

  bool operator==(const Order&) const = default;
};

/// How a host's ranks do: from its agent to the coordinator, and from there to those that watch.
struct Report {
  AgentId agent = {};
  std::string text = {};  // what it says, of which agents know nothing

  bool operator==(const Report&) const = default;
};

/// The longest status and order. Longer texts are cut when they are encoded, a failure's report in its middle.
inline constexpr size_t kMostMessageBytes = 16384;
/// The longest report. Longer ones are not sent.
inline constexpr size_t kMostReportBytes = size_t{1} << 20;

std::string encode(const Status& status);
std::string encode(const Order& order);
std::string encode(const Report& report);
/// Nothing for bytes that encode() does not make: too short or too long, unknown values, numbers out of range.
std::optional<Status> decode_status(std::string_view bytes);
std::optional<Order> decode_order(std::string_view bytes);
std::optional<Report> decode_report(std::string_view bytes);

}  // namespace lockstep::launch
