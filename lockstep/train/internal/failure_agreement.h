#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include <lockstep/collectives/process_group.h>

namespace lockstep::train::internal {

/// What went wrong on a rank.
enum class FailureCause {
  kPeer,         // a collective failed, because of another rank
  kOutOfMemory,  // an allocation did
  kOther,
};

/// c10::OutOfMemoryError (a device's), std::bad_alloc, what LibTorch's CPU allocator throws, and what cuBLAS
/// and NCCL say of a device without memory, also where they are nested in another error, are kOutOfMemory;
/// any other c10::DistBackendError is kPeer.
FailureCause kind_of(const std::exception_ptr& failure);

/// A rank's part of the agreement.
struct FailureReport {
  FailureCause kind = FailureCause::kOther;
  std::string text;
  int64_t step = 0;                 // that it has done
  int64_t largest_micro_batch = 0;  // samples
  bool can_repeat = false;          // it is within a step that it can do again
  bool can_save = false;            // what it holds is a state between two steps
};

struct FailureAgreement {
  ProcessGroup group;                  // of the ranks that are left; the new default group
  std::vector<FailureReport> reports;  // theirs, by rank in `group`
  std::vector<int> former_ranks;       // and what rank each had before
  bool any_rank_died = false;
};

/// To be called by all living ranks after a failure, each with its own report, wherever it struck them: ends
/// what the others wait for, makes a new default group of the ranks that live, and gathers their reports.
/// Destroys all groups. When a rank has run out of memory, all give back what torch keeps of their devices'
/// memory (empty_device_cache()), as ranks may share a device. Without a process group, and with one rank,
/// there is only the own report. Throws DistTimeoutError when a rank that lives does not come within
/// `timeout`, and, over several hosts, c10::DistStoreError on a rank that does not reach the job's store.
FailureAgreement agree_on_failure(const FailureReport& mine, std::chrono::milliseconds timeout);

}  // namespace lockstep::train::internal
