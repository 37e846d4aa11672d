#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <c10/util/Exception.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/base/files/file_size_signal.h>
#include <lockstep/base/process/memory.h>
#include <lockstep/transport/host/memory/forked_memory.h>
#include <lockstep/transport/host/memory/segment.h>
#include <lockstep/transport/local_socket.h>

namespace lockstep::transport {
namespace {

constexpr size_t kPrivatePieceBytes = size_t{16} << 20;
constexpr size_t kMostPrivatePieces =
    64;  // each is a mapping of its own, of which the kernel allows some 65,000

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

std::shared_ptr<Segment> Segment::create(size_t bytes) {
  check_memory_available(static_cast<int64_t>(bytes), "a shared-memory segment");
  UniqueFd fd(::memfd_create("lockstep", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const bool none_left = !fd && (errno == EMFILE || errno == ENFILE);
  TORCH_CHECK_WITH(DistBackendError, !none_left, no_descriptor_left(), "so it can't make shared memory");
  TORCH_CHECK_WITH(
      DistBackendError, fd, "memfd_create failed: ", std::strerror(errno),
      "; Lockstep's shared memory needs Linux 3.17 or newer and a sandbox that allows memfd_create");
  {
    const FileSizeSignalBlock block;
    TORCH_CHECK_WITH(DistBackendError, ::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0,
                     "a shared-memory segment of ", format_bytes(static_cast<int64_t>(bytes)),
                     " can't be made: ", std::strerror(errno),
                     errno == EFBIG ? "; is RLIMIT_FSIZE (ulimit -f) too low?" : "");
  }
  TORCH_CHECK_WITH(DistBackendError, ::fcntl(fd.get(), F_ADD_SEALS, kSeals) == 0,
                   "a shared-memory segment can't be sealed: ", std::strerror(errno));
  std::shared_ptr<Segment> segment(new Segment(fd, bytes));
  segment->fd_ = std::move(fd);
  return segment;
}

std::shared_ptr<Segment> Segment::map(UniqueFd fd, size_t bytes) {
  struct stat status {};
  TORCH_CHECK_WITH(DistBackendError,
                   ::fstat(fd.get(), &status) == 0 && static_cast<size_t>(status.st_size) == bytes,
                   "a peer sent a segment of ", status.st_size, " bytes that it announced with ", bytes);
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);  // -1: of a file that can have none
  TORCH_CHECK_WITH(DistBackendError, seals >= 0 && (seals & kSeals) == kSeals,
                   "a peer sent a segment that is not sealed");
  return std::shared_ptr<Segment>(new Segment(fd, bytes));
}

Segment::Segment(const UniqueFd& fd, size_t bytes) : size_(bytes) {
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  TORCH_CHECK_WITH(DistBackendError, address != MAP_FAILED, "mapping ",
                   format_bytes(static_cast<int64_t>(bytes)),
                   " of shared memory failed: ", std::strerror(errno), "; is RLIMIT_AS (ulimit -v) too low?");
  data_ = static_cast<std::byte*>(address);
  keep_from_forked_children(address, bytes);
  ::madvise(address, bytes, MADV_HUGEPAGE);  // where the system offers large pages
}

bool Segment::make_private(size_t offset, size_t bytes) {
  // Piece by piece, and giving back the shared pages, so that it takes hardly more memory than there was.
  const size_t piece = std::max(kPrivatePieceBytes, bytes / kMostPrivatePieces / page_bytes() * page_bytes());
  for (size_t done = 0; done < bytes; done += piece) {
    const size_t now = std::min(piece, bytes - done);
    if (!make_piece_private(offset + done, now)) return false;
    ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset + done),
                static_cast<off_t>(now));
  }
  return true;
}

bool Segment::make_piece_private(size_t offset, size_t bytes) {
  if (const int error = failpoint::fails_with("make_piece_private"); error != 0) {
    errno = error;
    return false;
  }
  void* fresh = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fresh == MAP_FAILED) return false;
  ::madvise(fresh, bytes, MADV_HUGEPAGE);
  ::madvise(fresh, bytes, MADV_DONTFORK);
  std::memcpy(fresh, data_ + offset, bytes);
  if (::mremap(fresh, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, data_ + offset) != MAP_FAILED) return true;
  // It may have unmapped what was there.
  const int error = errno;
  const bool there = ::mmap(data_ + offset, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
  if (there) std::memcpy(data_ + offset, fresh, bytes);
  ::munmap(fresh, bytes);
  errno = error;
  return there;
}

bool Segment::share(size_t offset, size_t bytes) {
  if (::mmap(data_ + offset, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_.get(),
             static_cast<off_t>(offset)) == MAP_FAILED) {
    return false;
  }
  ::madvise(data_ + offset, bytes, MADV_HUGEPAGE);
  ::madvise(data_ + offset, bytes, MADV_DONTFORK);
  return true;
}

Segment::~Segment() {
  if (fork_guard_.in_forked_child()) return;  // the child has something else at this address
  forget_forked_memory(data_);
  ::munmap(data_, size_);
}

}  // namespace lockstep::transport
