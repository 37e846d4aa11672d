#include <cstdlib>
#include <cstring>

#include <c10/util/Exception.h>

#include <lockstep/testing/simulated_device/host_memory.h>

namespace lockstep::testing::simulated {
namespace {

bool contains(const std::map<const char*, size_t>& ranges, const void* address) {
  const auto* at = static_cast<const char*>(address);
  auto next = ranges.upper_bound(at);
  if (next == ranges.begin()) return false;
  --next;
  return at < next->first + next->second;
}

}  // namespace

HostMemory& host_memory() {
  static auto* memory = new HostMemory();
  return *memory;
}

c10::DataPtr HostMemory::allocate(size_t bytes) {
  if (bytes == 0) return {nullptr, nullptr, &free_memory, c10::Device(c10::kCPU)};
  constexpr size_t kPage = 4096;
  auto* begin = static_cast<char*>(std::aligned_alloc(kPage, (bytes + kPage - 1) / kPage * kPage));
  TORCH_CHECK_WITH(OutOfMemoryError, begin != nullptr, "no ", bytes, " bytes of pinned memory");
  std::lock_guard lock(mutex_);
  allocated_[begin] = bytes;
  return {begin, begin, &free_memory, c10::Device(c10::kCPU)};
}

c10::DeleterFnPtr HostMemory::raw_deleter() const {
  return &free_memory;
}

void HostMemory::free_memory(void* begin) {
  if (begin == nullptr) return;
  auto& memory = host_memory();
  {
    std::lock_guard lock(memory.mutex_);
    memory.allocated_.erase(static_cast<const char*>(begin));
  }
  std::free(begin);
}

void HostMemory::copy_data(void* destination, const void* source, size_t bytes) const {
  std::memcpy(destination, source, bytes);
}

bool HostMemory::record_event(void* /*pointer*/, void* /*context*/, c10::Stream /*stream*/) {
  return false;
}

bool HostMemory::lock(void* begin, size_t bytes) noexcept {
  std::lock_guard lock(mutex_);
  registered_[static_cast<const char*>(begin)] = bytes;
  ++registrations_;
  return true;
}

void HostMemory::unlock(void* begin) noexcept {
  std::lock_guard lock(mutex_);
  registered_.erase(static_cast<const char*>(begin));
}

bool HostMemory::is_pinned(const void* address) {
  std::lock_guard lock(mutex_);
  return contains(allocated_, address) || contains(registered_, address);
}

bool HostMemory::owns(const void* address) {
  std::lock_guard lock(mutex_);
  return contains(allocated_, address);
}

int64_t HostMemory::registrations() {
  std::lock_guard lock(mutex_);
  return registrations_;
}

int64_t HostMemory::registered_now() {
  std::lock_guard lock(mutex_);
  return static_cast<int64_t>(registered_.size());
}

}  // namespace lockstep::testing::simulated
