#include <algorithm>
#include <cstddef>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <map>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tuple>
#include <unistd.h>
#include <utility>

#include <lockstep/base/unique_fd.h>
#include <lockstep/rendezvous/host_identity.h>
#include <lockstep/transport/host/process_header.h>
#include <lockstep/transport/host/rank_memory.h>

namespace lockstep::transport {
namespace {

namespace fs = std::filesystem;

/// As the kernel shows the descriptor of a Segment.
constexpr const char* kSegmentLink = "/memfd:lockstep (deleted)";
constexpr uint64_t kLayoutByte = uint64_t{0xff} << 56;  // of ProcessHeader::kMagic

/// The first bytes of a segment, mapped to be read.
class MappedHeader {
 public:
  explicit MappedHeader(const std::string& path) {
    // The process may have opened something else there by now: a pipe, whose opening would wait for a writer.
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
    struct stat status {};
    // With the seal no process can shrink it under the mapping. -1: of a file that can have none.
    const int seals = fd ? ::fcntl(fd.get(), F_GET_SEALS) : -1;
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || ::fstat(fd.get(), &status) != 0 ||
        static_cast<size_t>(status.st_size) < sizeof(ProcessHeader)) {
      return;
    }
    void* memory = ::mmap(nullptr, sizeof(ProcessHeader), PROT_READ, MAP_SHARED, fd.get(), 0);
    if (memory != MAP_FAILED) header_ = static_cast<const ProcessHeader*>(memory);
  }
  MappedHeader(const MappedHeader&) = delete;
  MappedHeader& operator=(const MappedHeader&) = delete;
  ~MappedHeader() {
    if (header_ != nullptr) ::munmap(const_cast<ProcessHeader*>(header_), sizeof(ProcessHeader));
  }
  /// Null where there is none.
  const ProcessHeader* get() const { return header_; }

 private:
  const ProcessHeader* header_ = nullptr;
};

/// A process's number in its own pid namespace.
pid_t own_number(const fs::path& process, pid_t pid) {
  std::ifstream status(process / "status");
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with("NSpid:")) continue;
    return static_cast<pid_t>(std::strtol(line.c_str() + line.find_last_of(" \t"), nullptr, 10));
  }
  return pid;
}

/// A rank as its memory has it: `awaited` are numbers of its transport, of which it has `index` itself.
struct FoundRank {
  RankMemory memory = {};
  int index = 0;
};

FoundRank read_header(const ProcessHeader& header, pid_t pid) {
  FoundRank found{.index = header.index};
  RankMemory& memory = found.memory;
  memory.pid = pid;
  memory.rank = header.rank;
  memory.world_size = header.world_size;
  memory.first_pid = header.first_pid.load(std::memory_order_acquire);
  const PhaseBoard& board = header.phases;
  const PhaseBoard::Step step = board.newest_step();
  memory.steps = step.number;
  memory.step_samples = step.samples;
  memory.step_began_ns = step.began_ns;
  if (const int64_t told = board.told_step.load(std::memory_order_acquire); told >= 0) {
    memory.told_step = told;
    memory.loss = board.loss.load(std::memory_order_relaxed);
  }
  memory.phase = static_cast<TrainingPhase>(board.phase.load(std::memory_order_relaxed));
  memory.since_ns = board.since_ns.load(std::memory_order_relaxed);
  memory.times = board.times();
  for (const WaitRecord& record : header.waits) {
    const bool waits = record.word.load(std::memory_order_acquire) != 0;
    const int peer = record.peer.load(std::memory_order_relaxed);
    const bool known = std::find(memory.awaited.begin(), memory.awaited.end(), peer) != memory.awaited.end();
    if (waits && peer >= 0 && !known) memory.awaited.push_back(peer);
  }
  return found;
}

bool has_rank(const RankMemories& found, pid_t pid) {
  return std::any_of(found.ranks.begin(), found.ranks.end(),
                     [pid](const RankMemory& rank) { return rank.pid == pid; });
}

}  // namespace

RankMemories read_rank_memories() {
  RankMemories result;
  std::vector<FoundRank> found;
  std::error_code error;
  for (fs::directory_iterator process("/proc", error), end; !error && process != end;
       process.increment(error)) {
    const std::string name = process->path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const auto pid = static_cast<pid_t>(std::strtol(name.c_str(), nullptr, 10));
    std::optional<FoundRank> newest;  // of a process that has left one job and joined another
    std::error_code refused;          // another user's process, or one that has ended
    for (fs::directory_iterator fd(process->path() / "fd", refused); !refused && fd != end;
         fd.increment(refused)) {
      std::error_code ignored;
      if (fs::read_symlink(fd->path(), ignored) != kSegmentLink) continue;
      const MappedHeader mapped(fd->path());
      const ProcessHeader* header = mapped.get();
      if (header == nullptr || ((header->magic ^ ProcessHeader::kMagic) & ~kLayoutByte) != 0) continue;
      if (header->magic != ProcessHeader::kMagic) {
        result.other_layout.push_back(pid);
        break;
      }
      // A forked child has its parent's descriptors.
      if (note_kind(*header) != EndKind::kRunning || header->first_pid.load(std::memory_order_acquire) == 0 ||
          header->pid != own_number(process->path(), pid)) {
        continue;
      }
      FoundRank one = read_header(*header, pid);
      if (!newest || one.memory.since_ns >= newest->memory.since_ns) newest = std::move(one);
    }
    if (!newest) continue;
    newest->memory.pid_namespace = inode_of_namespace(process->path() / "ns/pid");
    found.push_back(std::move(*newest));
  }
  using Number = std::tuple<uint64_t, pid_t, int>;  // by job and number of its transport
  const auto number_of = [](const RankMemory& memory, int index) {
    return Number{memory.pid_namespace, memory.first_pid, index};
  };
  std::map<Number, int> ranks;
  for (const FoundRank& one : found) ranks[number_of(one.memory, one.index)] = one.memory.rank;
  for (FoundRank& one : found) {
    for (int& awaited : one.memory.awaited) {
      // Of one on another host the job's number is not known here; it is the same but in what shrinking has left.
      const auto known = ranks.find(number_of(one.memory, awaited));
      if (known != ranks.end()) awaited = known->second;
    }
    result.ranks.push_back(std::move(one.memory));
  }
  std::sort(result.ranks.begin(), result.ranks.end(), [](const RankMemory& a, const RankMemory& b) {
    return std::tie(a.first_pid, a.pid_namespace, a.rank) < std::tie(b.first_pid, b.pid_namespace, b.rank);
  });
  std::erase_if(result.other_layout, [&](pid_t pid) { return has_rank(result, pid); });
  return result;
}

}  // namespace lockstep::transport
