#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <random>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include <lockstep/checkpoint/checkpoint_error.h>
#include <lockstep/checkpoint/internal/file_io.h>

namespace lockstep::internal {
namespace {

// One call of the kernel moves at most 2 GiB.
constexpr size_t kMostAtOnce = size_t{1} << 30;

}  // namespace

void throw_system_error(std::string_view what, const std::filesystem::path& path, int error) {
  LOCKSTEP_CHECK_FILE(false, "cannot ", what, " ", path.string(), ": ", std::strerror(error));
}

OutputFile::OutputFile(std::filesystem::path path)
    : path_(std::move(path)), fd_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) {
  if (!fd_) throw_system_error("create", path_, errno);
}

void OutputFile::write(const void* data, size_t bytes) {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t wrote = ::write(fd_.get(), from, std::min(bytes, kMostAtOnce));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) throw_system_error("write", path_, wrote < 0 ? errno : ENOSPC);
    from += wrote;
    bytes -= static_cast<size_t>(wrote);
    size_ += wrote;
  }
}

void OutputFile::finish(bool sync) {
  if (sync && ::fsync(fd_.get()) != 0) throw_system_error("sync", path_, errno);
  // Network file systems say only now that there was no space.
  if (::close(fd_.release()) != 0 && errno != EINTR) throw_system_error("close", path_, errno);
}

InputFile::InputFile(std::filesystem::path path)
    // Not blocking: a named pipe in a file's place must not make us wait for its writer.
    : path_(std::move(path)), fd_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  if (!fd_) throw_system_error("open", path_, errno);
  struct stat status {};
  if (::fstat(fd_.get(), &status) != 0) throw_system_error("look at", path_, errno);
  LOCKSTEP_CHECK_FILE(S_ISREG(status.st_mode), path_.string(), " is no regular file");
  size_ = status.st_size;
}

void InputFile::read(void* data, size_t bytes, int64_t offset) const {
  char* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = ::pread(fd_.get(), to, std::min(bytes, kMostAtOnce), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_system_error("read", path_, errno);
    LOCKSTEP_CHECK_FILE(got > 0, path_.string(), " is truncated: it ends at byte ", offset);
    to += got;
    bytes -= static_cast<size_t>(got);
    offset += got;
  }
}

std::string read_file(const std::filesystem::path& path, int64_t most) {
  const InputFile file(path);
  LOCKSTEP_CHECK_FILE(file.size() <= most, path.string(), " has ", file.size(), " bytes, more than the ",
                      most, " that such a file may have");
  std::string bytes(static_cast<size_t>(file.size()), '\0');
  file.read(bytes.data(), bytes.size(), 0);
  return bytes;
}

std::filesystem::path temporary_name(const std::filesystem::path& path) {
  std::random_device source;
  std::array<char, 32> suffix{};
  std::snprintf(suffix.data(), suffix.size(), ".tmp-%08x%08x", source(), source());
  return path.string() + suffix.data();
}

void sync_directory(const std::filesystem::path& directory) {
  const UniqueFd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) throw_system_error("open", directory, errno);
  // EINVAL: a file system that has nothing to sync for a directory.
  if (::fsync(fd.get()) != 0 && errno != EINVAL) throw_system_error("sync", directory, errno);
}

}  // namespace lockstep::internal
