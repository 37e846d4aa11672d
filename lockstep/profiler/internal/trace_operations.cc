#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <optional>
#include <tuple>

#include <lockstep/profiler/internal/trace_names.h>
#include <lockstep/profiler/internal/trace_operations.h>

namespace lockstep::profiler::internal {
namespace {

constexpr double kThreeYears = 1e14;  // in microseconds; sums of as much don't overflow

using Clocks = std::map<std::string, flight::ClockOffset>;

std::vector<std::pair<size_t, size_t>> flows_of(const OperationParts& parts,
                                                const std::vector<TracedOperation>& operations,
                                                bool all_pairs, const Clocks& clocks) {
  std::vector<std::pair<size_t, size_t>> flows;
  if (parts.point_to_point) {
    if (operations[parts.parts[1]].failed) return {};  // it ends whenever it does
    return {{parts.parts[0], parts.parts[1]}};
  }
  // A member begins to move data only after all have announced the operation, in operations with a root, too.
  const auto starts = [&](size_t part) {
    return common_time(operations[part].clock, operations[part].start_ns, clocks);
  };
  std::vector<size_t> causes = parts.parts;
  if (!all_pairs) {
    causes = {*std::max_element(causes.begin(), causes.end(),
                                [&](size_t a, size_t b) { return starts(a) < starts(b); })};
  }
  for (const size_t cause : causes) {
    for (const size_t effect : parts.parts) {
      if (cause != effect) flows.emplace_back(cause, effect);
    }
  }
  // A part that has failed ends whenever it does.
  std::erase_if(
      flows, [&](const auto& one) { return operations[one.first].failed || operations[one.second].failed; });
  // Over NCCL, a root, and the members that send to it, may end before others have begun.
  std::erase_if(flows, [&](const auto& one) {
    const TracedOperation& effect = operations[one.second];
    return !all_pairs && effect.peer >= 0 &&
           starts(one.first) > common_time(effect.clock, effect.end_ns, clocks);
  });
  return flows;
}

/// Whether a part of an operation with a root waits for another one whatever the backend: NCCL does not make all wait for all.
bool depends_by_root(const TracedOperation& cause, const TracedOperation& effect) {
  if (effect.kind == "broadcast" || effect.kind == "scatter") return cause.rank == cause.peer;
  return (effect.kind == "reduce" || effect.kind == "gather") && effect.rank == effect.peer;
}

using Queue = std::vector<size_t>;  // operations of one rank, by begin

/// How far from each other the ends are; of those that clocks tell nothing of, how far from their median distance.
double mean_distance(std::vector<int64_t> apart, bool clocks_are_known) {
  int64_t usual = 0;
  if (!clocks_are_known) {
    const auto middle = apart.begin() + static_cast<std::ptrdiff_t>(apart.size() / 2);
    std::nth_element(apart.begin(), middle, apart.end());
    usual = *middle;
  }
  double sum = 0;
  for (const int64_t ns : apart) sum += std::abs(static_cast<double>(ns) - static_cast<double>(usual));
  return sum / static_cast<double>(apart.size());
}

/// What one rank sends to another one with one tag in a group.
struct TaggedMessages {
  Queue sends, receives;
};

/// How many receives of each tag, or with a minus sends, are without the other part at the begin: those of the steps that one of both
/// has recorded alone. No receive ends before its send has begun, but by the error of `clocks`, unless they are `exact`, and the ends
/// of both lie close together. Clocks that are not exact may fit a wrong number better than the right one; of those the least number
/// is taken, for an earlier send bounds the clocks less, and not wrongly. Where nothing is known of the two clocks, the distance of
/// the ends is to be even; but there all are taken to belong together from the first on, unless others fit clearly better. Nothing
/// where that can't be told of clocks that are not exact.
std::optional<int64_t> best_shift(const std::map<int64_t, TaggedMessages>& by_tag,
                                  const std::vector<TracedOperation>& operations, const Clocks& clocks,
                                  bool exact) {
  constexpr int64_t kMostShift = 16;
  constexpr size_t kEnough = 8;                              // pairs, to tell how even their distances are
  constexpr int64_t kMostError = 1'000'000'000'000'000'000;  // sums of times don't overflow
  struct Times {
    std::vector<int64_t> sent, send_ends, ends;
  };
  std::vector<Times> all;
  size_t most_pairs = 0;
  bool known = false;
  int64_t error = 0;
  for (const auto& [tag, messages] : by_tag) {
    if (messages.sends.empty() || messages.receives.empty()) continue;
    const auto times = [&](const Queue& queue, int64_t TracedOperation::*when) {
      std::vector<int64_t> result;
      for (const size_t i : queue)
        result.push_back(common_time(operations[i].clock, operations[i].*when, clocks));
      return result;
    };
    all.push_back({times(messages.sends, &TracedOperation::start_ns),
                   times(messages.sends, &TracedOperation::end_ns),
                   times(messages.receives, &TracedOperation::end_ns)});
    most_pairs += std::min(messages.sends.size(), messages.receives.size());
    const std::string &from = operations[messages.sends.front()].clock,
                      &to = operations[messages.receives.front()].clock;
    known = from == to || (clocks.contains(from) && clocks.contains(to));
    if (!exact && known && from != to)
      error = std::min(clocks.at(from).error_ns + clocks.at(to).error_ns, kMostError);
  }
  std::optional<int64_t> best;
  double least = std::numeric_limits<double>::infinity();
  for (int64_t distance = 0; distance <= kMostShift; ++distance) {
    for (const int64_t shift : {distance, -distance}) {
      std::vector<int64_t> apart;
      bool possible = true;
      for (const Times& times : all) {
        for (size_t i = 0; i < times.ends.size() && possible; ++i) {
          const int64_t at = static_cast<int64_t>(i) - shift;
          if (at < 0 || at >= static_cast<int64_t>(times.sent.size())) continue;
          possible = !known || times.sent[static_cast<size_t>(at)] <= times.ends[i] + error;
          apart.push_back(times.ends[i] - times.send_ends[static_cast<size_t>(at)]);
        }
      }
      if (!possible || apart.empty()) continue;
      if (known && !exact) return shift;
      const bool few = apart.size() < kEnough || 2 * apart.size() < most_pairs;
      if (!known && few && (shift != 0 || !exact)) continue;
      const double mean = mean_distance(std::move(apart), known);
      if (mean >= (known ? least : least / 2)) continue;
      least = mean;
      best = shift;
    }
  }
  return best;
}

void match_messages(const std::vector<TracedOperation>& operations, const Clocks& clocks, bool exact,
                    std::vector<OperationParts>& matched) {
  using Way = std::tuple<std::string, int64_t, int64_t>;  // group, from, to
  std::map<Way, std::map<int64_t, TaggedMessages>> ways;
  for (size_t i = 0; i < operations.size(); ++i) {
    const TracedOperation& one = operations[i];
    if (!one.point_to_point || one.peer < 0) continue;
    if (one.kind.starts_with("send")) {
      ways[{one.group, one.rank, one.peer}][one.tag].sends.push_back(i);
    } else {
      ways[{one.group, one.peer, one.rank}][one.tag].receives.push_back(i);
    }
  }
  for (auto& [way, by_tag] : ways) {
    for (auto& [tag, messages] : by_tag) {
      for (Queue* queue : {&messages.sends, &messages.receives}) {
        std::stable_sort(queue->begin(), queue->end(),
                         [&](size_t a, size_t b) { return operations[a].start_ns < operations[b].start_ns; });
      }
    }
    const auto shift = best_shift(by_tag, operations, clocks, exact);
    if (!shift && !exact) continue;
    for (const auto& [tag, messages] : by_tag) {
      for (size_t i = 0; i < messages.receives.size(); ++i) {
        const int64_t at = static_cast<int64_t>(i) - shift.value_or(0);
        if (at < 0 || at >= static_cast<int64_t>(messages.sends.size())) continue;
        matched.push_back({.point_to_point = true,
                           .parts = {messages.sends[static_cast<size_t>(at)], messages.receives[i]}});
      }
    }
  }
}

void match_collectives(const std::vector<TracedOperation>& operations, std::vector<OperationParts>& matched) {
  std::map<std::tuple<std::string, int64_t, std::string>, std::map<int64_t, size_t>> members;
  for (size_t i = 0; i < operations.size(); ++i) {
    const TracedOperation& one = operations[i];
    if (!one.point_to_point) members[{one.group, one.sequence, one.kind}].try_emplace(one.rank, i);
  }
  for (const auto& [name, by_rank] : members) {
    if (by_rank.size() < 2) continue;
    OperationParts parts;
    for (const auto& [rank, index] : by_rank) parts.parts.push_back(index);
    matched.push_back(std::move(parts));
  }
}

}  // namespace

int64_t since_1970(double microseconds, const TraceOrigin& origin) {
  constexpr double kAHundredYears = 4e15;  // a trace without a base counts from 1970 itself
  const double most = origin.base_ns > 0 ? kThreeYears : kAHundredYears;
  return origin.base_ns + std::llround(std::clamp(microseconds, -kThreeYears, most) * 1000);
}

double duration_of(const nlohmann::json& event) {
  return std::clamp(number_of(event, "dur"), 0.0, kThreeYears);
}

std::optional<TracedOperation> operation_of(const nlohmann::json& event, const TraceOrigin& origin) {
  const nlohmann::json& arguments = arguments_of(event);
  if (!arguments.contains(kQueuedArgument) || text_of(event, "ph") != "X") return std::nullopt;
  TracedOperation operation;
  operation.kind = text_of(arguments, "Collective name");
  operation.group = text_of(arguments, kGroupKeyArgument);
  operation.sequence = integer_of(arguments, "Seq");
  const auto point_to_point = arguments.find("Is P2P");
  operation.point_to_point =
      point_to_point != arguments.end() && point_to_point->is_boolean() && point_to_point->get<bool>();
  operation.rank = integer_of(arguments, "Rank", origin.rank);
  operation.peer = integer_of(arguments, kPeerArgument, -1);
  operation.tag = integer_of(arguments, "Tag");
  operation.failed = arguments.contains("Error");
  operation.start_ns = since_1970(number_of(event, "ts"), origin);
  operation.end_ns = since_1970(number_of(event, "ts") + duration_of(event), origin);
  operation.clock = origin.clock;
  operation.pid = integer_of(event, "pid");
  operation.thread = integer_of(event, "tid");
  if (operation.kind.empty()) return std::nullopt;
  return operation;
}

int64_t common_time(const std::string& clock, int64_t ns, const Clocks& clocks) {
  const auto found = clocks.find(clock);
  return found == clocks.end() ? ns : ns - found->second.ns;
}

std::vector<OperationParts> match_operations(const std::vector<TracedOperation>& operations,
                                             const Clocks& clocks) {
  std::vector<OperationParts> matched;
  match_collectives(operations, matched);
  match_messages(operations, clocks, /*exact=*/true, matched);
  return matched;
}

std::vector<std::pair<size_t, size_t>> causes_of(const OperationParts& parts,
                                                 const std::vector<TracedOperation>& operations,
                                                 const Clocks& clocks) {
  return flows_of(parts, operations, /*all_pairs=*/false, clocks);
}

Clocks offsets_between(const std::vector<TracedOperation>& operations, const std::string& reference) {
  flight::ClockBounds bounds;
  const auto add = [&](const OperationParts& parts) {
    for (const auto& [cause, effect] : flows_of(parts, operations, /*all_pairs=*/true, {})) {
      const TracedOperation &first = operations[cause], &second = operations[effect];
      if (!parts.point_to_point && first.peer >= 0 && !depends_by_root(first, second)) continue;
      bounds.add(first.clock, first.start_ns, second.clock, second.end_ns);
    }
  };
  std::vector<OperationParts> collectives, messages;
  match_collectives(operations, collectives);
  for (const OperationParts& parts : collectives) add(parts);
  // The clocks tell which messages belong together, as far as collectives have told of the clocks.
  match_messages(operations, bounds.offsets(reference), /*exact=*/false, messages);
  for (const OperationParts& parts : messages) add(parts);
  return bounds.offsets(reference);
}

int64_t waited_ns(const OperationParts& parts, size_t part, const std::vector<TracedOperation>& operations,
                  const Clocks& clocks) {
  const TracedOperation& own = operations[part];
  const int64_t start = common_time(own.clock, own.start_ns, clocks);
  int64_t last = start;
  for (const auto& [cause, effect] : flows_of(parts, operations, /*all_pairs=*/false, clocks)) {
    if (effect != part) continue;
    last = std::max(last, common_time(operations[cause].clock, operations[cause].start_ns, clocks));
  }
  return std::min(last - start, own.end_ns - own.start_ns);
}

}  // namespace lockstep::profiler::internal
