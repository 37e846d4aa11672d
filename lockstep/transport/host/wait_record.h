#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>

#include <lockstep/transport/host/memory/arena.h>

namespace lockstep::transport {

/// What one thread of a rank waits for, where its peers read it to find out which rank keeps all of them
/// waiting. Ranks are the transport's. One writer at a time. Readers may see a record change: they judge by a
/// mix of two then, and at worst name a rank between themselves and the cause.
struct alignas(64) WaitRecord {
  std::atomic<uint32_t> used{0};
  std::atomic<int32_t> peer{0};      // the rank that is waited for
  std::atomic<int32_t> owner{0};     // the rank in whose arena the word lies
  std::atomic<uint64_t> word{0};     // packed reference of the word that changes when the wait is over
  std::atomic<uint64_t> value{0};    // the wait is over once the word is at least this
  std::atomic<int64_t> since_ns{0};  // when it began, by the host's monotonic clock
};

/// Records of the waits of one process that have lasted long enough to sleep. More threads than records: the others'
/// waits are not seen.
using WaitRecords = std::array<WaitRecord, 16>;

/// Which rank has kept one waiting in vain: for some seconds from its deadline on, while it looks for the cause and fails,
/// the others that wait for it find out here what held it up. Thread-safe.
class GivenUpWait {
 public:
  struct Cause {
    int rank;      // of the transport
    bool stopped;  // as was heard from its host, where that is another one
  };
  void note(const Cause& cause);
  std::optional<Cause> recent_cause() const;
  /// It goes on: a recent cause becomes one of now.
  void renew();

 private:
  std::atomic<uint64_t> word_{0};  // the cause, and when it was noted; 0: none yet
};

/// A wait in progress, recorded while this lives. Thread-safe.
class RecordedWait {
 public:
  RecordedWait(WaitRecords& records, int peer, int owner, const MemoryReference& word, uint64_t value,
               int64_t since_ns);
  RecordedWait(const RecordedWait&) = delete;
  RecordedWait& operator=(const RecordedWait&) = delete;
  ~RecordedWait();

  int64_t since_ns() const { return since_ns_; }

 private:
  WaitRecord* record_ = nullptr;
  int64_t since_ns_;
};

}  // namespace lockstep::transport
