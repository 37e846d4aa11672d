#include <array>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <fcntl.h>
#include <filesystem>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>
#include <utility>

#include <lockstep/base/files/kernel_file.h>
#include <lockstep/base/process/cgroup_folders.h>
#include <lockstep/launch/out_of_memory.h>
#include <lockstep/rendezvous/host_identity.h>

namespace lockstep::launch {
namespace {

/// The log has the pids of the first namespace, whose number never changes (PROC_PID_INIT_INO, linux/nsfs.h).
bool in_first_pid_namespace() {
  constexpr uint64_t kFirst = 0xeffffffc;
  return inode_of_namespace("/proc/self/ns/pid") == kFirst;
}

/// Containers may have another device in its place, such as /dev/null, which would seem to be a log without kills. The number is
/// that of Documentation/admin-guide/devices.txt.
bool is_kernel_log(int file) {
  struct stat status = {};
  return ::fstat(file, &status) == 0 && S_ISCHR(status.st_mode) && status.st_rdev == makedev(1, 11);
}

/// The file that counts processes of a cgroup which were killed. Of version 2 the nearest one above has it, where the
/// controller of memory ends above this one.
std::string oom_counter_of(const std::string& unified, const std::string& memory) {
  for (std::filesystem::path at = unified; !at.empty() && ::access((at / "cgroup.procs").c_str(), R_OK) == 0;
       at = at.parent_path()) {
    for (const char* name : {"memory.events.local", "memory.events"}) {
      if (::access((at / name).c_str(), R_OK) == 0) return at / name;
    }
  }
  const std::string file = memory + "/memory.oom_control";
  return !memory.empty() && ::access(file.c_str(), R_OK) == 0 ? file : std::string();
}

/// From here on; empty where it can't be read, or has other pids.
UniqueFd open_kernel_log() {
  if (!in_first_pid_namespace()) return {};
  UniqueFd log(::open("/dev/kmsg", O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (log && (!is_kernel_log(log.get()) || ::lseek(log.get(), 0, SEEK_END) < 0)) log.reset();
  return log;
}

/// The counter of the workers' cgroup of version 2, if they have one of their own, or else that of this process's cgroup.
std::string own_counter(const std::string& workers) {
  const CgroupFolders own = own_cgroup_folders("memory");
  const auto front = [](const std::vector<std::string>& folders) {
    return folders.empty() ? "" : folders.front();
  };
  return oom_counter_of(workers.empty() ? front(own.version_2) : workers, front(own.version_1));
}

std::optional<uint64_t> oom_kills_in_file(const std::string& path) {
  return oom_kills_in(read_kernel_file(path).value_or(""));
}

template <typename Number>
std::optional<Number> number_after(std::string_view text, std::string_view words) {
  const size_t at = text.find(words);
  if (at == std::string_view::npos) return std::nullopt;
  text.remove_prefix(at + words.size());
  Number number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() ? std::optional(number) : std::nullopt;
}

}  // namespace

std::optional<std::pair<pid_t, std::string>> victim_of_record(std::string_view record) {
  // "PRIORITY,NUMBER,TIME,FLAGS;TEXT\n", and lines with what else is known.
  const size_t semicolon = record.find(';');
  if (semicolon == std::string_view::npos) return std::nullopt;
  std::string_view text = record.substr(semicolon + 1);
  text = text.substr(0, text.find('\n'));
  // mm/oom_kill.c: dump_header() before the kill, and __oom_kill_process() after it.
  std::optional<pid_t> pid;
  if (text.starts_with(
          "oom-kill:")) {  // the last one: before it stands the program's name, which may be anything
    const size_t at = text.rfind(",pid=");
    if (at != std::string_view::npos) pid = number_after<pid_t>(text.substr(at), ",pid=");
  }
  if (text.starts_with("Out of memory") || text.starts_with("Memory cgroup out of memory"))
    pid = number_after<pid_t>(text, "Killed process ");
  return pid ? std::optional(std::pair(*pid, std::string(text))) : std::nullopt;
}

std::optional<uint64_t> oom_kills_in(std::string_view text) {
  const std::string lines = "\n" + std::string(text);
  return number_after<uint64_t>(lines, "\noom_kill ");
}

void CountedKills::look(uint64_t kills, Time now) {
  while (!fresh_.empty() && now - fresh_.front().seen > kExplains) fresh_.pop_front();
  if (kills > counted_) fresh_.push_back({now, kills - counted_});
  counted_ = kills;
}

bool CountedKills::explain(uint64_t kills, Time now) {
  look(kills, now);
  if (fresh_.empty()) return false;
  if (--fresh_.front().kills == 0) fresh_.pop_front();
  return true;
}

OutOfMemoryWatch::OutOfMemoryWatch(const std::string& workers)
    : OutOfMemoryWatch(open_kernel_log(), own_counter(workers)) {}

OutOfMemoryWatch::OutOfMemoryWatch(UniqueFd log, const std::string& counter)
    : log_(std::move(log)), counter_(counter) {
  const auto kills = counter_.empty() ? std::nullopt : oom_kills_in_file(counter_);
  if (kills) {
    kills_ = CountedKills(*kills);
  } else {
    counter_.clear();
  }
}

void OutOfMemoryWatch::look(CountedKills::Time now) {
  if (counter_.empty() || now < look_at_) return;
  look_at_ = now + CountedKills::kInterval;
  if (const auto kills = oom_kills_in_file(counter_)) kills_.look(*kills, now);
}

void OutOfMemoryWatch::note_kill(pid_t pid, CountedKills::Time now) {
  // The kernel counts before it sends the signal.
  const auto kills = counter_.empty() ? std::nullopt : oom_kills_in_file(counter_);
  if (kills && kills_.explain(*kills, now)) counted_.insert(pid);
}

std::string OutOfMemoryWatch::evidence_of(pid_t pid) {
  read_log();
  if (const auto found = victims_.find(pid); found != victims_.end())
    return "the kernel's log: " + found->second;
  const bool log_names_all = log_ && !log_has_gaps_;
  return counted_.count(pid) != 0 && !log_names_all
             ? counter_ + " counts a process that the kernel has killed just before"
             : std::string();
}

void OutOfMemoryWatch::read_log() {
  std::array<char, 8192> record;  // longer than the kernel's longest; see devkmsg_read()
  while (log_) {
    const ssize_t got = ::read(log_.get(), record.data(), record.size());
    if (got < 0 && (errno == EINTR || errno == EPIPE)) {
      log_has_gaps_ = log_has_gaps_ || errno == EPIPE;  // older records were lost
      continue;
    }
    if (got <= 0) return;
    const auto victim = victim_of_record({record.data(), static_cast<size_t>(got)});
    if (victim) victims_[victim->first] = victim->second;
  }
}

}  // namespace lockstep::launch
