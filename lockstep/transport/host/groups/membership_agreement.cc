#include <lockstep/base/failpoint.h>
#include <lockstep/base/process/cpu.h>
#include <lockstep/base/text/format_duration.h>
#include <lockstep/transport/host/groups/membership_agreement.h>
#include <lockstep/transport/waiting.h>

namespace lockstep::transport {

// ---- RankSet

RankSet RankSet::all(int size) {
  RankSet set;
  for (int rank = 0; rank < size; ++rank) set.words_[rank / 64] |= uint64_t{1} << rank % 64;
  return set;
}

RankSet& RankSet::operator&=(const RankSet& other) {
  for (size_t i = 0; i < words_.size(); ++i) words_[i] &= other.words_[i];
  return *this;
}

std::vector<int> RankSet::ranks() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < layout::kMaxRanks; ++rank) {
    if (contains(rank)) ranks.push_back(rank);
  }
  return ranks;
}

void RankSet::store_to(layout::SharedRankSet& shared) const {
  for (size_t i = 0; i < words_.size(); ++i) shared[i].store(words_[i], std::memory_order_relaxed);
}

RankSet RankSet::load_from(const layout::SharedRankSet& shared) {
  RankSet set;
  for (size_t i = 0; i < shared.size(); ++i) set.words_[i] = shared[i].load(std::memory_order_relaxed);
  return set;
}

// ---- records

namespace {

/// What `read` finds in a record, if the record is the round's before and afterwards.
template <class Read>
auto read_record(const layout::RecoveryRecord& record, uint64_t round, Read&& read)
    -> std::optional<decltype(read(record))> {
  // Acquire: pairs with the release store in enter().
  if (record.round.load(std::memory_order_acquire) != round) return std::nullopt;
  auto value = read(record);
  // If a word of a later round was read, the fence makes its round's 0 visible, too.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (record.round.load(std::memory_order_relaxed) != round) return std::nullopt;
  return value;
}

}  // namespace

std::optional<RankSet> MembershipAgreement::wanted_by(int rank, uint64_t round) const {
  return read_record(record(rank, round), round,
                     [](const auto& record) { return RankSet::load_from(record.wanted); });
}

std::optional<RankSet> MembershipAgreement::agreed_by(int rank, uint64_t round) const {
  return read_record(record(rank, round), round,
                     [](const auto& record) { return RankSet::load_from(record.agreed); });
}

std::optional<MembershipAgreement::Addresses> MembershipAgreement::addresses_of(int rank,
                                                                                uint64_t round) const {
  return read_record(record(rank, round), round, [](const auto& record) {
    return Addresses{record.addresses[0].load(std::memory_order_relaxed),
                     record.addresses[1].load(std::memory_order_relaxed)};
  });
}

// ---- the decision

Decision MembershipAgreement::decision() const {
  // Acquire: the set of the rank that decided was written before.
  return unpack_decision(recovery(0).decision.value.load(std::memory_order_acquire));
}

bool MembershipAgreement::decide(const Decision& wanted) {
  auto& word = recovery(0).decision.value;
  uint64_t current = word.load(std::memory_order_acquire);
  do {
    if (unpack_decision(current).sequence >= wanted.sequence) return false;
  } while (!word.compare_exchange_weak(current, pack_decision(wanted), std::memory_order_acq_rel));
  publish_fence();
  ring_all();
  return true;
}

void MembershipAgreement::ring_all() const {
  for (int rank = 0; rank < members_.size(); ++rank) recovery(rank).doorbell.ring();
}

uint64_t MembershipAgreement::confirmed_by(int rank) const {
  // Acquire: pairs with confirm(). A rank confirms before it leaves, so a rank that sees it leave sees this.
  return recovery(rank).confirmed.value.load(std::memory_order_acquire);
}

void MembershipAgreement::confirm(const Agreement& agreement) {
  recovery(own_).confirmed.value.store(agreement.round, std::memory_order_release);
}

/// Whether others have got a group that this rank's call did not get, because it was interrupted just then.
/// To them this rank has left; here they would look as if they had, and it would go on alone.
bool MembershipAgreement::has_missed_a_group() const {
  const uint64_t own = confirmed_by(own_);
  for (int rank = 0; rank < members_.size(); ++rank) {
    if (confirmed_by(rank) > own) return true;
  }
  return false;
}

std::optional<RankSet> MembershipAgreement::survivors_without_me() const {
  while (true) {
    const Decision last = decision();
    if (last.kind != Decision::kSuccess) return std::nullopt;
    auto set = agreed_by(last.by, last.sequence);
    if (!set) continue;  // two rounds have passed meanwhile
    if (set->contains(own_) && !has_missed_a_group()) return std::nullopt;
    set->erase(own_);
    return set;
  }
}

// ---- a round

/// Publishes this rank's record for the next round, and returns its number.
uint64_t MembershipAgreement::enter(const RankSet& wanted, const Addresses& own) {
  while (true) {
    if (const auto survivors = survivors_without_me()) fail_left_behind(*survivors);
    const uint64_t round = decision().sequence + 1;
    layout::RecoveryRecord& record = this->record(own_, round);
    record.round.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);  // see read_record()
    for (size_t i = 0; i < own.size(); ++i) record.addresses[i].store(own[i], std::memory_order_relaxed);
    wanted.store_to(record.wanted);
    record.round.store(round, std::memory_order_release);
    publish_fence();
    // A round that failed before this rank came is not this rank's. One that succeeded may count on it.
    const Decision now = decision();
    if (now.sequence == round && now.kind != Decision::kSuccess) continue;
    ring_all();
    return round;
  }
}

/// The largest set that this rank can still go on with: those that it wants, that live, and that are wanted
/// by all of the set that have come.
MembershipAgreement::Standing MembershipAgreement::standing(const RankSet& wanted, uint64_t round) const {
  Standing now{.set = wanted, .missing = {}};
  for (int rank : wanted.ranks()) {
    if (rank != own_ && members_.is_gone(rank)) now.set.erase(rank);
  }
  for (bool changed = true; changed;) {
    changed = false;
    now.missing.clear();
    for (int rank : now.set.ranks()) {
      const auto theirs = wanted_by(rank, round);
      if (!theirs) {
        now.missing.push_back(rank);
        continue;
      }
      const RankSet before = now.set;
      now.set &= *theirs;
      changed |= !(now.set == before);
    }
  }
  now.complete = now.missing.empty() && now.set.contains(own_);
  return now;
}

void MembershipAgreement::await_decision(const RankSet& wanted, uint64_t round, const Deadline& deadline) {
  const HostTransport& transport = members_.transport();
  const auto timeout = deadline.remaining();
  const WaitPolicy policy = choose_wait_policy(transport.living_count(), usable_cores(), false);
  const auto decided = [&] { return decision().sequence >= round; };
  while (!decided()) {
    if (has_missed_a_group())
      throw ChannelError(FailureKind::kLeftBehind, "the others went on without this rank");
    const Standing now = standing(wanted, round);
    if (now.complete) {
      now.set.store_to(record(own_, round).agreed);
      decide({.sequence = round, .kind = Decision::kSuccess, .culprit = own_, .by = own_});
      continue;
    }
    const bool woken = wait_until(recovery(own_).doorbell, policy, deadline, [&] {
      if (decided()) return true;
      const Standing then = standing(wanted, round);
      return then.complete || then.missing != now.missing;
    });
    if (woken) continue;
    // No rank is missing where another rank wants to go on without this one, and waits for others itself.
    const std::vector<int> late = now.missing.empty() ? std::vector<int>{own_} : now.missing;
    waited_for_ = "timed out after " + format_duration(timeout) +
                  (now.missing.empty() ? " waiting for ranks that want to go on without this one"
                                       : " waiting for " + members_.describe(late));
    decide({.sequence = round,
            .kind = static_cast<uint64_t>(FailureKind::kTimeout),
            .culprit = late.front(),
            .by = own_});
  }
}

MembershipAgreement::Agreement MembershipAgreement::result_of(uint64_t round) const {
  Agreement agreement{.round = round, .ranks = {}, .addresses = {}, .overtaken = true, .interruption = {}};
  const Decision decided = decision();
  if (decided.sequence != round) return agreement;
  if (decided.kind != Decision::kSuccess) fail(decided);
  const auto set = agreed_by(decided.by, round);
  if (!set) return agreement;
  if (!set->contains(own_)) fail_left_behind(*set);
  for (int rank : set->ranks()) {
    const auto addresses = addresses_of(rank, round);
    if (!addresses) return agreement;
    agreement.addresses.push_back(*addresses);
  }
  agreement.ranks = set->ranks();
  agreement.overtaken = false;
  return agreement;
}

MembershipAgreement::Agreement MembershipAgreement::agree(const RankSet& wanted, const Addresses& own,
                                                          const Deadline& deadline) {
  const uint64_t round = enter(wanted, own);
  try {
    failpoint::here("shrink_entered");
    await_decision(wanted, round, deadline);
  } catch (...) {
    const bool withdrawn = decide({.sequence = round,
                                   .kind = static_cast<uint64_t>(FailureKind::kAborted),
                                   .culprit = own_,
                                   .by = own_});
    if (withdrawn) throw;
    const std::exception_ptr interruption = std::current_exception();
    Agreement agreement{.round = round, .ranks = {}, .addresses = {}, .overtaken = true, .interruption = {}};
    try {
      agreement = result_of(round);
    } catch (const ChannelError&) {
      // No rank counts on this one.
    }
    agreement.interruption = interruption;
    return agreement;
  }
  return result_of(round);
}

// ---- errors

void MembershipAgreement::fail(const Decision& decided) const {
  const auto kind = static_cast<FailureKind>(decided.kind);
  if (kind != FailureKind::kTimeout) {
    throw ChannelError(kind, members_.describe({decided.by}) + " was interrupted");
  }
  if (decided.by == own_) throw ChannelError(kind, waited_for_);
  throw ChannelError(kind,
                     members_.describe({decided.by}) + " timed out waiting for " +
                         (decided.culprit == own_ ? "this rank" : members_.describe({decided.culprit})));
}

void MembershipAgreement::fail_left_behind(const RankSet& survivors) const {
  throw ChannelError(FailureKind::kLeftBehind,
                     members_.describe(survivors.ranks()) + " went on without this rank");
}

}  // namespace lockstep::transport
