#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fcntl.h>
#include <optional>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <utility>

#include <lockstep/base/errors.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/files/file_size_signal.h>
#include <lockstep/base/files/write_all.h>
#include <lockstep/base/log.h>
#include <lockstep/base/random_bytes.h>
#include <lockstep/base/text/hex.h>
#include <lockstep/checkpoint/internal/file_io.h>
#include <lockstep/rendezvous/generation.h>

namespace lockstep::checkpoint::internal {
namespace {

// One call of the kernel moves at most 2 GiB.
constexpr size_t kMostAtOnce = size_t{1} << 30;
constexpr std::string_view kTemporary = ".tmp-";
constexpr size_t kTemporaryDigits = 16;
constexpr std::array kRetryWaits = {std::chrono::milliseconds(100), std::chrono::milliseconds(500)};

/// The name leads nowhere.
bool is_missing(int error) {
  return error == ENOENT || error == ENOTDIR || error == ELOOP || error == ENAMETOOLONG;
}

/// Nothing when there is nothing of that name.
std::optional<struct stat> look_at(const std::filesystem::path& path) {
  struct stat status {};
  int error = failpoint::fails_with("checkpoint.look");
  if (error == 0 && ::stat(path.c_str(), &status) != 0) error = errno;
  if (error == 0) return status;
  if (is_missing(error)) return std::nullopt;
  throw_system_error("look at", path, error);
}

}  // namespace

void throw_system_error(std::string_view what, const std::filesystem::path& path, int error) {
  const std::string text = c10::str("cannot ", what, " ", path.string(), ": ", std::strerror(error));
  LOCKSTEP_CHECK_FILE(!is_missing(error), text);
  throw CheckpointIoError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text);
}

bool exists(const std::filesystem::path& path) {
  return look_at(path).has_value();
}

bool is_directory(const std::filesystem::path& path) {
  const auto status = look_at(path);
  return status && S_ISDIR(status->st_mode);
}

bool try_again(int attempts, const CheckpointIoError& error) {
  if (attempts > static_cast<int>(kRetryWaits.size())) return false;
  const auto wait = kRetryWaits.at(static_cast<size_t>(attempts - 1));
  LOCKSTEP_LOG(kWarning) << error.what_without_backtrace() << "; trying again in " << wait.count() << " ms";
  std::this_thread::sleep_for(wait);
  return true;
}

OutputFile::OutputFile(std::filesystem::path path)
    : path_(std::move(path)), fd_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) {
  if (!fd_) throw_system_error("create", path_, errno);
}

void OutputFile::write(const void* data, size_t bytes) {
  const FileSizeSignalBlock block;
  const size_t written = write_all(fd_.get(), {static_cast<const char*>(data), bytes});
  if (written < bytes) throw_system_error("write", path_, errno);
  size_ += static_cast<int64_t>(written);
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
  if (const int error = failpoint::fails_with("checkpoint.open")) throw_system_error("open", path_, error);
  struct stat status {};
  if (::fstat(fd_.get(), &status) != 0) throw_system_error("look at", path_, errno);
  LOCKSTEP_CHECK_FILE(S_ISREG(status.st_mode), path_.string(), " is no regular file");
  size_ = status.st_size;
}

void InputFile::read(void* data, size_t bytes, int64_t offset) const {
  char* to = static_cast<char*>(data);
  if (const int error = failpoint::fails_with("checkpoint.read")) throw_system_error("read", path_, error);
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
  return path.string() + std::string(kTemporary) + to_hex(random_bytes<kTemporaryDigits / 2>());
}

void remove_old_temporaries(const std::filesystem::path& path) {
  const std::string begin = path.filename().string() + std::string(kTemporary);
  const auto is_temporary = [&](const std::string& name) {
    return name.starts_with(begin) && name.size() == begin.size() + kTemporaryDigits &&
           name.find_first_not_of("0123456789abcdef", begin.size()) == std::string::npos;
  };
  const auto oldest = std::filesystem::file_time_type::clock::now() - std::chrono::hours(1);
  std::error_code error;
  std::filesystem::directory_iterator file(path.has_parent_path() ? path.parent_path() : ".", error);
  for (; !error && file != std::filesystem::directory_iterator(); file.increment(error)) {
    std::error_code ignored;
    if (!is_temporary(file->path().filename().string())) continue;
    const auto written = std::filesystem::last_write_time(file->path(), ignored);
    if (!ignored && written < oldest) std::filesystem::remove(file->path(), ignored);
  }
}

void check_generation(const std::filesystem::path& path) {
  const auto objection = objection_to_old_generation();
  LOCKSTEP_CHECK_FILE(!objection, path.string(), " is not saved: ", *objection);
}

void sync_directory(const std::filesystem::path& directory) {
  const UniqueFd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) throw_system_error("open", directory, errno);
  // EINVAL: a file system that has nothing to sync for a directory.
  if (::fsync(fd.get()) != 0 && errno != EINVAL) throw_system_error("sync", directory, errno);
}

}  // namespace lockstep::checkpoint::internal
