#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include <lockstep/base/monotonic_ns.h>
#include <lockstep/base/text/format_duration.h>
#include <lockstep/transport/host/host_transport.h>
#include <lockstep/transport/host/process_header.h>

// Of HostTransport: the launcher is told which rank keeps this one waiting.
namespace lockstep::transport {

/// By the monitor thread. Ranks on other hosts are not asked: this thread hears their answers. So the rank that is told of
/// may wait for another one, which its own host tells of then.
void HostTransport::look_at_own_waits() {
  const int64_t now = monotonic_ns();
  int64_t since = now;
  int awaited = -1;
  for (const WaitRecord& record : wait_records()) {
    const int64_t began = record.since_ns.load(std::memory_order_relaxed);
    if (began >= since || is_over(record)) continue;
    since = began;
    awaited = record.peer.load(std::memory_order_relaxed);
  }
  if (awaited < 0 || now - since < heartbeat_timeout_.count()) {
    if (std::exchange(has_told_wait_, false)) launcher_->record_wait(std::nullopt);
    return;
  }
  const int cause = cause_known_here({awaited});
  std::string state;
  if (is_stopped(cause)) {
    state = "it is stopped (by SIGSTOP, SIGTSTP or a debugger); kill -CONT " + std::to_string(pid_of(cause)) +
            " continues it";
  } else if (!is_here(cause)) {
    if (const std::string silence = describe_silence(cause); !silence.empty()) state = "it " + silence;
  } else if (const PhaseBoard& board =
                 header_of(peers_[cause]->bases[0].load(std::memory_order_acquire)).phases;
             const uint64_t step = board.newest_step().number) {
    const auto phase = static_cast<TrainingPhase>(board.phase.load(std::memory_order_relaxed));
    const std::chrono::nanoseconds in_phase(now - board.since_ns.load(std::memory_order_relaxed));
    state = "it has been in " + std::string(to_string(phase)) + " of step " + std::to_string(step) + " for " +
            format_duration(std::chrono::round<std::chrono::seconds>(in_phase));
  }
  has_told_wait_ = true;
  launcher_->record_wait(ExitStatusTable::LongWait{describe(cause), state, since});
}

}  // namespace lockstep::transport
