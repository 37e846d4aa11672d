#pragma once

#include <cstdint>
#include <optional>
#include <sys/types.h>
#include <vector>

#include <lockstep/base/training/training_phases.h>

namespace lockstep::transport {

/// What a rank's shared memory says of it to a process that has no part in its job: who it is, and how its training goes.
/// A value, of one moment. Times are the host's monotonic clock's.
struct RankMemory {
  pid_t pid = 0;       ///< as this process's /proc has it
  int rank = 0;        ///< in the job
  int world_size = 0;  ///< the job's
  pid_t first_pid =
      0;  ///< of the first rank on this host, as the ranks call it: the same for all ranks of a job, while it runs
  uint64_t pid_namespace = 0;             ///< of first_pid: containers have the same numbers
  uint64_t steps = 0;                     ///< that have begun, as training_phases.h counts them
  uint64_t step_samples = 0;              ///< that loaders had given when the newest step began
  int64_t step_began_ns = 0;              ///< when that was
  std::optional<int64_t> told_step = {};  ///< as the training loop counts, where it tells
  std::optional<double> loss = {};        ///< that it has told last
  TrainingPhase phase = TrainingPhase::kNone;
  int64_t since_ns = 0;                  ///< when the phase began
  std::optional<PhaseTimes> times = {};  ///< medians of the last 20 steps
  std::vector<int>
      awaited;  ///< ranks of the job that it waits for, in waits that have lasted long enough to sleep
};

struct RankMemories {
  std::vector<RankMemory> ranks = {};    ///< by job and rank
  std::vector<pid_t> other_layout = {};  ///< processes whose memory another version of Lockstep has laid out
};

/// The memory of all ranks of this host that this user may read: the own ones, and for root all. However they were started:
/// a rank keeps its memory open, and the kernel shows it below /proc/PID/fd. Nothing is written, and no rank notices.
/// Ranks that have not met the others yet are left out. Thread-safe.
RankMemories read_rank_memories();

}  // namespace lockstep::transport
