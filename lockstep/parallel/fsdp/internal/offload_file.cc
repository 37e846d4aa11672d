#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <string_view>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/base/log.h>
#include <lockstep/base/process/memory.h>
#include <lockstep/base/random_bytes.h>
#include <lockstep/base/text/hex.h>
#include <lockstep/parallel/fsdp/internal/offload_file.h>
#include <lockstep/transport/host/memory/forked_memory.h>

namespace lockstep::fsdp::internal {
namespace {

using std::filesystem::path;

constexpr std::string_view kFilePrefix = ".lockstep-offload-";

void check_file(bool good, const char* action, const path& file, size_t bytes, int error) {
  TORCH_CHECK_WITH(DistBackendError, good, "FullyShardedDataParallel: cpu_offload can't ", action,
                   " a file of ", format_bytes(static_cast<int64_t>(bytes)), " at ", file.string(), ": ",
                   std::strerror(error));
}

bool try_lock(int fd) {
  int result = 0;
  do {
    result = ::flock(fd, LOCK_EX | LOCK_NB);
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

/// What processes have left that are gone: no process holds their locks.
void remove_left_files(const path& directory) {
  using std::filesystem::directory_iterator;
  std::error_code error;
  for (auto entry = directory_iterator(directory, error); !error && entry != directory_iterator();
       entry.increment(error)) {
    const path& file = entry->path();
    if (!file.filename().string().starts_with(kFilePrefix)) continue;
    const UniqueFd fd(::open(file.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC));
    if (!fd || !try_lock(fd.get()) || ::unlink(file.c_str()) != 0) continue;
    LOCKSTEP_LOG(kInfo) << "removed " << file.string() << ", which a process left that has ended";
  }
}

/// A new file with a lock on it. Another process may take it for a left one before it has its lock.
std::pair<UniqueFd, path> make_locked_file(const path& directory, size_t bytes) {
  for (;;) {
    path file = directory / (std::string(kFilePrefix) + to_hex(random_bytes<8>()));
    UniqueFd fd(::open(file.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
    check_file(static_cast<bool>(fd), "make", file, bytes, errno);
    if (!try_lock(fd.get())) {
      const int error = errno;
      ::unlink(file.c_str());
      if (error == EWOULDBLOCK) continue;
      check_file(false, "lock", file, bytes, error);
    }
    struct stat status {};
    if (::fstat(fd.get(), &status) == 0 && status.st_nlink > 0) return {std::move(fd), std::move(file)};
  }
}

std::string space_left(const path& directory) {
  std::error_code error;
  const auto space = std::filesystem::space(directory, error);
  return error ? "" : "; " + format_bytes(static_cast<int64_t>(space.available)) + " are free there";
}

}  // namespace

path offload_directory(const path& directory) {
  return directory.empty() ? std::filesystem::temp_directory_path() : directory;
}

std::shared_ptr<OffloadFile> OffloadFile::create(const std::filesystem::path& directory, size_t bytes) {
  remove_left_files(directory);
  auto [fd, name] = make_locked_file(directory, bytes);
  const int descriptor = fd.get();
  std::shared_ptr<OffloadFile> file(new OffloadFile(std::move(fd), name, bytes, /*has_name=*/true));
  int error = failpoint::fails_with("fsdp.offload.allocate");
  if (error == 0) {
    do {
      error = ::posix_fallocate(descriptor, 0, static_cast<off_t>(bytes));
    } while (error == EINTR);
  }
  TORCH_CHECK_WITH(DistBackendError, error == 0, "FullyShardedDataParallel: cpu_offload needs ",
                   format_bytes(static_cast<int64_t>(bytes)), " in ", directory.string(), ": ",
                   std::strerror(error), space_left(directory),
                   "; name a directory with more room in cpu_offload.directory");
  return file;
}

std::shared_ptr<OffloadFile> OffloadFile::open(const std::filesystem::path& file, size_t bytes) {
  UniqueFd fd(::open(file.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC));
  check_file(static_cast<bool>(fd), "open", file, bytes, errno);
  return std::shared_ptr<OffloadFile>(new OffloadFile(std::move(fd), file, bytes, /*has_name=*/false));
}

OffloadFile::OffloadFile(UniqueFd fd, std::filesystem::path path, size_t bytes, bool has_name)
    : fd_(std::move(fd)), path_(std::move(path)), size_(bytes), has_name_(has_name) {
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  const int error = errno;
  if (address == MAP_FAILED && has_name_) ::unlink(path_.c_str());
  check_file(address != MAP_FAILED, "map", path_, bytes, error);
  data_ = static_cast<std::byte*>(address);
  transport::keep_from_forked_children(address, bytes);
}

void OffloadFile::unlink() {
  if (std::exchange(has_name_, false)) ::unlink(path_.c_str());
  fd_.reset();
}

OffloadFile::~OffloadFile() {
  if (fork_guard_.in_forked_child()) return;  // the parent's
  unlink();
  transport::forget_forked_memory(data_);
  ::munmap(data_, size_);
}

}  // namespace lockstep::fsdp::internal
