#include <algorithm>
#include <csignal>
#include <mutex>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

#include <lockstep/transport/host/memory/fault_handler.h>
#include <lockstep/transport/host/memory/forked_memory.h>

namespace lockstep::transport {
namespace {

struct Range {
  std::byte* begin;
  size_t bytes;
};

struct Registry {
  std::mutex mutex;
  std::vector<Range> own;  // of this process
  /// Of its forebears. Changes only while a child has but one thread, so the handler may read it.
  std::vector<Range> inherited;
  struct sigaction before {};  // the former handler of SIGSEGV
};

Registry& registry() {
  static Registry& all = *new Registry;  // never destroyed, for the handler may run at any time
  return all;
}

constexpr char kMessage[] =
    "lockstep: this forked process touched shared memory of its parent, such as the gradient buckets of "
    "DistributedDataParallel or a tensor that a process group made, which only the parent can use. Copy what "
    "a child needs (tensor.clone()) before the fork, or start processes without fork (multiprocessing's "
    "start method \"spawn\").\n";

void on_fault(int signal, siginfo_t* info, void* context) {
  if (is_forked_memory(info->si_addr)) {
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, kMessage, sizeof kMessage - 1);
    ::_exit(1);
  }
  pass_fault_on(registry().before, signal, info, context);
}

void lock_registry() {
  registry().mutex.lock();
}
void unlock_registry() {
  registry().mutex.unlock();
}

void after_fork_in_child() {
  Registry& all = registry();
  for (const Range& range : all.own) {
    ::mmap(range.begin, range.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1,
           0);
    all.inherited.push_back(range);
  }
  all.own.clear();
  if (!all.inherited.empty()) install_fault_handler(on_fault, all.before);
  all.mutex.unlock();
}

}  // namespace

void keep_from_forked_children(void* address, size_t bytes) {
  ::madvise(address, bytes, MADV_DONTFORK);
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  [[maybe_unused]] static const int registered =
      ::pthread_atfork(lock_registry, unlock_registry, after_fork_in_child);
  all.own.push_back({static_cast<std::byte*>(address), bytes});
}

void forget_forked_memory(void* address) {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  std::erase_if(all.own, [&](const Range& range) { return range.begin == address; });
}

bool is_forked_memory(const void* address) {
  const auto* byte = static_cast<const std::byte*>(address);
  const auto& inherited = registry().inherited;
  return std::any_of(inherited.begin(), inherited.end(), [&](const Range& range) {
    return byte >= range.begin && byte < range.begin + range.bytes;
  });
}

void install_forked_memory_handler() {
  Registry& all = registry();
  std::lock_guard lock(all.mutex);
  if (!all.inherited.empty()) install_fault_handler(on_fault, all.before);
}

}  // namespace lockstep::transport
