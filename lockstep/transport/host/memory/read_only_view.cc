#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/transport/host/memory/fault_handler.h>
#include <lockstep/transport/host/memory/forked_memory.h>
#include <lockstep/transport/host/memory/read_only_view.h>

namespace lockstep::transport {
namespace {

struct View {
  const std::byte* begin;
  size_t bytes;
  std::vector<ReadOnlyView::Part> parts;
};
using Views = std::vector<View>;

/// All views of the process, as the handler may read them at any time: a list is never changed nor freed once it is here.
/// Views come and go with models, so these are few.
std::atomic<const Views*> all_views{nullptr};
std::mutex changing_views;
struct sigaction handler_before {};

void say(const char* text, size_t bytes) {
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text, bytes);
}

template <size_t kBytes>
void say(const char (&text)[kBytes]) {
  say(text, kBytes - 1);
}

void note_write(const void* address) {
  const Views* views = all_views.load(std::memory_order_acquire);
  if (views == nullptr) return;
  const auto* byte = static_cast<const std::byte*>(address);
  for (const View& view : *views) {
    if (byte < view.begin || byte >= view.begin + view.bytes) continue;
    const auto offset = static_cast<size_t>(byte - view.begin);
    say("lockstep: something has written to ");
    for (const auto& part : view.parts) {
      if (offset >= part.offset && offset < part.offset + part.bytes) say(part.name.data(), part.name.size());
    }
    say(", which all ranks of this host share and which is read-only here. An optimizer of the sharded model "
        "is made by the "
        "model; to set values, use summon_full_params().\n");
  }
}

void on_write(int signal, siginfo_t* info, void* context) {
  if (info->si_code == SEGV_ACCERR) note_write(info->si_addr);
  pass_fault_on(handler_before, signal, info, context);
}

void install_write_handler() {
  static std::once_flag once;
  std::call_once(once, [] { install_fault_handler(on_write, handler_before); });
}

template <class Change>
void change_views(Change&& change) {
  const std::lock_guard lock(changing_views);
  const Views* before = all_views.load(std::memory_order_relaxed);
  auto* views = before == nullptr ? new Views : new Views(*before);
  change(*views);
  all_views.store(views, std::memory_order_release);
}

}  // namespace

ReadOnlyView::ReadOnlyView(std::byte* shared, size_t bytes, std::vector<Part> parts) : size_(bytes) {
  // An old size of 0 leaves the old mapping where it is, and maps its pages a second time.
  void* address = ::mremap(shared, 0, bytes, MREMAP_MAYMOVE);
  TORCH_CHECK_WITH(DistBackendError, address != MAP_FAILED,
                   "mapping shared memory a second time failed: ", std::strerror(errno),
                   "; is RLIMIT_AS (ulimit -v) too low?");
  data_ = static_cast<std::byte*>(address);
  if (::mprotect(address, bytes, PROT_READ) != 0) {
    const int error = errno;
    ::munmap(address, bytes);
    TORCH_CHECK_WITH(DistBackendError, false,
                     "shared memory can't be made read-only: ", std::strerror(error));
  }
  keep_from_forked_children(address, bytes);
  install_write_handler();
  change_views([&](Views& views) { views.push_back({data_, size_, std::move(parts)}); });
}

ReadOnlyView::~ReadOnlyView() {
  if (fork_guard_.in_forked_child()) return;  // the child has something else at this address
  change_views(
      [&](Views& views) { std::erase_if(views, [&](const View& view) { return view.begin == data_; }); });
  forget_forked_memory(data_);
  ::munmap(data_, size_);
}

}  // namespace lockstep::transport
