#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <sys/types.h>

#include <lockstep/base/training/training_phases.h>
#include <lockstep/transport/host/wait_record.h>

namespace lockstep::transport {

/// How a rank of another host has ended: for the neighbours, who were not told themselves.
struct EndOfFarRank {
  std::atomic<int32_t> rank{-1};  // of the transport; stored last (release)
  bool certain = false;           // its host, or the rank itself, says so; else it is out of reach
  std::array<char, 256> text{};   // ends with 0
};

/// The first bytes of every process's first segment: its identity, the note that it leaves when it ends,
/// what it waits for, what it has heard, and how its training goes.
struct alignas(64) ProcessHeader {
  static constexpr uint64_t kMagic = 0x385054534b434f4cULL;  // "LOCKSTP8"; another last byte for each layout
  uint64_t magic = 0;
  int32_t pid = 0;
  int32_t rank = 0;  // in the job
  int32_t world_size = 0;
  int32_t index = 0;  // the rank in the transport, as `waits` call it
  // Of this host's first rank, once all have met; 0 before. It tells the jobs of a host apart: see read_rank_memories().
  std::atomic<int32_t> first_pid{0};
  std::atomic<uint32_t> note{0};  // 0: running; see leave_note. Release store, acquire load.
  WaitRecords waits;
  GivenUpWait given_up;
  std::array<EndOfFarRank, 8> far_ends;  // the first ones; written by one thread at a time
  PhaseBoard phases;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

inline ProcessHeader& header_of(std::byte* first_segment) {
  return *reinterpret_cast<ProcessHeader*>(first_segment);
}

enum class EndKind : uint32_t { kRunning = 0, kLeft = 1, kExit = 2, kSignal = 3 };

/// Writes how this process ends, unless a note is already there. Async-signal-safe.
void leave_note(ProcessHeader& header, EndKind kind, int code);
EndKind note_kind(const ProcessHeader& header);

/// From now on exit(3) and crashes by SIGSEGV, SIGBUS, SIGILL, SIGFPE and SIGABRT leave a note in the header.
/// Handlers are installed once, only for signals whose action is the default, and end the process as the
/// default would; where another room's handler is there already, it leaves the note (base/process/end_hook.h). A
/// forked child leaves none.
void watch_process_end(ProcessHeader& header);
void unwatch_process_end(ProcessHeader& header);

/// What describe_process_end() says of EndKind::kLeft.
std::string describe_good_end();
/// How the process ended, in words, from its note, the launcher's exit status table, or the kernel
/// (PIDFD_GET_INFO, /proc): whichever knows within about 50 ms of its end (see known_end()). `pidfd` may be -1.
std::string describe_process_end(const ProcessHeader& header, pid_t pid, int pidfd);

}  // namespace lockstep::transport
