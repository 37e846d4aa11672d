#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <climits>

#include <lockstep/base/environment.h>
#include <lockstep/rendezvous/exit_status_table.h>

namespace lockstep {
namespace {

constexpr uint64_t kMagic = 0x4c534558'49544234;  // "LSEXITB4"
constexpr int kMaxWorkers = 1 << 20;
// A wait status fits into 16 bits; this bit tells "ended with status 0" from "still running".
constexpr uint32_t kEnded = 1u << 31;
constexpr uint32_t kFar = 1u << 31;  // of a culprit: on another host

struct Worker {
  std::atomic<int32_t> pid;      // 0: no worker yet
  std::atomic<uint32_t> status;  // the futex word; 0 while the worker runs, else kEnded | wait status
};
static_assert(sizeof(Worker) == 8 && std::atomic<uint32_t>::is_always_lock_free);

struct alignas(64) Wait {
  std::atomic<int64_t> since_ns;  // 0: none. Stored last; zero while the texts change
  std::array<char, 104> awaited;  // both end with 0
  std::array<char, 144> state;
};
static_assert(sizeof(Wait) == 256 && std::atomic<int64_t>::is_always_lock_free);

template <size_t bytes>
void put_text(std::array<char, bytes>& place, const std::string& text) {
  place.fill(0);
  text.copy(place.data(), bytes - 1);
}

/// As another process has written it, or is writing it: one line, whatever is there.
template <size_t bytes>
std::string text_in(const std::array<char, bytes>& place) {
  std::string text(place.data(), ::strnlen(place.data(), bytes));
  for (char& byte : text) {
    if (static_cast<unsigned char>(byte) < ' ') byte = '?';
  }
  return text;
}

void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected, std::chrono::nanoseconds timeout) {
  auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
  struct timespec relative = {seconds.count(), (timeout - seconds).count()};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, expected, &relative, nullptr,
            0);  // every outcome: look at the word again
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

struct ExitStatusTable::Layout {
  uint64_t magic;
  uint64_t count;
  std::atomic<uint64_t> newest_generation;
  std::atomic<int64_t> known_until;  // of BootClock
  Worker entries[];                  // NOLINT: as many as `count` says, after the header in the mapping

  using Culprit = std::atomic<uint32_t>;  // 0: none, its local rank + 1, or kFar | its rank in the job

  /// The workers write on whole pages of their own, after the entries: one word and one wait each.
  static size_t culprits_at(uint64_t count) {
    const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    return (sizeof(Layout) + count * sizeof(Worker) + page - 1) / page * page;
  }
  static size_t waits_at(uint64_t count) {
    return (culprits_at(count) + count * sizeof(Culprit) + alignof(Wait) - 1) / alignof(Wait) * alignof(Wait);
  }
  static size_t bytes_for(uint64_t count) { return waits_at(count) + count * sizeof(Wait); }
  Culprit* culprits(uint64_t checked_count) {
    return reinterpret_cast<Culprit*>(reinterpret_cast<std::byte*>(this) + culprits_at(checked_count));
  }
  Wait* waits(uint64_t checked_count) {
    return reinterpret_cast<Wait*>(reinterpret_cast<std::byte*>(this) + waits_at(checked_count));
  }
};

std::string describe_wait_status(int wait_status) {
  if (WIFEXITED(wait_status)) return "exited with status " + std::to_string(WEXITSTATUS(wait_status));
  if (WIFSIGNALED(wait_status)) {
    int number = WTERMSIG(wait_status);
    const char* name = ::sigabbrev_np(number);
    std::string text = "killed by signal " + std::to_string(number);
    return name == nullptr ? text : text + " (SIG" + name + ")";
  }
  return "ended with wait status " + std::to_string(wait_status);
}

ExitStatusTable ExitStatusTable::create(int nprocs) {
  TORCH_CHECK_VALUE(nprocs >= 1 && nprocs <= kMaxWorkers, "an exit status table for ", nprocs,
                    " workers: the number must lie in 1 to ", kMaxWorkers);
  const size_t bytes = Layout::bytes_for(static_cast<uint64_t>(nprocs));
  UniqueFd fd(::memfd_create("lockstep-exit-status", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  TORCH_CHECK_WITH(DistBackendError, fd && ::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0,
                   "can't make the exit status table (", bytes,
                   " bytes of shared memory): ", std::strerror(errno));
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  TORCH_CHECK_WITH(DistBackendError, memory != MAP_FAILED, "can't map the exit status table (", bytes,
                   " bytes): ", std::strerror(errno));
  // No process can make the workers' mappings fault by shrinking it.
  ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW);
  auto* layout = static_cast<Layout*>(memory);  // zeroes: pid 0, running
  layout->magic = kMagic;
  layout->count = static_cast<uint64_t>(nprocs);
  layout->known_until = BootTime::max().time_since_epoch().count();
  return ExitStatusTable(std::move(fd), layout, bytes, static_cast<uint64_t>(nprocs));
}

std::optional<ExitStatusTable> ExitStatusTable::from_environment() {
  const auto value = environment::text(kVariable);
  if (!value) return std::nullopt;
  int fd = -1;
  uint64_t inode = 0;
  const char* end = value->data() + value->size();
  auto [colon, bad_fd] = std::from_chars(value->data(), end, fd);
  if (bad_fd != std::errc() || colon == end || *colon != ':' || fd < 0) return std::nullopt;
  auto [stop, bad_inode] = std::from_chars(colon + 1, end, inode);
  if (bad_inode != std::errc() || stop != end) return std::nullopt;

  struct stat status = {};
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode) || status.st_ino != inode) return std::nullopt;
  // Only a memory file answers F_GET_SEALS; with the seal its size can't change under our mapping.
  const int seals = ::fcntl(fd, F_GET_SEALS);
  const auto bytes = static_cast<size_t>(status.st_size);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || bytes < Layout::bytes_for(1)) return std::nullopt;
  void* memory = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return std::nullopt;
  auto* layout = static_cast<Layout*>(memory);
  const uint64_t count = layout->count;
  ExitStatusTable table(UniqueFd(), layout, bytes, count);
  if (layout->magic != kMagic || count > kMaxWorkers || Layout::bytes_for(count) != bytes)
    return std::nullopt;
  const size_t own = Layout::culprits_at(count);
  if (::mprotect(static_cast<std::byte*>(memory) + own, bytes - own, PROT_READ | PROT_WRITE) != 0)
    return std::nullopt;
  return table;
}

ExitStatusTable::ExitStatusTable(ExitStatusTable&& other) noexcept
    : fd_(std::move(other.fd_)),
      layout_(std::exchange(other.layout_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      count_(std::exchange(other.count_, 0)) {}

ExitStatusTable& ExitStatusTable::operator=(ExitStatusTable&& other) noexcept {
  if (this != &other) {
    unmap();
    fd_ = std::move(other.fd_);
    layout_ = std::exchange(other.layout_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    count_ = std::exchange(other.count_, 0);
  }
  return *this;
}

ExitStatusTable::~ExitStatusTable() {
  unmap();
}

void ExitStatusTable::unmap() noexcept {
  if (layout_ != nullptr) ::munmap(layout_, bytes_);
  layout_ = nullptr;
}

std::string ExitStatusTable::environment_value() const {
  struct stat status = {};
  TORCH_CHECK(fd_ && ::fstat(fd_.get(), &status) == 0,
              "only the launcher's exit status table can be handed on");
  return std::to_string(fd_.get()) + ":" + std::to_string(status.st_ino);
}

size_t ExitStatusTable::checked_index(int local_rank) const {
  TORCH_CHECK(fd_, "only the launcher writes on the exit status table");
  TORCH_CHECK_VALUE(local_rank >= 0 && static_cast<uint64_t>(local_rank) < count_, "local rank ", local_rank,
                    " has no place on an exit status table for ", count_, " workers");
  return static_cast<size_t>(local_rank);
}

void ExitStatusTable::record_start(int local_rank, pid_t pid) {
  TORCH_CHECK_VALUE(pid > 0, "a worker's pid is positive, not ", pid);
  const size_t index = checked_index(local_rank);
  Worker& entry = layout_->entries[index];
  layout_->culprits(count_)[index].store(0, std::memory_order_relaxed);
  layout_->waits(count_)[index].since_ns.store(0, std::memory_order_relaxed);
  entry.status.store(0, std::memory_order_relaxed);
  entry.pid.store(pid, std::memory_order_release);  // a reader of the pid sees the fresh status word
}

void ExitStatusTable::record_end(int local_rank, int wait_status) {
  Worker& entry = layout_->entries[checked_index(local_rank)];
  entry.status.store(kEnded | static_cast<uint32_t>(wait_status), std::memory_order_release);
  futex_wake_all(entry.status);
}

void ExitStatusTable::record_generations(const Generations& generations) {
  TORCH_CHECK(fd_, "only the launcher writes on the exit status table");
  layout_->newest_generation.store(generations.newest, std::memory_order_relaxed);
  layout_->known_until.store(generations.known_until.time_since_epoch().count(), std::memory_order_relaxed);
}

ExitStatusTable::Generations ExitStatusTable::generations() const {
  const BootClock::duration until(layout_->known_until.load(std::memory_order_relaxed));
  return {layout_->newest_generation.load(std::memory_order_relaxed), BootTime(until)};
}

std::optional<size_t> ExitStatusTable::index_of(pid_t pid) const {
  for (size_t i = 0; pid > 0 && i < count_; ++i) {
    if (layout_->entries[i].pid.load(std::memory_order_acquire) == pid) return i;
  }
  return std::nullopt;
}

std::optional<std::string> ExitStatusTable::describe_end(pid_t pid, Deadline deadline) const {
  const auto index = index_of(pid);
  if (!index) return std::nullopt;
  const Worker& entry = layout_->entries[*index];
  while (true) {
    const uint32_t status = entry.status.load(std::memory_order_acquire);
    if ((status & kEnded) != 0) return describe_wait_status(static_cast<int>(status & ~kEnded));
    // A restarted worker took the place: how this one ended is no longer known.
    if (entry.pid.load(std::memory_order_acquire) != pid || deadline.expired()) return std::nullopt;
    futex_wait(entry.status, status, deadline.remaining());
  }
}

void ExitStatusTable::record_culprit(pid_t culprit) const {
  const auto own = index_of(::getpid());
  const auto other = index_of(culprit);
  if (!own || !other || *own == *other) return;
  layout_->culprits(count_)[*own].store(static_cast<uint32_t>(*other) + 1);
}

void ExitStatusTable::record_far_culprit(int rank) const {
  const auto own = index_of(::getpid());
  if (own && rank >= 0) layout_->culprits(count_)[*own].store(kFar | static_cast<uint32_t>(rank));
}

std::optional<int> ExitStatusTable::far_culprit_of(int local_rank) const {
  const uint32_t word = layout_->culprits(count_)[checked_index(local_rank)].load();
  return (word & kFar) == 0 ? std::nullopt : std::optional(static_cast<int>(word & ~kFar));
}

std::optional<int> ExitStatusTable::culprit_of(int local_rank) const {
  const size_t index = checked_index(local_rank);
  const uint32_t word = layout_->culprits(count_)[index].load();
  // A worker wrote it.
  if (word == 0 || word > count_ || word == index + 1) return std::nullopt;
  return static_cast<int>(word) - 1;
}

void ExitStatusTable::record_wait(const std::optional<LongWait>& wait) const {
  const auto own = index_of(::getpid());
  if (!own) return;
  Wait& place = layout_->waits(count_)[*own];
  place.since_ns.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  if (!wait) return;
  put_text(place.awaited, wait->awaited);
  put_text(place.state, wait->state);
  place.since_ns.store(wait->since_ns, std::memory_order_release);
}

std::optional<ExitStatusTable::LongWait> ExitStatusTable::wait_of(int local_rank) const {
  const Wait& place = layout_->waits(count_)[checked_index(local_rank)];
  const int64_t since = place.since_ns.load(std::memory_order_acquire);
  if (since == 0) return std::nullopt;
  LongWait wait = {text_in(place.awaited), text_in(place.state), since};
  std::atomic_thread_fence(std::memory_order_acquire);
  // Where it changes meanwhile, the next look finds the new one.
  return place.since_ns.load(std::memory_order_relaxed) == since ? std::optional(std::move(wait))
                                                                 : std::nullopt;
}

}  // namespace lockstep
