#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include <lockstep/base/environment.h>
#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/base/process/fork_guard.h>
#include <lockstep/base/process/per_process.h>
#include <lockstep/base/training/step_mark.h>
#include <lockstep/profiler/internal/kineto.h>
#include <lockstep/profiler/internal/running_profilers.h>
#include <lockstep/profiler/profile_settings.h>

/// LOCKSTEP_PROFILE: a program that knows nothing of the Profiler gets one in the thread that trains, whose steps begin at
/// the marks that loaders and DistributedDataParallel make.
namespace lockstep::profiler {
namespace {

constexpr const char* kProfileVariable = "LOCKSTEP_PROFILE";

ProfileSettings settings_from_environment() {
  return parse_profile_settings(environment::text(kProfileVariable).value_or("1"));
}

/// SIGUSR2 has come, and nothing is recorded for it yet.
std::atomic<bool> asked_by_signal{false};
static_assert(std::atomic<bool>::is_always_lock_free);

/// In the thread that trains, which is the first that makes a mark; while it records nothing, one that makes a more telling
/// mark takes its place. Kineto records the thread that begins and ends it. Others' marks are thread-safe.
class UnattendedProfile {
 public:
  /// What is malformed in the variable is thrown at the program's first step; what goes wrong later does not end a training.
  void on_mark(StepMark mark, const void* source) {
    if (!is_owner(mark)) return;
    const std::lock_guard lock(mutex_);
    if (phase_ == Phase::kOver || !is_owner(mark)) return;
    owner_ = std::this_thread::get_id();
    owners_mark_ = std::max(owners_mark_.load(), static_cast<int>(mark));
    if (!settings_) settings_ = settings_from_environment();
    if (!counter_.begins(mark, source)) return;
    const bool waits = phase_ == Phase::kWaiting;
    if (waits && settings_->on_signal && !asked_by_signal.exchange(false, std::memory_order_relaxed)) return;
    if (waits && internal::running_profilers > 0) {
      LOCKSTEP_LOG(kWarning)
          << "LOCKSTEP_PROFILE: the program runs a Profiler of its own, so this one records nothing";
      return end();
    }
    try {
      if (waits) {
        profiler_ = std::make_unique<Profiler>(settings_->options());
        phase_ = Phase::kRecording;
      } else {
        profiler_->step();
      }
      if (settings_->is_done(profiler_->step_num())) {
        LOCKSTEP_LOG(kWarning)
            << "LOCKSTEP_PROFILE: the trace is written; read it with: lockstep inspect trace "
            << settings_->dir;
        end();
      }
    } catch (const std::exception& error) {
      LOCKSTEP_LOG(kError) << "LOCKSTEP_PROFILE: what was to be recorded is lost: " << text_of(error);
      end();
    }
  }

  /// Before another Profiler starts, in the same thread: a process has one that records.
  void give_way() {
    if (phase_ != Phase::kRecording || owner_.load() != std::this_thread::get_id()) return;
    const std::lock_guard lock(mutex_);
    LOCKSTEP_LOG(kWarning) << "LOCKSTEP_PROFILE: the program starts a Profiler of its own, so this one ends";
    end();
  }

  /// At the end of the process Kineto can't be ended any more: what belongs to the thread is gone.
  void at_exit(bool wanted_at_once) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return;  // another thread makes steps, or writes a trace
    if (!settings_ && wanted_at_once) {
      LOCKSTEP_LOG(kWarning)
          << "LOCKSTEP_PROFILE: nothing was recorded, for the program has made no step that is known: no "
             "DistributedDataParallel, FullyShardedDataParallel or pipeline was trained, and no DataLoader "
             "or ParquetBatches read";
    }
    if (phase_ != Phase::kRecording || settings_->schedule.repeat == 0) return;
    LOCKSTEP_LOG(kWarning) << "LOCKSTEP_PROFILE: the program has ended in step " << profiler_->step_num()
                           << ", in the middle of a cycle, which is not written; ask for fewer steps";
  }

 private:
  enum class Phase : uint8_t {
    kWaiting,    // for a step, or for a signal
    kRecording,  // with profiler_
    kOver,
  };

  bool is_owner(StepMark mark) const {
    return owner_.load() == std::this_thread::get_id() ||
           (phase_ != Phase::kRecording && static_cast<int>(mark) > owners_mark_);
  }
  /// For a reason that the log has.
  void end() {
    phase_ = settings_->on_signal ? Phase::kWaiting : Phase::kOver;
    internal::end_explained(std::move(profiler_));
  }

  std::atomic<std::thread::id> owner_{};
  std::atomic<int> owners_mark_{-1};           // the most telling it has made, as a StepMark
  std::atomic<Phase> phase_{Phase::kWaiting};  // changed with mutex_ held
  std::mutex mutex_;
  std::optional<ProfileSettings> settings_;  // this and what follows: guarded by mutex_
  StepCounter counter_;
  std::unique_ptr<Profiler> profiler_;
};

PerProcess<UnattendedProfile> unattended_profile;
bool records_at_once = false;  // this rank, and not when a signal asks for it

/// A program that handles the signal itself keeps it.
void listen_to_signal() {
  struct sigaction action {};
  ::sigaction(SIGUSR2, nullptr, &action);
  if ((action.sa_flags & SA_SIGINFO) != 0 || action.sa_handler != SIG_DFL) return;
  action = {};
  action.sa_handler = [](int) { asked_by_signal.store(true, std::memory_order_relaxed); };
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGUSR2, &action, nullptr);
}

[[maybe_unused]] const bool listens_to_steps = [] {
  if (!environment::text(kProfileVariable)) return false;
  try {
    records_at_once = !settings_from_environment().on_signal;
    if (!records_at_once) listen_to_signal();
  } catch (const std::exception&) {
    // The first step says it, where it can be caught.
  }
  step_mark_listener.store(
      [](StepMark mark, const void* source) { unattended_profile.get().on_mark(mark, source); },
      std::memory_order_release);
  internal::before_profiler_starts.store([] { unattended_profile.get().give_way(); },
                                         std::memory_order_release);
  // Launchers and their children that don't train have the variable, too, but no rank.
  static const ForkGuard fork_guard;
  if (!environment::text("RANK")) records_at_once = false;
  if (records_at_once) internal::quieten_kineto();  // while the program has no threads yet
  std::atexit([] {
    if (!fork_guard.in_forked_child()) unattended_profile.get().at_exit(records_at_once);
  });
  return true;
}();

}  // namespace
}  // namespace lockstep::profiler
