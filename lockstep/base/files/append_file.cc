#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <fstream>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include <lockstep/base/files/append_file.h>
#include <lockstep/base/files/file_replacement.h>
#include <lockstep/base/files/file_size_signal.h>
#include <lockstep/base/files/write_all.h>
#include <lockstep/base/log.h>

namespace lockstep {
namespace {

/// Where the last whole line ends; -1 when reading fails.
off_t end_of_lines(int fd) {
  std::array<char, 4096> block{};
  off_t end = ::lseek(fd, 0, SEEK_END);
  while (end > 0) {
    const off_t begin = std::max<off_t>(0, end - static_cast<off_t>(block.size()));
    const auto wanted = static_cast<size_t>(end - begin);
    if (::pread(fd, block.data(), wanted, begin) != static_cast<ssize_t>(wanted)) return -1;
    for (size_t i = wanted; i > 0; --i) {
      if (block[i - 1] == '\n') return begin + static_cast<off_t>(i);
    }
    end = begin;
  }
  return end;
}

}  // namespace

AppendFile::AppendFile(std::string owner, std::filesystem::path path, Kind kind)
    : owner_(std::move(owner)), path_(std::move(path)), kind_(kind) {}

bool AppendFile::fail(const char* what) {
  if (!std::exchange(warned_, true)) {
    LOCKSTEP_LOG(kWarning) << owner_ << ": cannot " << what << " " << path_.string() << ": "
                           << std::strerror(errno)
                           << "; what it should hold is lost until that is mended, and the program goes on";
  }
  return false;
}

bool AppendFile::open() {
  if (fd_) return true;
  std::error_code error;
  if (path_.has_parent_path()) std::filesystem::create_directories(path_.parent_path(), error);
  // Where making the folder failed, opening the file says why.
  fd_.reset(::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (!fd_) return fail("open");
  struct stat status {};
  is_regular_ = ::fstat(fd_.get(), &status) == 0 && S_ISREG(status.st_mode);
  return !taken_over_ || cut_partial_line();
}

bool AppendFile::take_over() {
  if (taken_over_) return open();
  if (!open() || !cut_partial_line()) return false;
  taken_over_ = true;
  return true;
}

bool AppendFile::cut_partial_line() {
  if (!is_regular_ || kind_ == Kind::kBinary) return true;  // a pipe has no end to cut
  const off_t size = ::lseek(fd_.get(), 0, SEEK_END);
  const off_t end = end_of_lines(fd_.get());
  if (size < 0 || end < 0 || (end != size && ::ftruncate(fd_.get(), end) != 0)) {
    fd_.reset();
    return fail("read");
  }
  return true;
}

std::optional<AppendFile::Line> AppendFile::first_line() {
  if (!open() || !is_regular_) return std::nullopt;
  std::ifstream file(path_, std::ios::binary);
  Line line;
  if (!std::getline(file, line.text)) return std::nullopt;
  line.ended = !file.eof();
  return line;
}

bool AppendFile::append(std::string_view record) {
  if (!open()) {
    ++lost_;
    return false;
  }
  const FileSizeSignalBlock block;
  // One write(2), but where a signal or a full disk cuts it short: the next one tells which.
  const size_t written = write_all(fd_.get(), record);
  if (written == record.size()) return true;
  ++lost_;
  if (written > 0) {
    // The disk took a part, which must go.
    const int why = errno;
    const off_t end = ::lseek(fd_.get(), 0, SEEK_END);
    const auto taken = static_cast<off_t>(written);
    if (end < taken || ::ftruncate(fd_.get(), end - taken) != 0) fd_.reset();  // open() cuts lines, at least
    errno = why;
  }
  return fail("write to");
}

bool AppendFile::sync() {
  return fd_ && ::fdatasync(fd_.get()) == 0;
}

bool AppendFile::rewrite_lines(
    const std::function<std::optional<std::string>(std::string_view line)>& change) {
  if (!take_over()) return false;
  if (!is_regular_) return true;
  const FileSizeSignalBlock block;
  FileReplacement replacement(path_.string() + ".new");
  {
    std::ifstream old(path_, std::ios::binary);
    if (!old.is_open()) return fail("rewrite");
    std::ofstream fresh(replacement.name(), std::ios::binary | std::ios::trunc);
    for (std::string line; std::getline(old, line);) {
      if (const auto changed = change(line)) fresh << *changed << '\n';
    }
    fresh.close();
    if (old.bad() || !fresh) return fail("rewrite");
  }
  UniqueFd fresh(::open(replacement.name().c_str(), O_RDWR | O_APPEND | O_CLOEXEC));
  if (!fresh || ::fsync(fresh.get()) != 0 || !replacement.commit(path_)) return fail("rewrite");
  fd_ = std::move(fresh);
  return true;
}

}  // namespace lockstep
