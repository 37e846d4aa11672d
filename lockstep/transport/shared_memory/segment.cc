#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <c10/util/Exception.h>

#include <lockstep/base/memory.h>
#include <lockstep/transport/shared_memory/forked_memory.h>
#include <lockstep/transport/shared_memory/segment.h>

namespace lockstep::transport {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

std::shared_ptr<Segment> Segment::create(size_t bytes) {
  check_memory_available(static_cast<int64_t>(bytes), "a shared-memory segment");
  UniqueFd fd(::memfd_create("lockstep", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  TORCH_CHECK_WITH(
      DistBackendError, fd, "memfd_create failed: ", std::strerror(errno),
      "; Lockstep's shared memory needs Linux 3.17 or newer and a sandbox that allows memfd_create");
  TORCH_CHECK_WITH(DistBackendError, ::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0,
                   "a shared-memory segment of ", format_bytes(static_cast<int64_t>(bytes)),
                   " can't be made: ", std::strerror(errno));
  TORCH_CHECK_WITH(DistBackendError, ::fcntl(fd.get(), F_ADD_SEALS, kSeals) == 0,
                   "a shared-memory segment can't be sealed: ", std::strerror(errno));
  return std::shared_ptr<Segment>(new Segment(std::move(fd), bytes));
}

std::shared_ptr<Segment> Segment::map(UniqueFd fd, size_t bytes) {
  struct stat status {};
  TORCH_CHECK_WITH(DistBackendError,
                   ::fstat(fd.get(), &status) == 0 && static_cast<size_t>(status.st_size) == bytes,
                   "a peer sent a segment of ", status.st_size, " bytes that it announced with ", bytes);
  TORCH_CHECK_WITH(DistBackendError, (::fcntl(fd.get(), F_GET_SEALS) & kSeals) == kSeals,
                   "a peer sent a segment that is not sealed");
  return std::shared_ptr<Segment>(new Segment(std::move(fd), bytes));
}

Segment::Segment(UniqueFd fd, size_t bytes) : fd_(std::move(fd)), size_(bytes) {
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  TORCH_CHECK_WITH(DistBackendError, address != MAP_FAILED, "mapping ",
                   format_bytes(static_cast<int64_t>(bytes)),
                   " of shared memory failed: ", std::strerror(errno), "; is RLIMIT_AS (ulimit -v) too low?");
  data_ = static_cast<std::byte*>(address);
  keep_from_forked_children(address, bytes);
  ::madvise(address, bytes, MADV_HUGEPAGE);  // where the system offers large pages
}

Segment::~Segment() {
  if (fork_guard_.in_forked_child()) return;  // the child has something else at this address
  forget_forked_memory(data_);
  ::munmap(data_, size_);
}

}  // namespace lockstep::transport
