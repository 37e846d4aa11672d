#include <algorithm>
#include <cstdint>
#include <sys/mman.h>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/process/memory.h>
#include <lockstep/checkpoint/internal/pages.h>
#include <lockstep/device/host_memory.h>

namespace lockstep::checkpoint::internal {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

Pages::Pages(size_t bytes) {
  reserve(bytes);
}

Pages::~Pages() {
  release();
}

void Pages::lock_for(c10::DeviceType type) {
  if (data_ == nullptr || std::find(locked_for_.begin(), locked_for_.end(), type) != locked_for_.end())
    return;
  HostMemoryRegistrar* registrar = host_memory_registrar(type);
  if (registrar != nullptr && registrar->lock(data_, size_)) locked_for_.push_back(type);
}

void Pages::release() {
  for (const auto type : std::exchange(locked_for_, {})) host_memory_registrar(type)->unlock(data_);
  if (data_ != nullptr) ::munmap(data_, size_);
  data_ = nullptr;
  size_ = 0;
}

void Pages::reserve(size_t bytes) {
  if (bytes <= size_) return;
  release();
  const size_t page = bytes < kHugePage ? page_bytes() : kHugePage;
  const size_t size = (bytes + page - 1) / page * page;
  const auto fail = [&] {
    C10_THROW_ERROR(OutOfMemoryError,
                    "no memory for " + format_bytes(static_cast<int64_t>(bytes)) + " of tensors");
  };
  if (size < bytes) fail();
  // One huge page more, of which the ends that are not aligned are given back.
  const size_t slack = page == kHugePage ? kHugePage : 0;
  void* mapped = ::mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) fail();
  auto begin = reinterpret_cast<uintptr_t>(mapped);
  const uintptr_t aligned = (begin + page - 1) / page * page;
  if (aligned > begin) ::munmap(mapped, aligned - begin);
  const uintptr_t end = begin + size + slack;
  if (end > aligned + size) ::munmap(reinterpret_cast<void*>(aligned + size), end - aligned - size);
  data_ = reinterpret_cast<void*>(aligned);
  size_ = size;
  if (page == kHugePage) ::madvise(data_, size_, MADV_HUGEPAGE);  // a hint; the kernel may have no huge pages
}

}  // namespace lockstep::checkpoint::internal
