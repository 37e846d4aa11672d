#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <sys/eventfd.h>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/base/process/background_thread.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/launch/control_plane/host_reporter.h>

namespace lockstep::launch {
namespace {

constexpr std::chrono::seconds kBetweenReports{1};
constexpr std::chrono::seconds kPatienceWithReport{2};

}  // namespace

struct HostReporter::Shared {
  explicit Shared(std::function<std::string()> what)
      : report(std::move(what)), event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    TORCH_CHECK_WITH(DistBackendError, event, "eventfd: ", std::strerror(errno));
  }

  void run() {
    std::string told;
    std::unique_lock lock(mutex);
    while (phase == Phase::kRunning) {
      lock.unlock();
      std::optional<std::string> text;
      try {
        text = report();
      } catch (...) {
        const std::string trouble = text_of(std::current_exception());
        if (trouble != std::exchange(told, trouble)) {
          LOCKSTEP_LOG(kWarning) << "this host can't tell how its ranks do: " << trouble;
        }
      }
      lock.lock();
      if (text && phase == Phase::kRunning) {
        newest = std::move(text);
        ::eventfd_write(event.get(), 1);
      }
      changed.wait_for(lock, kBetweenReports, [this] { return phase != Phase::kRunning; });
    }
    enter(Phase::kEnded);
    ::eventfd_write(event.get(), 1);
  }

  /// In the order in which they follow each other.
  enum class Phase : uint8_t { kRunning, kStopping, kEnded };
  /// The one place where the phase changes, which never goes back. With the mutex held.
  void enter(Phase next) {
    phase = std::max(phase, next);
    changed.notify_all();
  }

  const std::function<std::string()> report;
  const UniqueFd event;
  std::mutex mutex;  // for all that follows
  std::condition_variable changed;
  std::optional<std::string> newest;
  Phase phase = Phase::kRunning;
};

HostReporter::HostReporter(std::function<std::string()> report)
    : shared_(std::make_shared<Shared>(std::move(report))) {
  start_detached_thread("lockstep-report", [shared = shared_] { shared->run(); });
}

HostReporter::~HostReporter() {
  stop();
  std::unique_lock lock(shared_->mutex);
  shared_->changed.wait_for(lock, kPatienceWithReport,
                            [this] { return shared_->phase == Shared::Phase::kEnded; });
}

void HostReporter::stop() {
  const std::lock_guard lock(shared_->mutex);
  shared_->enter(Shared::Phase::kStopping);
}

bool HostReporter::is_over() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->phase == Shared::Phase::kEnded;
}

int HostReporter::fd() const {
  return shared_->event.get();
}

std::optional<std::string> HostReporter::take() {
  const std::lock_guard lock(shared_->mutex);
  eventfd_t count = 0;
  ::eventfd_read(shared_->event.get(), &count);
  return std::exchange(shared_->newest, std::nullopt);
}

}  // namespace lockstep::launch
