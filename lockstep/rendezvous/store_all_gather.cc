#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <thread>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <lockstep/base/errors.h>
#include <lockstep/base/exception_text.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/log.h>
#include <lockstep/base/process/interrupt.h>
#include <lockstep/base/ranks.h>
#include <lockstep/base/text/printable.h>
#include <lockstep/rendezvous/internal/text_store.h>
#include <lockstep/rendezvous/process_watch.h>
#include <lockstep/rendezvous/protocol_version.h>
#include <lockstep/rendezvous/store_all_gather.h>

/// Under KEY/ in the store:
///   claim/R   how many processes say that they are rank R; more than one is a conflict
///   who/R     the process of rank R; empty once it has given up
///   data/R    what rank R published; stays when R gives up, so that it does not count as missing
///   size      "SIZE VERSION WHO": the world size and kProtocolVersion, by the first that came, with which the others
///             must agree, and who that is and runs what. The same in every version of Lockstep, so that two can say that
///             they differ
///   count     ranks that are present; a rank that gives up takes itself off
///   seen/R    rank R has read the outcome, good or bad
///   outcome   set once: "complete" by a rank that finds count at world_size (the last to come, or another if
///             that one ends at this moment), "late: TEXT" by a rank that gives up (rank 0; any, where all
///             have met before), "failed: TEXT" by a rank that finds a peer ended or is interrupted, or the
///             text of a conflict. The only key that waiting ranks look at all the time.
namespace lockstep {
namespace {

using rendezvous_internal::kStoreGrace;
using rendezvous_internal::TextStore;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr const char* kComplete = "complete";
constexpr const char* kLate = "late: ";
constexpr const char* kFailed = "failed: ";
/// What a wait for other ranks may take before it is worth a line.
constexpr auto kPatience = std::chrono::seconds(30);
/// How often a waiting rank looks for more than the outcome.
constexpr auto kLookInterval = milliseconds(250);

class StoreAllGather {
 public:
  /// `met_at`: the all-gather whose who/R tells the processes; empty: this one.
  StoreAllGather(c10d::Store& store, const std::string& key, int rank, int world_size,
                 const std::string& met_at, Deadline deadline)
      : store_(store, deadline, [this] { return describe_silence(); }),
        prefix_(key + "/"),
        rank_(rank),
        world_size_(world_size),
        who_prefix_((met_at.empty() ? key : met_at) + "/who/"),
        have_met_(!met_at.empty()),
        deadline_(deadline),
        own_(this_process()) {}

  std::vector<std::string> run(const std::string& mine, const std::function<void()>& while_waiting) {
    while_waiting_ = while_waiting;
    try {
      auto all = meet(mine);
      store_.set(at("seen", rank_), "1");
      return all;
    } catch (const Interruption&) {
      fail_for_others();
      tell_and_keep_store();
      throw;
    } catch (const c10::DistNetworkError& error) {
      fail_without_store(error);
    } catch (...) {
      tell_and_keep_store();
      throw;
    }
  }

  [[noreturn]] void fail(const std::string& text, bool late) {
    std::string outcome = (late ? kLate : kFailed) + text;
    try {
      decide(outcome);
      const auto decided = store_.get(prefix_ + "outcome");
      if (decided != kComplete) outcome = decided;
      present_ = true;
      tell_and_keep_store();
    } catch (const c10::Error&) {
      // The store is lost: what this rank knows must do.
    }
    throw_outcome(outcome);
  }

  bool is_decided() { return store_.check(prefix_ + "outcome"); }

  void forget() {
    for (const char* name : {"size", "count", "outcome"}) store_.remove(prefix_ + name);
    for (int rank = 0; rank < world_size_; ++rank) {
      for (const char* kind : {"claim", "who", "data", "seen"}) store_.remove(at(kind, rank));
    }
  }

  /// Rank 0 may host the store: if its process ends at once after a failure, the others can't read why. Waits
  /// until all that came have read the outcome, but not for ever.
  void keep_store_until_seen() {
    if (rank_ != 0) return;
    const auto patience = Deadline::after(std::chrono::seconds(3));
    for (int peer = 1; peer < world_size_; ++peer) {
      if (!have_met_ && !store_.check(at("claim", peer))) continue;
      while (!store_.check(at("seen", peer)) && !has_ended(peer) && !patience.expired()) {
        check_interrupts();
        std::this_thread::sleep_for(milliseconds(2));
      }
    }
  }

 private:
  std::vector<std::string> meet(const std::string& mine) {
    const auto begin = Clock::now();
    claim();
    failpoint::here("meet_claimed");
    agree_on_size_and_version();
    store_.set(at("data", rank_), mine);
    present_ = true;
    failpoint::here("meet_published");
    if (rank_ != 0 && (!while_waiting_ || have_met_))
      has_ended(0);  // known before the store that it may host is lost
    const bool complete = store_.add(prefix_ + "count", 1) == world_size_;
    failpoint::here("meet_counted");
    if (complete) decide(kComplete);
    if (!outcome_by_deadline()) give_up(Clock::now() - begin);
    const auto outcome = store_.get(prefix_ + "outcome");
    if (outcome != kComplete) throw_outcome(outcome);
    auto all = collect();
    failpoint::here("meet_met");
    return all;
  }

  [[noreturn]] static void throw_outcome(const std::string& outcome) {
    if (outcome.starts_with(kLate)) LOCKSTEP_THROW_TIMEOUT(outcome.substr(std::strlen(kLate)));
    if (outcome.starts_with(kFailed)) C10_THROW_ERROR(DistBackendError, outcome.substr(std::strlen(kFailed)));
    C10_THROW_ERROR(DistStoreError, outcome);
  }

  // ---- the store

  /// Why the store has not answered in time.
  std::string describe_silence() const {
    std::string text = c10::str("rank ", rank_, " of ", world_size_, " has no answer from the store at the ",
                                "timeout: the process that hosts it (rank 0, or the launcher's agent) is ",
                                "stopped, or its host can't be reached any more");
    return text + describe_stop(0);
  }

  /// "; rank 1 (pid 42) is stopped (…)" if the rank is known and is; else empty.
  std::string describe_stop(int peer) const {
    const auto found = known_.find(peer);
    const std::string stop = found == known_.end() ? "" : found->second.watch.describe_stop();
    return stop.empty() ? "" : c10::str("; rank ", peer, " ", stop);
  }

  std::string at(const char* kind, int rank) const { return prefix_ + kind + "/" + std::to_string(rank); }

  /// An outcome that is already there stays.
  void decide(const std::string& outcome) { store_.set_first(prefix_ + "outcome", outcome); }

  /// This rank is interrupted: the others must not wait for it, nor go on without it.
  void fail_for_others() {
    if (!present_ || store_.lost()) return;
    try {
      decide(c10::str(kFailed, "rank ", rank_, " was interrupted"));
    } catch (const c10::Error&) {
      // The store is lost: the others find this out by themselves.
    }
  }

  /// After a failure. What this rank throws is known already: an error here would only hide it. A further
  /// interruption ends the wait.
  void tell_and_keep_store() {
    if (store_.lost()) return;
    try {
      if (present_) store_.set(at("seen", rank_), "1");
      keep_store_until_seen();
    } catch (const c10::Error&) {
    }
  }

  // ---- coming

  void claim() {
    const std::string mine = own_.to_string();
    if (store_.add(at("claim", rank_), 1) == 1) {
      store_.set(at("who", rank_), mine);
      return;
    }
    // The first one's name may come a moment after its claim; the message does not wait for it.
    const std::string other = store_.check(at("who", rank_)) ? store_.get(at("who", rank_)) : "";
    // Rank 0 closes its store when it has destroyed its group, and others may be here again before.
    auto conflict = c10::str("rank ", rank_, " of ", world_size_, " is claimed twice, by ",
                             name_process(other), " and by ", name_process(mine));
    conflict += other != mine ? "; give every process a rank of its own, let all of them initialise equally "
                                "often, and do not use a store again that an earlier job left behind (delete "
                                "its file, or choose another port)"
                              : "; this process has been in an earlier group at this store; initialise again "
                                "at another port, or once rank 0 has destroyed that group, too";
    decide(conflict);  // a rank that still waits learns of it
    C10_THROW_ERROR(DistStoreError, conflict);
  }

  static std::string name_process(const std::string& who) {
    try {
      const auto process = ProcessIdentity::parse(who);
      return c10::str("process ", process.pid, " on ", process.host.hostname);
    } catch (const c10::ValueError&) {
      return "another process";
    }
  }

  void agree_on_size_and_version() {
    const auto self = c10::str("rank ", rank_, ", process ", own_.pid, " on ", own_.host.hostname, ", runs ",
                               own_version());
    std::istringstream first(
        store_.set_first(prefix_ + "size", c10::str(world_size_, ' ', kProtocolVersion, ' ', self)));
    std::string size, other;
    uint32_t version = 0;  // stays so where none is told
    first >> size >> version >> std::ws;
    std::getline(first, other);
    std::string conflict;
    if (version != kProtocolVersion) {
      if (other.empty()) other = "another rank runs a Lockstep that does not tell its version";
      conflict =
          c10::str(self, ", but ", printable(other, /*most=*/500),
                   "; they would misread each other: install the same Lockstep on all hosts, and build the "
                   "program with it");
    } else if (size != std::to_string(world_size_)) {
      conflict = c10::str("rank ", rank_, " was started with world size ", world_size_,
                          ", but another rank with ", printable(size), "; give all processes the same");
    }
    if (conflict.empty()) return;
    decide(conflict);
    store_.set(at("seen", rank_), "1");  // so that rank 0 does not wait for this one
    C10_THROW_ERROR(DistStoreError, conflict);
  }

  // ---- waiting

  /// Polls with pauses that grow to a bound at which the store sees some 10,000 questions a second from all
  /// ranks.
  bool outcome_by_deadline() {
    const auto longest =
        std::clamp(microseconds(100) * world_size_, microseconds(5000), microseconds(100'000));
    auto pause = microseconds(50);
    auto complain = Deadline::after(kPatience);
    auto look = Deadline::after(kLookInterval);
    while (!is_decided()) {
      if (deadline_.expired()) return false;
      if (complain.expired()) {
        complain = Deadline::never();
        LOCKSTEP_LOG(kWarning) << "rank " << rank_ << " has waited " << kPatience.count() << " s for "
                               << name_ranks(missing()) << " to join; are they started, with Lockstep?";
      }
      check_interrupts();
      if (while_waiting_) {
        try {
          while_waiting_();
        } catch (const c10::Error& error) {
          decide(kFailed + text_of(error));
          continue;
        }
      }
      if (look.expired()) {
        look = Deadline::after(kLookInterval);
        look_around();
      }
      std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(pause, deadline_.remaining()));
      pause = std::min(pause * 3 / 2, longest);
    }
    return true;
  }

  /// Sets the outcome where it is due.
  void look_around() {
    // The last to come may have ended between its count and its outcome.
    if (store_.number(prefix_ + "count") == world_size_) return decide(kComplete);
    if (while_waiting_) return;
    if (const auto end = find_end()) {
      decide(c10::str(kFailed, "joining the job failed on rank ", rank_, ": ", *end));
    }
  }

  /// A rank that has come.
  struct Known {
    std::string who;
    ProcessWatch watch;
  };

  /// Each rank is watched by the one before it that lives: this one looks at those after it, up to the first
  /// that has come and lives. "rank 2 (pid 42) killed by signal 9 (SIGKILL)"
  std::optional<std::string> find_end() {
    for (int step = 1; step < world_size_; ++step) {
      const int peer = (rank_ + step) % world_size_;
      if (has_ended(peer)) return c10::str("rank ", peer, " ", known_.at(peer).watch.describe_end());
      const auto found = known_.find(peer);
      if (found != known_.end() && found->second.watch.can_tell()) break;
    }
    return std::nullopt;
  }

  /// Whether the process of a rank has come, and has ended without giving up.
  bool has_ended(int peer) {
    const std::string key = who_prefix_ + std::to_string(peer);
    auto found = known_.find(peer);
    if (found == known_.end()) {
      if (!store_.check(key)) return false;
      const auto who = store_.get(key);
      try {
        found = known_.emplace(peer, Known{who, ProcessWatch(ProcessIdentity::parse(who), own_)}).first;
      } catch (const c10::ValueError&) {
        return false;  // the rank has given up, or no rank wrote this
      }
    }
    if (!found->second.watch.has_ended()) return false;
    if (store_.get(key) == found->second.who) return true;
    known_.erase(found);  // it had given up, and another process may come in its place
    return false;
  }

  /// Ranks that have not published anything.
  std::vector<int> missing() {
    std::vector<int> ranks;
    for (int rank = 0; rank < world_size_; ++rank) {
      if (!store_.check(at("data", rank))) ranks.push_back(rank);
    }
    return ranks;
  }

  /// Takes this rank off the count and throws, unless there is an outcome then.
  void give_up(std::chrono::nanoseconds waited) {
    look_around();
    if (is_decided()) return;
    if (store_.add(prefix_ + "count", -1) == world_size_ - 1) {  // complete at the last moment
      store_.add(prefix_ + "count", 1);
      decide(kComplete);
      return;
    }
    store_.add(at("claim", rank_), -1);
    store_.set(at("who", rank_), "");
    const std::vector<int> missing = this->missing();
    auto seconds = c10::str(to_seconds(std::chrono::duration_cast<milliseconds>(waited)), " s");
    std::string text =
        missing.empty()
            ? c10::str("all ", world_size_, " ranks came, but were not there together within ", seconds,
                       ": one gave up, or ended, before the last came; see what they printed last, start "
                       "them closer together, or give a longer timeout")
            : c10::str(name_ranks(missing), " of ", world_size_, " did not join within ", seconds,
                       "; see whether these processes were started, and what they printed last, or give a "
                       "longer timeout");
    for (int peer = 0; peer < world_size_ && !is_decided(); ++peer) {
      if (peer != rank_ && !has_ended(peer)) text += describe_stop(peer);
    }
    // Those that still wait are told now where they can't go on: without rank 0, with which the store may
    // end, or where the ranks have met before, so that no other process takes this one's place.
    if (rank_ == 0 || have_met_) return decide(kLate + text);
    LOCKSTEP_THROW_TIMEOUT(text);
  }

  std::vector<std::string> collect() {
    std::vector<std::string> keys;
    for (int rank = 0; rank < world_size_; ++rank) keys.push_back(at("data", rank));
    return store_.get_all(keys);
  }

  /// The store's process has ended: says whose that was, where this can be known.
  [[noreturn]] void fail_without_store(const c10::DistNetworkError& error) {
    std::string host = "the process that hosts it (rank 0, or the launcher's agent) has ended";
    const auto found = known_.find(0);
    const auto patience = Deadline::after(milliseconds(200));
    while (!patience.expired()) {
      if (while_waiting_) while_waiting_();  // throws what it knows
      if (found != known_.end() && found->second.watch.has_ended()) {
        host = "rank 0 " + found->second.watch.describe_end();
        break;
      }
      std::this_thread::sleep_for(milliseconds(5));
    }
    C10_THROW_ERROR(DistStoreError,
                    c10::str("rank ", rank_, " of ", world_size_, " lost the store while it waited for its ",
                             "peers; ", host, ": ", text_of(error)));
  }

  TextStore store_;
  std::string prefix_;
  int rank_;
  int world_size_;
  std::string who_prefix_;
  bool have_met_;  // all ranks have come to an earlier all-gather
  Deadline deadline_;
  ProcessIdentity own_;
  bool present_ = false;  // this rank's data are published
  std::function<void()> while_waiting_;
  std::map<int, Known> known_;  // by rank
};

}  // namespace

void keep_store_until_seen(c10d::Store& store, const std::string& key, int rank, int world_size) {
  if (world_size == 1) return;
  try {
    StoreAllGather(store, key, rank, world_size, "", Deadline::after(kStoreGrace)).keep_store_until_seen();
  } catch (const c10::Error&) {
    // The store is gone already; the caller's own error says more.
  }
}

void fail_store_all_gather(c10d::Store& store, const std::string& key, int rank, int world_size,
                           const std::string& text, bool late, const std::string& met_at) {
  StoreAllGather(store, key, rank, world_size, met_at, Deadline::after(kStoreGrace)).fail(text, late);
}

bool store_all_gather_is_decided(c10d::Store& store, const std::string& key, int rank, int world_size) {
  return StoreAllGather(store, key, rank, world_size, "", Deadline::after(kStoreGrace)).is_decided();
}

void forget_store_all_gather(c10d::Store& store, const std::string& key, int world_size) {
  if (world_size == 1) return;
  StoreAllGather(store, key, 0, world_size, "", Deadline::after(kStoreGrace)).forget();
}

std::vector<std::string> store_all_gather(c10d::Store& store, const std::string& key, int rank,
                                          int world_size, const std::string& mine, Deadline deadline,
                                          const std::function<void()>& while_waiting,
                                          const std::string& met_at) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < world_size, "rank ", rank, " is not in [0, ", world_size, ")");
  if (world_size == 1) return {mine};
  return StoreAllGather(store, key, rank, world_size, met_at, deadline).run(mine, while_waiting);
}

}  // namespace lockstep
