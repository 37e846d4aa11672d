#include <atomic>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <memory>
#include <optional>
#include <thread>

#include <lockstep/base/environment.h>
#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/base/process/per_process.h>
#include <lockstep/base/step_mark.h>
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

/// Not thread-safe: a thread that makes marks while another one is profiled has to be told apart before.
class UnattendedProfile {
 public:
  /// What is malformed in the variable is thrown at the program's first step; what goes wrong later does not end a training.
  void on_mark(StepMark mark, const void* source) {
    if (over_) return;
    if (!settings_) settings_ = settings_from_environment();
    if (!counter_.begins(mark, source)) return;
    if (!profiler_ && settings_->on_signal && !asked_by_signal.exchange(false, std::memory_order_relaxed))
      return;
    if (!profiler_ && internal::running_profilers > 0) {
      LOCKSTEP_LOG(kWarning)
          << "LOCKSTEP_PROFILE: the program runs a Profiler of its own, so this one records nothing";
      over_ = !settings_->on_signal;
      return;
    }
    try {
      if (profiler_) {
        profiler_->step();
      } else {
        profiler_ = std::make_unique<Profiler>(settings_->options());
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
    if (!profiler_) return;
    LOCKSTEP_LOG(kWarning) << "LOCKSTEP_PROFILE: the program starts a Profiler of its own, so this one ends";
    end();
  }

  /// At the end of the process Kineto can't be ended any more: what belongs to the thread is gone.
  void at_exit() const {
    if (over_ || !profiler_ || settings_->schedule.repeat == 0) return;
    LOCKSTEP_LOG(kWarning) << "LOCKSTEP_PROFILE: the program has ended in step " << profiler_->step_num()
                           << ", in the middle of a cycle, which is not written; ask for fewer steps";
  }

 private:
  void end() {
    over_ = !settings_->on_signal;
    profiler_.reset();
  }

  std::optional<ProfileSettings> settings_;
  StepCounter counter_;
  std::unique_ptr<Profiler> profiler_;
  bool over_ = false;
};

PerProcess<UnattendedProfile> unattended_profile;
/// The thread that has made the first mark; Kineto records that one.
std::atomic<std::thread::id> profiled_thread{};

void on_step_mark(StepMark mark, const void* source) {
  std::thread::id first{};
  const std::thread::id own = std::this_thread::get_id();
  if (profiled_thread.compare_exchange_strong(first, own)) {
    std::atexit([] { unattended_profile.get().at_exit(); });
  } else if (first != own) {
    return;
  }
  unattended_profile.get().on_mark(mark, source);
}

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
    if (settings_from_environment().on_signal) listen_to_signal();
  } catch (const std::exception&) {
    // The first step says it, where it can be caught.
  }
  step_mark_listener.store(on_step_mark, std::memory_order_release);
  internal::before_profiler_starts.store(
      [] {
        // Kineto can be ended only in the thread that it records.
        if (profiled_thread.load() == std::this_thread::get_id()) unattended_profile.get().give_way();
      },
      std::memory_order_release);
  return true;
}();

}  // namespace
}  // namespace lockstep::profiler
