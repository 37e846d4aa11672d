#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/flight/clock_bounds.h>
#include <lockstep/profiler/internal/trace_reader.h>

/// The operations of groups in the traces of several ranks: which belong together, and what that says of the clocks. Pure
/// functions.
namespace lockstep::profiler::internal {

/// One member's part, as its trace has it. Times are nanoseconds since 1970 by the clock of its machine.
struct TracedOperation {
  std::string group;  // its key
  std::string kind;   // "all_reduce"
  int64_t sequence = 0;
  bool point_to_point = false;
  int64_t rank = 0;   // global, whose part it is
  int64_t peer = -1;  // global: destination, source or root; -1: none, or any
  int64_t tag = 0;
  bool failed = false;
  int64_t start_ns = 0;
  int64_t end_ns = 0;
  std::string clock;
  int64_t pid = 0;  // as the file has them
  int64_t thread = 0;
};

/// Nothing for an event that is none of ours.
std::optional<TracedOperation> operation_of(const nlohmann::json& event, const TraceOrigin& origin);
/// A time in a file, since 1970.
int64_t since_1970(double microseconds, const TraceOrigin& origin);
/// In microseconds.
double duration_of(const nlohmann::json& event);

/// The parts that make one operation: the members' of a collective, or a send and its receive. Indices of operations.
struct OperationParts {
  bool point_to_point = false;
  std::vector<size_t> parts;  // by rank; of a message the send first
};

/// Those of which at least two parts are there. A message carries no number, so the n-th from one rank to another belongs
/// to the n-th receive there, but for those that one of the traces has missed at its begin: as many as make the ends fit
/// best. `clocks`: as offsets_between() gives them, or none.
std::vector<OperationParts> match_operations(const std::vector<TracedOperation>& operations,
                                             const std::map<std::string, flight::ClockOffset>& clocks);

/// What had to begin before a part could end: (cause, effect), indices of operations. Of a collective, with a root or
/// without, it is the part that began last, for each other; of a receive its send.
std::vector<std::pair<size_t, size_t>> causes_of(const OperationParts& parts,
                                                 const std::vector<TracedOperation>& operations,
                                                 const std::map<std::string, flight::ClockOffset>& clocks);

/// How far each machine's clock is ahead of `reference`, from the operations over several of them: of a collective without a root
/// no part can end before each other has begun, of one with a root none that needs what another one has, and no receive
/// before its send has begun. Messages alone tell it where they go both ways.
std::map<std::string, flight::ClockOffset> offsets_between(const std::vector<TracedOperation>& operations,
                                                           const std::string& reference);

/// A time on the clock of reference.
int64_t common_time(const std::string& clock, int64_t ns,
                    const std::map<std::string, flight::ClockOffset>& clocks);

/// How long a part has waited for others: until the last of them began, or the sender.
int64_t waited_ns(const OperationParts& parts, size_t part, const std::vector<TracedOperation>& operations,
                  const std::map<std::string, flight::ClockOffset>& clocks);

}  // namespace lockstep::profiler::internal
