#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include <lockstep/base/deadline.h>

namespace c10d {
class Store;
}

namespace lockstep::doctor::internal {

/// Collects a text from each rank, through the store, so that what is tested (process groups) is not
/// needed to tell how the test went. Unlike store_all_gather() it goes on without a rank that does not
/// answer.
///
/// All ranks call the same methods in the same order. Rank 0 collects and publishes; one that did not answer
/// is missing from then on, and learns so with DistTimeoutError if it ever comes back. Throws
/// DistTimeoutError when rank 0 does not answer, and what the store throws. Not thread-safe.
class ReportBoard {
 public:
  using Reports = std::vector<std::optional<std::string>>;

  /// A call of the store that has no answer within `store_patience` throws c10::DistStoreError: its process is stopped, or its
  /// host cut off.
  ReportBoard(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
              std::chrono::nanoseconds store_patience = std::chrono::seconds(10));

  /// How to know that a rank's process has ended, so that it need not be waited for.
  void set_watch(std::function<bool(int rank)> has_ended) { has_ended_ = std::move(has_ended); }

  /// Every rank's text, nothing for the missing ones; the same on all ranks. A rank that does not come by rank
  /// 0's deadline is missing.
  Reports gather(const std::string& mine, const Deadline& deadline);

  /// Rank 0's text, on all ranks. Rank 0 returns when all have read it, or after 3 s: its process may host
  /// the store.
  std::string share(const std::string& from_rank_0, const Deadline& deadline);

  /// What the last gather() knew of a rank; the same on all ranks.
  enum class State { kPresent, kSilent, kEnded };
  State state(int rank) const { return states_[static_cast<size_t>(rank)]; }

 private:
  bool is_missing(int rank) const { return state(rank) != State::kPresent; }
  std::string key(const char* kind, int rank) const;
  bool is_there(const std::string& key) const;
  bool has_ended(int rank) const { return has_ended_ && has_ended_(rank); }
  bool wait_for(const std::string& key, int rank, const Deadline& deadline) const;
  std::string await_rank_0(const Deadline& deadline) const;

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  std::vector<State> states_;
  std::function<bool(int)> has_ended_;
  uint64_t round_ = 0;
};

}  // namespace lockstep::doctor::internal
