#include <algorithm>
#include <iterator>
#include <sstream>
#include <thread>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/errors.h>
#include <lockstep/base/exception_text.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/log.h>
#include <lockstep/base/process/interrupt.h>
#include <lockstep/base/text/format_duration.h>
#include <lockstep/collectives/groups/internal/store_membership.h>
#include <lockstep/rendezvous/store_all_gather.h>
#include <lockstep/transport/control_message.h>

/// Under lockstep/shrink/GROUP/ROUND/ in the store:
///   member/R   the ranks with which rank R would go on; may become fewer
///   changes    how often a member/R was written
///   decision   set once: "agreed: RANKS", or "late: TEXT" or "failed: TEXT" by a rank that waits no longer
///   made       how many of the agreed ranks have got the group
///   outcome    set once, after a decision that agreed: "made", "again: TEXT" when one of them has ended, "late: TEXT"
///              or "failed: TEXT"
namespace lockstep::collectives::internal::shrinking {
namespace {

using transport::ChannelError;
using transport::FailureKind;
using RankSet = StoreMembership::RankSet;

constexpr const char* kAgreed = "agreed: ";
constexpr const char* kMade = "made";
constexpr const char* kAgain = "again: ";
constexpr const char* kLate = "late: ";
constexpr const char* kFailed = "failed: ";
constexpr const char* kOwnError = " was interrupted, or met an error of its own, which it names";

/// How long ranks that reach the store leave it to the group's first host to decide, when that may be cut off from
/// them: at a cut both sides notice it at about the same time.
constexpr auto kPatience = std::chrono::seconds(5);
/// How long a rank that got no group waits to hear that this was because of another one's end: ranks hear of an end up
/// to two seconds apart.
constexpr std::chrono::seconds kHearing{3};

std::vector<uint8_t> bytes_of_text(const std::string& text) {
  return {text.begin(), text.end()};
}
std::string text_of_bytes(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

std::string to_text(const RankSet& ranks) {
  std::ostringstream text;
  for (const int rank : ranks) text << (text.tellp() > 0 ? " " : "") << rank;
  return text.str();
}

RankSet parse_ranks(const std::string& text, int size) {
  RankSet ranks;
  std::istringstream in(text);
  for (int rank = 0; in >> rank;) ranks.insert(rank);
  TORCH_CHECK_WITH(DistStoreError,
                   in.eof() && !ranks.empty() && *ranks.begin() >= 0 && *ranks.rbegin() < size,
                   "the store holds \"", text, "\", which no member of the group wrote");
  return ranks;
}

/// Of a decision.
RankSet parse_agreed(const std::string& decision, int size) {
  return parse_ranks(decision.substr(std::string(kAgreed).size()), size);
}

/// What a decision or an outcome says that is neither kAgreed, kMade nor kAgain.
[[noreturn]] void throw_failure(const std::string& entry) {
  const bool late = entry.starts_with(kLate);
  throw ChannelError(late ? FailureKind::kTimeout : FailureKind::kAborted,
                     entry.substr(std::string(late ? kLate : kFailed).size()));
}

/// Between two looks at the store, which all members have: so that it has no more to do where they are more.
class Pause {
 public:
  explicit Pause(int members)
      : longest_(std::max(std::chrono::microseconds(20'000), members * std::chrono::microseconds(500))) {}
  void wait() {
    check_interrupts();
    std::this_thread::sleep_for(length_);
    length_ = std::min(length_ * 3 / 2, longest_);
  }

 private:
  const std::chrono::microseconds longest_;
  std::chrono::microseconds length_{200};
};

}  // namespace

StoreMembership::StoreMembership(c10d::Store& store, const transport::GroupChannel& group,
                                 const std::vector<int>& excluded, const Deadline& deadline)
    : store_(store),
      group_(group),
      deadline_(deadline),
      timeout_(deadline.remaining()),
      prefix_("lockstep/shrink/" + group.id() + '/') {
  for (int rank = 0; rank < group.size(); ++rank) wanted_.insert(rank);
  for (const int rank : excluded) wanted_.erase(rank);
}

// ---- the store

std::optional<std::string> StoreMembership::look(const char* name) {
  if (!store_.check({key_ + name})) return std::nullopt;
  return text_of_bytes(store_.get(key_ + name));
}

/// What the key holds then: an entry that is already there stays.
std::string StoreMembership::decide(const char* name, const std::string& value) {
  return text_of_bytes(store_.compareSet(key_ + name, {}, bytes_of_text(value)));
}

void StoreMembership::publish(RankSet set) {
  published_ = std::move(set);
  store_.set(key_ + "member/" + std::to_string(group_.rank()), bytes_of_text(to_text(published_)));
  store_.add(key_ + "changes", 1);
}

void StoreMembership::read_records() {
  std::vector<int> ranks;
  std::vector<std::string> keys;
  for (const int rank : wanted_) {
    if (rank == group_.rank()) continue;
    std::string key = key_ + "member/" + std::to_string(rank);
    if (!records_.contains(rank) && !store_.check({key})) continue;
    ranks.push_back(rank);
    keys.push_back(std::move(key));
  }
  if (keys.empty()) return;
  const auto texts = store_.multiGet(keys);
  for (size_t i = 0; i < ranks.size(); ++i) {
    records_[ranks[i]] = parse_ranks(text_of_bytes(texts[i]), group_.size());
  }
}

// ---- a round

/// Whether the round is none for this rank: it has failed, before this rank came or with it.
bool StoreMembership::has_passed() {
  const auto decided = look("decision");
  if (!decided) return false;
  if (!decided->starts_with(kAgreed)) return true;
  RankSet set = parse_agreed(*decided, group_.size());
  auto outcome = look("outcome");
  // An earlier call of this rank has ended while the others counted on it.
  if (!outcome && set.contains(group_.rank())) {
    outcome = decide("outcome", kFailed + describe({group_.rank()}) + kOwnError);
  }
  if (outcome && *outcome != kMade) return true;
  fail_left_behind(std::move(set));
}

void StoreMembership::enter() {
  published_.clear();
  records_.clear();
  survivors_.clear();
  patience_.reset();
  asked_ = false;
  do {
    key_ = prefix_ + std::to_string(++round_) + '/';
    if (has_passed()) continue;
    publish(wanted_now());
    // A round that failed before this rank came is not this rank's. One that succeeded may count on it.
    const auto decided = look("decision");
    if (!decided || decided->starts_with(kAgreed)) return;
  } while (true);
}

RankSet StoreMembership::wanted_now() const {
  RankSet set;
  for (const int rank : wanted_) {
    if (rank == group_.rank() || !(group_.has_ended(rank) || group_.has_left(rank))) set.insert(rank);
  }
  return set;
}

/// The largest set that this rank can still go on with: those that it wants, and that are wanted by all of the set that
/// have come. Of two that want to go on without each other the lower one stays.
StoreMembership::Standing StoreMembership::standing() const {
  Standing now{.set = published_, .missing = {}};
  for (bool changed = true; changed;) {
    changed = false;
    now.missing.clear();
    for (int rank = 0; rank < group_.size(); ++rank) {
      if (rank == group_.rank() || !now.set.contains(rank)) continue;
      const auto theirs = records_.find(rank);
      if (theirs == records_.end()) {
        now.missing.insert(rank);
        continue;
      }
      changed |= std::erase_if(now.set, [&](int each) { return !theirs->second.contains(each); }) > 0;
    }
  }
  now.complete = now.missing.empty() && now.set.contains(group_.rank());
  return now;
}

/// Whether a complete set is left to others for a while: ranks of the group's first host are not in it whose end no
/// rank has told of. That host has the store, unless the launcher has it: so it goes on if it lives.
bool StoreMembership::must_yield(const RankSet& set) {
  const auto& layout = group_.layout();
  const int first_host = layout.host_of[*wanted_.begin()];
  const bool may_live =
      first_host != layout.host() && std::any_of(wanted_.begin(), wanted_.end(), [&](int rank) {
        return !set.contains(rank) && layout.host_of[rank] == first_host && !group_.has_left(rank) &&
               !group_.transport().end_is_certain(group_.members()[rank]);
      });
  if (!may_live) return false;
  // Within a short timeout there is time left to make the group.
  if (!patience_) patience_ = Deadline::after(std::min<std::chrono::nanoseconds>(kPatience, timeout_ / 2));
  return !patience_->expired();
}

/// This rank may have no connection to one that it has had no messages with, and would not hear that it has ended.
void StoreMembership::ask_missing(const RankSet& missing) {
  transport::HostTransport& transport = group_.transport();
  const std::vector<int> peers = peers_of(missing);
  transport.expect(peers);
  if (asked_ || missing.empty()) return;
  asked_ = true;
  for (const int peer : peers) {
    if (transport.is_here(peer) || transport.has_ended(peer)) continue;
    transport::ControlMessage question;
    question.kind = transport::ControlMessage::Kind::kAskForCause;
    transport.tell(peer, question);
  }
}

std::string StoreMembership::await_decision() {
  std::vector<uint8_t> changes;
  Pause pause(group_.size());
  while (true) {
    if (const auto decided = look("decision")) return *decided;
    if (RankSet now = wanted_now(); now != published_) publish(std::move(now));
    // Is there, for this rank has written.
    if (const auto count = store_.get(key_ + "changes"); count != std::exchange(changes, count))
      read_records();
    const Standing now = standing();
    if (now.complete && !must_yield(now.set)) {
      decide("decision", kAgreed + to_text(now.set));
      continue;
    }
    ask_missing(now.missing);
    if (deadline_.expired()) {
      decide("decision",
             c10::str(kLate, describe({group_.rank()}), " timed out after ", format_duration(timeout_),
                      now.missing.empty() ? " waiting for ranks that want to go on without it"
                                          : " waiting for " + describe(now.missing)));
      continue;
    }
    pause.wait();
  }
}

std::vector<int> StoreMembership::follow(const std::string& decided) {
  if (!decided.starts_with(kAgreed)) throw_failure(decided);
  survivors_ = parse_agreed(decided, group_.size());
  if (!survivors_.contains(group_.rank())) fail_left_behind(survivors_);
  return {survivors_.begin(), survivors_.end()};
}

/// Of a rank whose call ends by an error of its own, wherever it is: no other one is to wait for it.
void StoreMembership::withdraw() {
  const std::string text = describe({group_.rank()}) + kOwnError;
  try {
    const auto decided = decide("decision", kFailed + text);
    if (!decided.starts_with(kAgreed)) return;
    survivors_ = parse_agreed(decided, group_.size());
    if (!survivors_.contains(group_.rank())) return;
    decide("outcome", kFailed + text);
    end_exchanges("shrink_group failed: " + text +
                  "; once that is mended, all ranks that go on can call shrink_group again");
  } catch (const c10::Error&) {
    // The store is lost: the others see that this rank ends.
  }
}

std::vector<int> StoreMembership::agree() {
  std::string decided;
  try {
    enter();
    failpoint::here("shrink_entered");
    decided = await_decision();
  } catch (const ChannelError&) {
    throw;
  } catch (...) {
    withdraw();
    throw;
  }
  return follow(decided);
}

// ---- its outcome

/// How one of the agreed ranks has ended, or that it has left the group, for the store is out of its reach.
std::optional<std::string> StoreMembership::lost_survivor() const {
  for (const int rank : survivors_) {
    if (group_.has_ended(rank)) return group_.transport().describe_end(group_.members()[rank]);
    if (rank != group_.rank() && group_.has_left(rank)) return describe({rank}) + " has left the group";
  }
  return std::nullopt;
}

/// Whether all have got the group; false: they meet again.
bool StoreMembership::follow_outcome(const std::string& outcome) {
  if (outcome == kMade) return true;
  if (outcome.starts_with(kAgain)) {
    LOCKSTEP_LOG(kInfo) << "shrinking the group begins anew: " << outcome.substr(std::string(kAgain).size());
    return false;
  }
  throw_failure(outcome);
}

bool StoreMembership::conclude(const transport::GroupChannel& made) {
  try {
    if (store_.add(key_ + "made", 1) == static_cast<int64_t>(survivors_.size())) decide("outcome", kMade);
    std::optional<Deadline> hearing;
    for (Pause pause(group_.size());; pause.wait()) {
      group_.transport().expect(peers_of(survivors_));
      if (const auto outcome = look("outcome")) return follow_outcome(*outcome);
      if (const auto lost = lost_survivor()) {
        decide("outcome", kAgain + *lost);
        continue;
      }
      for (int rank = 0; rank < made.size(); ++rank) {
        if (rank == made.rank() || !made.has_left(rank)) continue;
        if (!hearing) hearing = Deadline::after(kHearing);
        if (!hearing->expired()) break;
        decide("outcome", c10::str(kFailed, made.transport().describe(made.members()[rank]),
                                   " did not get the new group; its own error says why"));
      }
      if (deadline_.expired()) {
        decide("outcome",
               c10::str(kLate, describe({group_.rank()}), " timed out after ", format_duration(timeout_),
                        " waiting for the others to get the new group"));
      }
    }
  } catch (const Interruption&) {
    withdraw();
    throw;
  }
}

/// Those that wait in an exchange of addresses for this rank, which does not come, see the outcome then.
void StoreMembership::end_exchanges(const std::string& text) {
  const int size = static_cast<int>(survivors_.size());
  const int place = static_cast<int>(std::distance(survivors_.begin(), survivors_.find(group_.rank())));
  if (size == 1) return;
  for (const char* which : {"channel", "control"}) {
    try {
      fail_store_all_gather(store_, key_ + which, place, size, text, /*late=*/false, /*met_at=*/"");
    } catch (const c10::DistBackendError&) {  // the text
    }
  }
}

void StoreMembership::give_up(const std::exception_ptr& failure) {
  try {
    end_attempt(failure);
  } catch (const Interruption&) {
    withdraw();
    throw;
  }
}

void StoreMembership::end_attempt(const std::exception_ptr& failure) {
  std::string text = text_of(failure);
  std::chrono::seconds patience = kHearing;
  try {
    std::rethrow_exception(failure);
  } catch (const Interruption&) {
    throw;
  } catch (const DistTimeoutError&) {
    text = kLate + text;
  } catch (const c10::DistBackendError&) {
    text = kFailed + text;
    patience *= 2;  // it may tell of another rank that has met an error of its own, which that rank enters
  } catch (...) {
    text = kFailed + text;
  }
  std::optional<std::string> outcome = look("outcome");
  const auto hearing = Deadline::after(patience);
  for (Pause pause(group_.size()); !outcome && !hearing.expired(); outcome = look("outcome")) {
    if (const auto lost = lost_survivor()) {
      outcome = decide("outcome", kAgain + *lost);
      break;
    }
    pause.wait();
  }
  if (!outcome) outcome = decide("outcome", text);
  end_exchanges(*outcome);
  if (*outcome == text) std::rethrow_exception(failure);
  TORCH_INTERNAL_ASSERT(!follow_outcome(*outcome), "the others count on a rank that has got no group");
}

// ---- words

/// The transport's ranks.
std::vector<int> StoreMembership::peers_of(const RankSet& ranks) const {
  std::vector<int> peers;
  for (const int rank : ranks) peers.push_back(group_.members()[rank]);
  return peers;
}

std::string StoreMembership::describe(const RankSet& ranks) const {
  return group_.transport().describe(peers_of(ranks));
}

void StoreMembership::fail_left_behind(RankSet survivors) const {
  survivors.erase(group_.rank());
  throw ChannelError(FailureKind::kLeftBehind, describe(survivors) + " went on without this rank");
}

}  // namespace lockstep::collectives::internal::shrinking
