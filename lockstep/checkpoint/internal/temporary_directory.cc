#include <array>
#include <cerrno>
#include <cstdio>
#include <fcntl.h>
#include <random>
#include <string>
#include <sys/file.h>
#include <sys/stat.h>
#include <system_error>
#include <utility>

#include <lockstep/base/failpoint.h>
#include <lockstep/base/log.h>
#include <lockstep/checkpoint/checkpoint_error.h>
#include <lockstep/checkpoint/internal/file_io.h>
#include <lockstep/checkpoint/internal/manifest.h>
#include <lockstep/checkpoint/internal/temporary_directory.h>

namespace lockstep::internal {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMark = ".lockstep-tmp-";

fs::path hidden_name(const fs::path& destination) {
  std::array<char, 20> random{};
  std::random_device source;
  std::snprintf(random.data(), random.size(), "%08x%08x", source(), source());
  return destination.parent_path() / ("." + destination.filename().string() + kMark + random.data());
}

/// A lock on the directory; none if another process has it, or the file system knows no locks.
UniqueFd lock_directory(const fs::path& path, int operation) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd) return {};
  int result = 0;
  do {
    result = ::flock(fd.get(), operation);
  } while (result != 0 && errno == EINTR);
  if (result != 0) return {};
  return fd;
}

bool is_at(const UniqueFd& fd, const fs::path& path) {
  struct stat held {};
  struct stat there {};
  return ::fstat(fd.get(), &held) == 0 && ::stat(path.c_str(), &there) == 0 && held.st_ino == there.st_ino &&
         held.st_dev == there.st_dev;
}

void remove_tree(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) {
    LOCKSTEP_LOG(kWarning) << "cannot remove " << path.string() << ": " << error.message();
  }
}

/// Whether it is a checkpoint, or what is left of one: other people's directories are theirs.
bool may_be_replaced(const fs::path& directory) {
  std::error_code error;
  return fs::is_directory(directory, error) &&
         (fs::is_empty(directory, error) || fs::exists(directory / kManifestName, error) ||
          fs::exists(directory / kStateName, error));
}

}  // namespace

void remove_left_overs(const fs::path& parent) {
  std::error_code error;
  for (auto entry = fs::directory_iterator(parent, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (name.front() != '.' || name.find(kMark) == std::string::npos) continue;
    const UniqueFd lock = lock_directory(entry->path(), LOCK_EX | LOCK_NB);
    if (!lock) continue;
    LOCKSTEP_LOG(kInfo) << "removing " << entry->path().string() << ", which a writer left that has ended";
    remove_tree(entry->path());
  }
}

TemporaryDirectory::TemporaryDirectory(fs::path destination) : destination_(std::move(destination)) {
  const fs::path parent = destination_.parent_path();
  std::error_code error;
  fs::create_directories(parent, error);
  if (error) throw_system_error("create", parent, error.value());
  remove_left_overs(parent);
  // Between its making and its locking somebody may take a new directory for a left-over, and remove it.
  for (int attempt = 0; attempt < 100; ++attempt) {
    path_ = hidden_name(destination_);
    if (::mkdir(path_.c_str(), 0777) != 0) throw_system_error("create", path_, errno);
    lock_ = lock_directory(path_, LOCK_EX);
    if (!lock_ && fs::exists(path_, error)) return;  // no locks here, so nobody removes it either
    if (lock_ && is_at(lock_, path_)) return;
  }
  LOCKSTEP_CHECK_FILE(false, "cannot keep ", path_.string(), ": another process removes it");
}

TemporaryDirectory::~TemporaryDirectory() {
  if (!path_.empty() && !fork_guard_.in_forked_child()) remove_tree(path_);
}

void TemporaryDirectory::publish(bool overwrite, bool sync) {
  if (sync) sync_directory(path_);
  failpoint::here("checkpoint.before_rename");
  fs::path old;
  if (::renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, destination_.c_str(), RENAME_NOREPLACE) == 0) {
    path_.clear();
  } else if (errno == EEXIST) {
    LOCKSTEP_CHECK_FILE(overwrite, destination_.string(),
                        " exists already; take another name, or say overwrite to replace it");
    LOCKSTEP_CHECK_FILE(may_be_replaced(destination_), destination_.string(),
                        " is no checkpoint, so it is not replaced; take another name");
    if (::renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, destination_.c_str(), RENAME_EXCHANGE) != 0) {
      throw_system_error("replace (this file system may be unable to, so take another name)", destination_,
                         errno);
    }
    old = std::exchange(path_, {});                 // which is the old one's name now
  } else if (errno == EINVAL || errno == ENOSYS) {  // NFS, say, knows only rename(2)
    std::error_code error;
    LOCKSTEP_CHECK_FILE(!fs::exists(destination_, error), destination_.string(),
                        " exists already, and this file system can't exchange names; take another one");
    if (std::rename(path_.c_str(), destination_.c_str()) != 0) {
      throw_system_error("rename a temporary directory to", destination_, errno);
    }
    path_.clear();
  } else {
    throw_system_error("rename a temporary directory to", destination_, errno);
  }
  failpoint::here("checkpoint.renamed");
  if (sync) sync_directory(destination_.parent_path());
  if (!old.empty()) remove_tree(old);  // only now is the new one there for good
}

void remove_checkpoint_directory(const fs::path& directory) {
  const fs::path away = hidden_name(directory);
  if (std::rename(directory.c_str(), away.c_str()) != 0) throw_system_error("remove", directory, errno);
  failpoint::here("checkpoint.removing");
  std::error_code error;
  fs::remove_all(away, error);
  if (error) throw_system_error("remove", away, error.value());
}

}  // namespace lockstep::internal
