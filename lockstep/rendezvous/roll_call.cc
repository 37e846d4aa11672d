#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <lockstep/base/errors.h>
#include <lockstep/base/interrupt.h>
#include <lockstep/base/log.h>
#include <lockstep/base/ranks.h>
#include <lockstep/rendezvous/host_identity.h>
#include <lockstep/rendezvous/roll_call.h>

/// Under KEY/ in the store:
///   claim/R   how many processes say that they are rank R; more than one is a conflict
///   who/R     process and host of rank R, for messages
///   data/R    what rank R published; stays when R gives up, so that it does not count as missing
///   size      the world size, by the first that came; the others must agree
///   count     ranks that are present; a rank that gives up takes itself off
///   seen      ranks that have read the outcome, good or bad
///   verdict   set once: "complete" by the rank that brings count to world_size, "late: TEXT" by a rank 0
///   that gives up,
///             or the text of a conflict.
///   The only
///             key that waiting ranks look at.
namespace lockstep {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr const char* kComplete = "complete";
/// What a wait for other ranks may take before it is worth a line.
constexpr auto kPatience = std::chrono::seconds(30);
constexpr const char* kLate = "late: ";

std::vector<uint8_t> to_bytes(const std::string& text) {
  return {text.begin(), text.end()};
}
std::string to_text(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

class RollCall {
 public:
  RollCall(c10d::Store& store, const std::string& key, int rank, int world_size)
      : store_(store), prefix_(key + "/"), rank_(rank), world_size_(world_size) {}

  std::vector<std::string> run(const std::string& mine, Deadline deadline,
                               const std::function<void()>& while_waiting) {
    while_waiting_ = while_waiting;
    try {
      auto all = meet(mine, deadline);
      add(prefix_ + "seen", 1);
      return all;
    } catch (const c10::DistNetworkError&) {
      throw;  // the store is gone
    } catch (...) {
      if (present_) add(prefix_ + "seen", 1);
      keep_store_until_seen();
      throw;
    }
  }

  /// Rank 0 may host the store: if its process ends at once after a failure, the others can't read why. Waits
  /// until all that came have read the outcome, but not for ever.
  void keep_store_until_seen() {
    if (rank_ != 0) return;
    int64_t present = 0;
    for (int rank = 0; rank < world_size_; ++rank) present += store_.check({at("data", rank)}) ? 1 : 0;
    const auto deadline = Deadline::after(std::chrono::seconds(3));
    while (add(prefix_ + "seen", 0) < present && !deadline.expired()) {
      std::this_thread::sleep_for(milliseconds(2));
    }
  }

 private:
  std::vector<std::string> meet(const std::string& mine, Deadline deadline) {
    auto begin = Clock::now();
    claim();
    agree_on_size();
    store_.set(at("data", rank_), to_bytes(mine));
    present_ = true;
    if (add(prefix_ + "count", 1) == world_size_) decide(kComplete);
    if (!verdict_by(deadline)) give_up(Clock::now() - begin);
    auto verdict = to_text(store_.get(prefix_ + "verdict"));
    if (verdict.starts_with(kLate)) LOCKSTEP_THROW_TIMEOUT(verdict.substr(std::strlen(kLate)));
    if (verdict != kComplete) C10_THROW_ERROR(DistStoreError, verdict);
    return collect();
  }

  /// Store::add parses what is there, and says no more than "stoll" when that is no number.
  int64_t add(const std::string& key, int64_t amount) {
    try {
      return store_.add(key, amount);
    } catch (const std::logic_error&) {
      C10_THROW_ERROR(DistStoreError,
                      c10::str("the store holds no number under '", key,
                               "', which no rank of this job wrote; do not write there, and do "
                               "not use a store again that another program left behind"));
    }
  }

  std::string at(const char* kind, int rank) const { return prefix_ + kind + "/" + std::to_string(rank); }

  /// A verdict that is already there stays.
  void decide(const std::string& verdict) { store_.compareSet(prefix_ + "verdict", {}, to_bytes(verdict)); }

  void claim() {
    auto me = c10::str("process ", ::getpid(), " on ", this_host().hostname);
    if (add(at("claim", rank_), 1) == 1) {
      store_.set(at("who", rank_), to_bytes(me));
      return;
    }
    // The first one's name may be a moment behind its claim; the message does not wait for it.
    std::string other = "another process";
    if (store_.check({at("who", rank_)})) other = to_text(store_.get(at("who", rank_)));
    auto conflict =
        c10::str("rank ", rank_, " of ", world_size_, " is claimed twice, by ", other, " and by ", me,
                 "; give every process a rank of its own, let all of them initialise equally often, and "
                 "do not use a store again that an earlier job left behind (delete its file, or choose "
                 "another port)");
    decide(conflict);  // whoever still waits learns of it
    C10_THROW_ERROR(DistStoreError, conflict);
  }

  void agree_on_size() {
    auto mine = std::to_string(world_size_);
    auto first = to_text(store_.compareSet(prefix_ + "size", {}, to_bytes(mine)));
    if (first == mine) return;
    auto conflict = c10::str("rank ", rank_, " was started with world size ", mine,
                             ", but another rank with ", first, "; give all processes the same");
    decide(conflict);
    C10_THROW_ERROR(DistStoreError, conflict);
  }

  /// Polls with pauses that grow to a bound at which the store sees some 10,000 questions a second from all
  /// ranks.
  bool verdict_by(Deadline deadline) {
    const auto longest =
        std::clamp(microseconds(100) * world_size_, microseconds(5000), microseconds(100'000));
    auto pause = microseconds(50);
    auto complain = Deadline::after(kPatience);
    while (!store_.check({prefix_ + "verdict"})) {
      if (deadline.expired()) return false;
      if (complain.expired()) {
        complain = Deadline::never();
        LOCKSTEP_LOG(kWarning) << "rank " << rank_ << " has waited " << kPatience.count() << " s for "
                               << name_ranks(missing()) << " to join; are they started, with Lockstep?";
      }
      check_interrupts();
      if (while_waiting_) while_waiting_();
      std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(pause, deadline.remaining()));
      pause = std::min(pause * 3 / 2, longest);
    }
    return true;
  }

  /// Ranks that have not published anything.
  std::vector<int> missing() {
    std::vector<int> ranks;
    for (int rank = 0; rank < world_size_; ++rank) {
      if (!store_.check({at("data", rank)})) ranks.push_back(rank);
    }
    return ranks;
  }

  /// Takes this rank off the count and throws, unless the count had become full in the meantime.
  void give_up(std::chrono::nanoseconds waited) {
    if (add(prefix_ + "count", -1) == world_size_ - 1) {
      // Complete after all: the rank that completed it is about to set the verdict.
      add(prefix_ + "count", 1);
      if (verdict_by(Deadline::after(std::chrono::seconds(10)))) return;
    }
    add(at("claim", rank_), -1);
    const std::vector<int> missing = this->missing();
    auto seconds = c10::str(to_seconds(std::chrono::duration_cast<milliseconds>(waited)), " s");
    if (missing.empty()) {
      LOCKSTEP_THROW_TIMEOUT(
          c10::str("all ", world_size_, " ranks came, but not within ", seconds,
                   " of each other; start them closer together, or give a longer timeout"));
    }
    auto text = c10::str(name_ranks(missing), " of ", world_size_, " did not join within ", seconds,
                         "; see whether these processes were started, and what they printed last, or give a "
                         "longer timeout");
    // Without rank 0 nobody can go on: whoever still waits is told now, for the store may end with it.
    if (rank_ == 0) decide(kLate + text);
    LOCKSTEP_THROW_TIMEOUT(text);
  }

  std::vector<std::string> collect() {
    std::vector<std::string> keys;
    for (int rank = 0; rank < world_size_; ++rank) keys.push_back(at("data", rank));
    std::vector<std::string> all;
    for (const auto& bytes : store_.multiGet(keys)) all.push_back(to_text(bytes));
    return all;
  }

  c10d::Store& store_;
  std::string prefix_;
  int rank_;
  int world_size_;
  bool present_ = false;  // this rank's data are published
  std::function<void()> while_waiting_;
};

}  // namespace

void keep_store_until_seen(c10d::Store& store, const std::string& key, int rank, int world_size) {
  if (world_size == 1) return;
  try {
    RollCall(store, key, rank, world_size).keep_store_until_seen();
  } catch (const c10::Error&) {
    // The store is gone already; the caller's own error says more.
  }
}

void forget_exchange(c10d::Store& store, const std::string& key, int world_size) {
  if (world_size == 1) return;
  for (const char* name : {"size", "count", "seen", "verdict"}) store.deleteKey(key + "/" + name);
  for (int rank = 0; rank < world_size; ++rank) {
    for (const char* kind : {"claim", "who", "data"}) {
      store.deleteKey(key + "/" + kind + "/" + std::to_string(rank));
    }
  }
}

std::vector<std::string> exchange(c10d::Store& store, const std::string& key, int rank, int world_size,
                                  const std::string& mine, Deadline deadline,
                                  const std::function<void()>& while_waiting) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < world_size, "rank ", rank, " is not in [0, ", world_size, ")");
  if (world_size == 1) return {mine};
  try {
    return RollCall(store, key, rank, world_size).run(mine, deadline, while_waiting);
  } catch (const c10::DistNetworkError& error) {
    C10_THROW_ERROR(
        DistStoreError,
        c10::str("rank ", rank, " of ", world_size, " lost the store while it waited for its peers; the ",
                 "process that hosts it (rank 0, or the launcher's agent) has ended: ",
                 error.what_without_backtrace()));
  }
}

}  // namespace lockstep
