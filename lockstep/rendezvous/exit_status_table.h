#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <sys/types.h>

#include <lockstep/base/boot_clock.h>
#include <lockstep/base/deadline.h>
#include <lockstep/base/unique_fd.h>

namespace lockstep {

/// How a process ended, in words, from the status that waitpid(2) fills in: "exited with status 3" or
/// "killed by signal 9 (SIGKILL)".
std::string describe_wait_status(int wait_status);

/// Why, in training, a process ends in good order while the others still wait for it, and what helps.
inline constexpr const char* kUnequalBatches = "unequal numbers of batches: see join()";

/// A small shared memory in which a launcher notes how each of its local workers ended, and in which a worker looks when
/// it notices that a peer is gone: only the parent of a process learns its exit status. In the other direction a worker
/// notes which peer made its operations fail: the victim's process often ends before the culprit's does; and for which
/// peer it has waited for long. Where the launcher starts its workers again and again, it also notes what it knows of
/// later generations of them: one that is left over finds there that it is.
///
/// The launcher creates the table, lets the workers inherit fd() under the same number, and puts
/// environment_value() into their LOCKSTEP_EXIT_STATUS_FD. The workers' mappings of what the launcher writes
/// are read-only. Every method may be called by any thread. Movable; the mapping lives as long as the object.
class ExitStatusTable {
 public:
  static constexpr const char* kVariable = "LOCKSTEP_EXIT_STATUS_FD";

  /// An empty table for `nprocs` workers (1 to 1,048,576). Throws c10::ValueError, or c10::DistBackendError
  /// when the system refuses the memory.
  static ExitStatusTable create(int nprocs);

  /// The table of the launcher that started this process; nothing when there is none, when the variable is
  /// malformed, or when the descriptor with that number is not the launcher's (a program in between may have
  /// closed it and opened something else). Never throws for these, for the table only adds words to a
  /// message.
  static std::optional<ExitStatusTable> from_environment();

  ExitStatusTable(ExitStatusTable&& other) noexcept;
  ExitStatusTable& operator=(ExitStatusTable&& other) noexcept;
  ~ExitStatusTable();

  /// The launcher's descriptor (close-on-exec); -1 in a worker.
  int fd() const { return fd_.get(); }
  /// The text for LOCKSTEP_EXIT_STATUS_FD: "DESCRIPTOR:INODE". Launcher only.
  std::string environment_value() const;

  /// Notes that this local rank runs as process `pid`; forgets how its predecessor ended. Launcher only.
  void record_start(int local_rank, pid_t pid);
  /// Notes how it ended (a wait status) and wakes the processes that wait for that. Launcher only.
  void record_end(int local_rank, int wait_status);

  /// Generations of the job's workers, as far as the launcher knows.
  struct Generations {
    uint64_t newest = 0;                     // 0: it does not count them
    BootTime known_until = BootTime::max();  // until then no newer one is started without its knowledge
  };
  /// Launcher only.
  void record_generations(const Generations& generations);
  Generations generations() const;

  /// How the worker `pid` ended, as describe_wait_status() says it. Waits until the launcher has noted it;
  /// nothing when no worker has that pid (one of another launcher or of another pid namespace) or when the
  /// deadline passes first.
  std::optional<std::string> describe_end(pid_t pid, Deadline deadline) const;

  /// Notes that the worker `culprit` made this process's operations fail, in place of what was noted before:
  /// the program may have caught that error and gone on. Nothing happens when one of the two is no worker of
  /// this launcher. In a worker.
  void record_culprit(pid_t culprit) const;
  /// The same of a rank on another host, by its number in the job.
  void record_far_culprit(int rank) const;
  /// The local rank that this one has noted, if any. Launcher only.
  std::optional<int> culprit_of(int local_rank) const;
  /// The rank on another host that this local rank has noted, if any. Launcher only.
  std::optional<int> far_culprit_of(int local_rank) const;

  /// What a worker waits for that runs, but does not get on.
  struct LongWait {
    std::string awaited;   // the rank, as "rank 2 (pid 4242 on node-a)"; at most 103 bytes are kept
    std::string state;     // what is known of it: "it is stopped"; empty: nothing. At most 143 bytes
    int64_t since_ns = 0;  // not 0; by the host's monotonic clock
  };
  /// Notes it in place of what was noted before; nothing: this process waits for no rank any more. In a worker, by one thread
  /// at a time. Nothing happens in a process that is no worker of this launcher.
  void record_wait(const std::optional<LongWait>& wait) const;
  /// What this local rank has noted, if anything. Launcher only.
  std::optional<LongWait> wait_of(int local_rank) const;

 private:
  struct Layout;
  ExitStatusTable(UniqueFd fd, Layout* layout, size_t bytes, uint64_t count)
      : fd_(std::move(fd)), layout_(layout), bytes_(bytes), count_(count) {}
  void unmap() noexcept;
  size_t checked_index(int local_rank) const;
  std::optional<size_t> index_of(pid_t pid) const;

  UniqueFd fd_;
  Layout* layout_ = nullptr;
  size_t bytes_ = 0;
  uint64_t count_ = 0;  // not read again from the memory, which other processes can change
};

}  // namespace lockstep
