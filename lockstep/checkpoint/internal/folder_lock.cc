#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <sys/stat.h>
#include <system_error>
#include <thread>
#include <unistd.h>
#include <utility>

#include <nlohmann/json.hpp>

#include <lockstep/base/deadline.h>
#include <lockstep/base/errors.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/host_name.h>
#include <lockstep/base/log.h>
#include <lockstep/base/process/interrupt.h>
#include <lockstep/base/process/per_process.h>
#include <lockstep/base/text/json_text.h>
#include <lockstep/base/text/printable.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/checkpoint/internal/file_io.h>
#include <lockstep/checkpoint/internal/folder_lock.h>
#include <lockstep/rendezvous/process_stat.h>

namespace lockstep::checkpoint::internal {
namespace {

namespace fs = std::filesystem;

// A process that was killed has its lock until the kernel has taken back its memory.
constexpr std::chrono::seconds kThisHostWait{20};
// NFSv4 servers keep a silent host's locks for their lease time, 90 seconds unless told.
constexpr std::chrono::seconds kOtherHostWait{120};
constexpr size_t kMostLease = 4096;

/// What this process holds. A lock of fcntl(2) is lost when its process closes any descriptor of the file, so
/// there is one descriptor for each folder, closed when its last user goes.
struct HeldLocks {
  struct Entry {
    UniqueFd file;
    int64_t users = 0;
    int64_t generation = 0;
    std::string text;  // that the file had since
  };
  std::mutex mutex;
  std::map<std::string, Entry> entries;  // by the folder's canonical path; guarded by mutex
};

PerProcess<HeldLocks> held_locks;

/// Who has a lock, as its file says.
struct Lease {
  std::string host;
  int64_t pid = 0;
  std::string process_start;  // tells a process from a later one of that number
  std::string since;
  std::string job;
  int64_t generation = 0;

  bool is_of_this_process() const { return host == host_name() && pid == ::getpid(); }
};

/// When a process of this host began, in the kernel's words; empty when there is none, or a dead one that is
/// not reaped yet.
std::string start_of(int64_t pid) {
  if (pid != static_cast<pid_t>(pid)) return {};
  const auto stat = read_process_stat(static_cast<pid_t>(pid));
  return stat && stat->state != 'Z' && stat->state != 'X' ? std::to_string(stat->start) : std::string();
}

std::string now_text() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text.data();
}

/// Empty where it can't be read.
std::string read_text(const UniqueFd& file) {
  std::string text(kMostLease, '\0');
  const ssize_t got = ::pread(file.get(), text.data(), text.size(), 0);
  text.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  return text;
}

std::optional<Lease> parse_lease(const std::string& text) {
  const auto lease = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto string_at = [&](const char* key) {
    const auto found = lease.find(key);
    return found != lease.end() && found->is_string() ? printable(found->get<std::string>()) : std::string();
  };
  if (!lease.is_object() || !lease.contains("pid") || !lease["pid"].is_number_integer()) return std::nullopt;
  const auto generation = lease.find("generation");
  return Lease{string_at("host"),
               lease["pid"].get<int64_t>(),
               string_at("process_start"),
               string_at("since"),
               string_at("job"),
               generation != lease.end() && generation->is_number_integer() ? generation->get<int64_t>() : 0};
}

/// What the file has then. A disk that is full keeps it from being written: then others are not told which process has
/// the lock.
std::string write_lease(const UniqueFd& file, const FolderOwner& owner) {
  const nlohmann::json lease = {{"host", host_name()},
                                {"pid", static_cast<int64_t>(::getpid())},
                                {"process_start", start_of(::getpid())},
                                {"since", now_text()},
                                {"job", owner.job},
                                {"generation", owner.generation}};
  const std::string text = json_text(lease) + "\n";
  if (::ftruncate(file.get(), 0) != 0 ||
      ::pwrite(file.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) {
    LOCKSTEP_LOG(kInfo) << "cannot say in " << kLockName << " who has the lock: " << std::strerror(errno);
    return read_text(file);
  }
  return text;
}

/// Whether the job of `owner` has gone on without the process that has the lock.
bool supersedes(const FolderOwner& owner, const Lease& lease) {
  return !owner.job.empty() && lease.job == owner.job &&
         (lease.generation < owner.generation ||
          (owner.shares_with_own && lease.generation == owner.generation));
}

/// Whether that process has gone on without `owner`.
bool is_left_behind(const FolderOwner& owner, const Lease& lease) {
  return !owner.job.empty() && lease.job == owner.job && lease.generation > owner.generation;
}

bool lives_here(const Lease& lease) {
  return lease.host == host_name() && !lease.process_start.empty() &&
         start_of(lease.pid) == lease.process_start;
}

/// What an attempt at the lock has come to.
struct Attempt {
  enum Outcome { kMine, kInUse, kNotWritable };
  Outcome outcome = kMine;
  int error = 0;                     // of kNotWritable
  std::optional<Lease> holder = {};  // of kInUse, where it is known
  bool holder_is_here = false;       // it lives on this host
};

[[noreturn]] void throw_in_use(const fs::path& folder, const Attempt& attempt) {
  const std::optional<Lease>& lease = attempt.holder;
  const std::string holder = lease ? c10::str("process ", lease->pid, " on host '", lease->host,
                                              "' saves its checkpoints there since ", lease->since)
                                   : std::string("another process saves its checkpoints there");
  LOCKSTEP_CHECK_FILE(false, "the folder ", folder.string(), " is in use: ", holder,
                      ". Two jobs in one folder would remove each other's checkpoints; give this one another "
                      "directory, or end that process first. ",
                      attempt.holder_is_here
                          ? std::string()
                          : "If that host is gone, remove " + (folder / kLockName).string() + ". ",
                      "To only read the checkpoints, take find_latest_checkpoint() and load_checkpoint()");
}

/// 0, or the error.
int try_lock(const UniqueFd& file) {
  if (const int error = failpoint::fails_with("checkpoint.lock")) return error;
  struct flock whole {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  while (::fcntl(file.get(), F_SETLK, &whole) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

std::unique_ptr<FolderLock> go_without(const fs::path& folder, int error) {
  LOCKSTEP_LOG(kWarning) << "cannot lock the folder " << folder.string()
                         << " for this job's checkpoints: " << std::strerror(error)
                         << "; see to it that no other job saves there";
  return nullptr;
}

bool may_not_write(int error) {
  return error == EACCES || error == EPERM || error == EROFS;
}

/// One attempt, which waits for nothing. `key`: the folder's canonical path. Throws CheckpointIoError when
/// the file can't be opened.
Attempt try_to_hold(const std::string& key, const FolderOwner& owner) {
  HeldLocks& here = held_locks.get();
  const std::lock_guard guard(here.mutex);
  if (const auto found = here.entries.find(key); found != here.entries.end()) {
    ++found->second.users;
    if (owner.generation > found->second.generation) {
      found->second.generation = owner.generation;
      found->second.text = write_lease(found->second.file, owner);
    }
    return {};
  }
  const fs::path path = fs::path(key) / kLockName;
  int error = failpoint::fails_with("checkpoint.lock_open");
  UniqueFd file(error == 0 ? ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666) : -1);
  if (!file && error == 0) error = errno;
  if (may_not_write(error) || error == ENOSPC || error == EDQUOT) {
    return {.outcome = Attempt::kNotWritable, .error = error};
  }
  if (!file) throw_system_error("open", path, error);
  error = try_lock(file);
  auto lease = parse_lease(read_text(file));
  const bool takes_over = lease && supersedes(owner, *lease);
  const bool is_here = error != 0 && lease && !lease->is_of_this_process() && lives_here(*lease);
  const bool in_use = is_here || error == EAGAIN || error == EACCES;
  if ((in_use && !takes_over) || (lease && is_left_behind(owner, *lease))) {
    return {.outcome = Attempt::kInUse, .holder = std::move(lease), .holder_is_here = is_here};
  }
  if (in_use) {
    LOCKSTEP_LOG(kWarning) << "takes over the folder " << key << " from process " << lease->pid
                           << " on host '" << lease->host << "', without which this job has gone on";
  } else if (error != 0) {
    LOCKSTEP_LOG(kWarning) << "the file system of " << key << " has no locks (" << std::strerror(error)
                           << "); see to it that no job on another host saves into this folder";
  }
  std::string text = write_lease(file, owner);
  here.entries.emplace(key, HeldLocks::Entry{std::move(file), 1, owner.generation, std::move(text)});
  return {};
}

std::string describe_holder(const Lease& lease) {
  return c10::str("process ", lease.pid, " on host '", lease.host, "' has had it since ", lease.since);
}

[[noreturn]] void throw_taken_over(const std::string& key, const std::string& holder) {
  LOCKSTEP_CHECK_FILE(false, "the folder ", key, " is not this process's any more: ", holder,
                      ". The job may have gone on without this rank; nothing was saved");
}

void check_held(const std::string& key, const HeldLocks::Entry& held) {
  // Asked for the lock, NFS reads the file anew. One that was taken over may be free by now.
  try_lock(held.file);
  // By the text, not by host and process number: a host may get another name, and a container's process may have both.
  const std::string text = read_text(held.file);
  const auto lease = parse_lease(text);
  struct stat own {
  }, named{};
  const bool replaced = ::fstat(held.file.get(), &own) == 0 &&
                        ::stat((fs::path(key) / kLockName).c_str(), &named) == 0 &&
                        (own.st_ino != named.st_ino || own.st_dev != named.st_dev);
  if (replaced) throw_taken_over(key, "its lock was removed, and made anew");
  if (lease && text != held.text) throw_taken_over(key, describe_holder(*lease));
}

void tell_of_waiting(const fs::path& folder, const Attempt& attempt, std::chrono::nanoseconds limit) {
  const std::optional<Lease>& lease = attempt.holder;
  LOCKSTEP_LOG(kWarning) << "the folder " << folder.string() << " is in use"
                         << (lease ? " by process " + std::to_string(lease->pid) + " on host '" +
                                         lease->host + "'"
                                   : "")
                         << "; waiting up to " << to_seconds(limit) << " s, for "
                         << (attempt.holder_is_here ? "a process that was killed may need some seconds to end"
                                                    : "a host that has crashed may seem to have it still");
}

}  // namespace

std::unique_ptr<FolderLock> FolderLock::acquire(const fs::path& folder, std::chrono::nanoseconds most,
                                                const FolderOwner& owner) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error && may_not_write(error.value())) return go_without(folder, error.value());
  if (error) throw_system_error("create", folder, error.value());
  const std::string key = fs::canonical(folder, error).string();
  if (error) throw_system_error("look at", folder, error.value());

  const auto begin = Deadline::Clock::now();
  for (bool told = false;;) {
    const Attempt attempt = with_retries([&] { return try_to_hold(key, owner); });
    if (attempt.outcome == Attempt::kNotWritable) return go_without(folder, attempt.error);
    if (attempt.outcome == Attempt::kMine) return std::unique_ptr<FolderLock>(new FolderLock(key));
    const auto limit =
        std::min<std::chrono::nanoseconds>(attempt.holder_is_here ? kThisHostWait : kOtherHostWait, most);
    if (Deadline::Clock::now() - begin >= limit) throw_in_use(folder, attempt);
    if (!std::exchange(told, true)) tell_of_waiting(folder, attempt, limit);
    check_interrupts();
    std::this_thread::sleep_for(kInterruptInterval);
  }
}

FolderLock::~FolderLock() {
  if (fork_guard_.in_forked_child()) return;
  HeldLocks& here = held_locks.get();
  const std::lock_guard guard(here.mutex);
  const auto found = here.entries.find(key_);
  if (found == here.entries.end() || --found->second.users > 0) return;
  // Where there are no locks, the text is the lock. That of a later generation stays: it tells those that were left
  // behind that the folder is not theirs.
  if (found->second.generation == 0 && read_text(found->second.file) == found->second.text) {
    [[maybe_unused]] const int emptied = ::ftruncate(found->second.file.get(), 0);
  }
  here.entries.erase(found);
}

void FolderLock::check() const {
  HeldLocks& here = held_locks.get();
  const std::lock_guard guard(here.mutex);
  if (const auto found = here.entries.find(key_); found != here.entries.end())
    check_held(key_, found->second);
}

void FolderLock::check_without(const fs::path& folder, const FolderOwner& owner) {
  std::error_code error;
  const std::string key = fs::canonical(folder, error).string();
  if (error) return;
  HeldLocks& here = held_locks.get();
  const std::lock_guard guard(here.mutex);
  // Where this process has the lock, closing another descriptor of the file would give it up.
  if (const auto found = here.entries.find(key); found != here.entries.end()) {
    return check_held(key, found->second);
  }
  const UniqueFd file(::open((fs::path(key) / kLockName).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  const auto lease = file ? parse_lease(read_text(file)) : std::nullopt;
  if (lease && is_left_behind(owner, *lease)) throw_taken_over(key, describe_holder(*lease));
}

}  // namespace lockstep::checkpoint::internal
