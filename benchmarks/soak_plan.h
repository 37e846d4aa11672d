#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <random>
#include <vector>

/// What happens in one round of the soak, drawn from the round's seed alone.
namespace lockstep::benchmarks {

using Random = std::mt19937_64;

/// A whole number in [low, high]; the same on every machine.
inline int64_t draw(Random& random, int64_t low, int64_t high) {
  return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
}

/// What the victim does to the others.
enum class Failure {
  kKill,       ///< SIGKILL
  kStop,       ///< SIGSTOP, for longer than the group's timeout
  kAbort,      ///< abort() from another thread
  kException,  ///< an exception that leaves the scope of the default group
  kOperation,  ///< calls another operation than the others
  kShape,      ///< the same with another number of elements
  kDtype,      ///< the same with another dtype
  kDestroy,    ///< destroy_process_group(), while the others go on
  kExit,       ///< exit(3)
  kQuickExit,  ///< _exit(4)
  kCut,        ///< nothing passes between its host and the others any more
  kBriefCut,   ///< the same for 3 s, which no rank may notice; then, when all go on again, SIGKILL
};
constexpr std::array kFailureNames = {"kill",  "stop",    "abort", "exception",  "operation", "shape",
                                      "dtype", "destroy", "exit",  "quick_exit", "cut",       "brief_cut"};

/// What all ranks are doing meanwhile.
enum class Calls {
  kCollectives,
  kAsynchronous,
  kMessages,
  kObjects,
  kSubgroup,
  kThreads,
  kDdp,
  kNewGroup,
  kInit,  ///< they meet, again and again; on one host
};
constexpr std::array kCallNames = {"collectives", "asynchronous", "messages",  "objects", "subgroup",
                                   "threads",     "ddp",          "new_group", "init"};

/// Where tensors lie: in memory that the peers see; in a rank's own; within a tensor that the peers see, from
/// the midst of a page on, so that they are staged; or each anywhere, by rank.
enum class Memory { kShared, kPlain, kView, kMixed };
constexpr std::array kMemoryNames = {"shared", "plain", "view", "mixed"};

/// Up to the 8 KiB of an announcement, some chunks, some MiB.
enum class Size { kSmall, kMedium, kLarge };
constexpr std::array kSizeNames = {"small", "medium", "large"};

/// One host, two that are pretended, or two with a wire that can be cut.
enum class Hosts { kOne, kPretended, kWired };

/// Within calls, whatever these are; a group's first operation passes the first of them.
constexpr std::array kFailpoints = {"announce", "announced", "exchange", "reduce", "finish"};

struct SoakPlan {
  uint64_t seed = 0;
  int ranks = 0;
  int victim = 0;
  int partner = 0;  // of a message that does not fit: its receiver
  Failure failure = Failure::kKill;
  Calls calls = Calls::kCollectives;
  Memory memory = Memory::kShared;
  Size size = Size::kSmall;
  std::vector<int> members;    // of the group in which it happens
  bool further_group = false;  // not the default one
  int64_t steps = 0;           // calls that the victim makes before
  int64_t spins = 0;           // and then turns of a loop
  bool overwrite = false;    // after the error survivors write into their tensors, or leave them as they are
  std::vector<int> host_of;  // of each rank; empty: all are on one
  const char* failpoint = "";  // where it is killed; none: wherever it happens to be

  /// Groups, each used by a thread of its own.
  int lanes() const { return calls == Calls::kThreads ? 2 : 1; }
  bool has_member(int rank) const {
    for (const int member : members) {
      if (member == rank) return true;
    }
    return false;
  }
  bool mismatches() const {
    return failure == Failure::kOperation || failure == Failure::kShape || failure == Failure::kDtype;
  }
  /// Whether another thread of the victim does it, at any moment of a call.
  bool strikes_from_outside() const {
    return failure == Failure::kKill || failure == Failure::kStop || failure == Failure::kAbort || cuts() ||
           calls == Calls::kInit;
  }
  bool cuts() const { return failure == Failure::kCut || failure == Failure::kBriefCut; }
  /// Whether survivors are to make a group of their own, and to go on in it.
  bool goes_on() const {
    return !host_of.empty() && !further_group &&
           (failure == Failure::kKill || failure == Failure::kQuickExit || cuts());
  }
  /// Whether the victim's process ends by it.
  bool ends_victim() const {
    return failure == Failure::kKill || failure == Failure::kException || failure == Failure::kExit ||
           failure == Failure::kQuickExit || failure == Failure::kBriefCut;
  }
  /// A message that does not fit concerns its receiver; all other failures concern all members of the group.
  bool expects_error(int rank) const {
    if (failure == Failure::kCut) return true;
    if (rank == victim || !has_member(rank)) return false;
    return calls != Calls::kMessages || !mismatches() || rank == partner;
  }
  std::chrono::milliseconds timeout() const {
    if (failure == Failure::kStop) return std::chrono::milliseconds(1500);
    // A rank that is struck before it has come to the meeting is missed at the timeout.
    return std::chrono::milliseconds(calls == Calls::kInit ? 5'000 : 60'000);
  }
};

/// Which failures there are for calls of a kind, beside kKill and kStop.
inline std::vector<Failure> failures_of(Calls calls) {
  using enum Failure;
  switch (calls) {
    case Calls::kMessages:  // a message has no other form than send and recv
      return {kAbort, kException, kShape, kDtype, kDestroy, kExit, kQuickExit};
    case Calls::kObjects:
    case Calls::kDdp:
      return {kAbort, kException, kOperation, kDestroy, kExit, kQuickExit};
    case Calls::kThreads:  // the process can't be left while its other thread is in a call
      return {kAbort, kOperation, kShape, kDtype, kDestroy};
    case Calls::kNewGroup:  // groups that do not fit are refused, and the default one goes on
      return {kAbort, kException, kDestroy, kExit, kQuickExit};
    case Calls::kInit:  // there is no group yet
      return {kKill, kStop, kQuickExit};
    default:
      return {kAbort, kException, kOperation, kShape, kDtype, kDestroy, kExit, kQuickExit};
  }
}

inline SoakPlan plan_of(uint64_t seed, Hosts hosts) {
  Random random(seed);
  SoakPlan plan;
  plan.seed = seed;
  const int64_t kinds = static_cast<int64_t>(kCallNames.size()) - (hosts == Hosts::kOne ? 0 : 1);
  plan.calls = static_cast<Calls>(draw(random, 0, kinds - 1));
  if (hosts == Hosts::kOne) {
    plan.ranks = static_cast<int>(draw(random, plan.calls == Calls::kSubgroup ? 3 : 2, 5));
  } else {
    plan.ranks = 4;
    const int first = static_cast<int>(draw(random, 1, 2));  // 1 + 3, or 2 x 2
    for (int rank = 0; rank < plan.ranks; ++rank) plan.host_of.push_back(rank < first ? 0 : 1);
  }
  plan.victim = static_cast<int>(draw(random, 0, plan.ranks - 1));
  plan.partner = static_cast<int>((plan.victim + draw(random, 1, plan.ranks - 1)) % plan.ranks);
  const auto failures = failures_of(plan.calls);
  // The other kinds have several forms each.
  const int64_t chance = draw(random, 0, 9);
  plan.failure =
      chance < 2 ? Failure::kKill
      : chance < 4
          ? Failure::kStop
          : failures[static_cast<size_t>(draw(random, 0, static_cast<int64_t>(failures.size()) - 1))];
  plan.memory = static_cast<Memory>(draw(random, 0, kMemoryNames.size() - 1));
  plan.size = static_cast<Size>(draw(random, 0, kSizeNames.size() - 1));
  // A subgroup lacks one rank, or more: the partner belongs to it, and the others by chance.
  const int without =
      plan.calls == Calls::kSubgroup
          ? static_cast<int>((plan.partner + 1) % plan.ranks == plan.victim ? (plan.partner + 2) % plan.ranks
                                                                            : (plan.partner + 1) % plan.ranks)
          : -1;
  for (int rank = 0; rank < plan.ranks; ++rank) {
    const bool drawn = plan.calls != Calls::kSubgroup || draw(random, 0, 2) > 0;
    if (rank == plan.victim || rank == plan.partner || (drawn && rank != without))
      plan.members.push_back(rank);
  }
  const bool in_default =
      plan.calls == Calls::kDdp || plan.calls == Calls::kNewGroup || plan.calls == Calls::kInit;
  plan.further_group = plan.calls == Calls::kSubgroup || plan.calls == Calls::kThreads ||
                       (!in_default && draw(random, 0, 1) == 0);
  plan.steps = draw(random, 0, 30);
  // None, some microseconds, or some milliseconds: within calls of all sizes.
  constexpr std::array<int64_t, 4> kMostSpins = {0, 2'000, 50'000, 1'000'000};
  plan.spins = draw(random, 0, kMostSpins[static_cast<size_t>(draw(random, 0, kMostSpins.size() - 1))]);
  plan.overwrite = draw(random, 0, 1) == 0;
  if (hosts == Hosts::kWired && draw(random, 0, 1) == 0) {
    // Calls in which each rank waits for each other one.
    constexpr std::array kCalls = {Calls::kCollectives, Calls::kAsynchronous, Calls::kDdp};
    plan.failure = draw(random, 0, 1) == 0 ? Failure::kCut : Failure::kBriefCut;
    plan.calls = kCalls[static_cast<size_t>(draw(random, 0, kCalls.size() - 1))];
    plan.further_group = false;
    plan.members.clear();
    for (int rank = 0; rank < plan.ranks; ++rank) plan.members.push_back(rank);
  } else if (hosts != Hosts::kOne && plan.failure == Failure::kKill && plan.calls != Calls::kMessages &&
             draw(random, 0, 1) == 0) {
    plan.failpoint = kFailpoints[static_cast<size_t>(draw(random, 0, kFailpoints.size() - 1))];
  }
  return plan;
}

}  // namespace lockstep::benchmarks
