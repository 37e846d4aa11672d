#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/file.h>
#include <sys/stat.h>
#include <system_error>
#include <utility>

#include <lockstep/base/errors.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/log.h>
#include <lockstep/base/random_bytes.h>
#include <lockstep/base/text/hex.h>
#include <lockstep/checkpoint/internal/candidates.h>
#include <lockstep/checkpoint/internal/file_io.h>
#include <lockstep/checkpoint/internal/manifest.h>
#include <lockstep/checkpoint/internal/temporary_directory.h>

namespace lockstep::checkpoint::internal {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMark = ".lockstep-tmp-";

fs::path hidden_name(const fs::path& destination) {
  return destination.parent_path() /
         ("." + destination.filename().string() + kMark + to_hex(random_bytes<8>()));
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

/// renameat2(2): 0, or the error.
int rename_with(const fs::path& from, const fs::path& to, unsigned int flags) {
  if (const int error = failpoint::fails_with("checkpoint.rename_flags")) return error;
  return ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) == 0 ? 0 : errno;
}

/// NFS, say, knows only rename(2).
bool lacks_flags(int error) {
  return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP;
}

/// Whether it is a checkpoint, or what is left of one: other people's directories are theirs.
bool may_be_replaced(const fs::path& directory) {
  std::error_code error;
  if (!fs::is_directory(directory, error)) return false;
  if (fs::is_empty(directory, error) || names_our_format(directory)) return true;
  return is_managers_name(directory) &&
         (fs::exists(directory / kManifestName, error) || fs::exists(directory / kStateName, error));
}

/// Removes a checkpoint, if there is one, so that no process sees a part of it. What can't be removed is
/// told.
void discard(const fs::path& directory) {
  try {
    if (!names_our_format(directory)) return;
  } catch (const CheckpointIoError& error) {
    LOCKSTEP_LOG(kWarning) << "not removed: " << error.what_without_backtrace();
    return;
  }
  const fs::path away = hidden_name(directory);
  if (std::rename(directory.c_str(), away.c_str()) == 0) {
    remove_tree(away);
  } else {
    LOCKSTEP_LOG(kWarning) << "cannot remove " << directory.string() << ": " << std::strerror(errno);
  }
}

}  // namespace

bool is_temporary_name(const fs::path& directory) {
  const std::string name = directory.filename().string();
  return name.starts_with('.') && name.find(kMark) != std::string::npos;
}

void remove_left_overs(const fs::path& parent) {
  std::error_code error;
  for (auto entry = fs::directory_iterator(parent, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    if (!is_temporary_name(entry->path())) continue;
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
  // Before a new directory is locked, another process may take it for a left-over and remove it.
  for (int attempt = 0; attempt < 100; ++attempt) {
    path_ = hidden_name(destination_);
    if (::mkdir(path_.c_str(), 0777) != 0) throw_system_error("create", path_, errno);
    lock_ = lock_directory(path_, LOCK_EX);
    if (!lock_ && fs::exists(path_, error)) return;  // no locks here, so no process removes it either
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
  check_generation(destination_);
  const int error = rename_with(path_, destination_, RENAME_NOREPLACE);
  if (error != 0 && error != EEXIST && !lacks_flags(error)) {
    throw_system_error("rename a temporary directory to", destination_, error);
  }
  fs::path old;
  if (error == 0) {
    path_.clear();
  } else {
    old = replace(overwrite);
  }
  failpoint::here("checkpoint.renamed");
  if (sync) sync_directory(destination_.parent_path());
  // Only now is the new one there for good. A writer that was killed may have left the one it moved away.
  if (!old.empty()) remove_tree(old);
  if (overwrite) discard(replaced_name(destination_));
}

/// Takes the destination's name without RENAME_NOREPLACE. Returns where the old one is, if it is to go.
fs::path TemporaryDirectory::replace(bool overwrite) {
  const bool there = internal::exists(destination_);
  LOCKSTEP_CHECK_FILE(!there || overwrite, destination_.string(),
                      " exists already; take another name, or say overwrite to replace it");
  LOCKSTEP_CHECK_FILE(!there || may_be_replaced(destination_), destination_.string(),
                      " is no checkpoint, so it is not replaced; take another name");
  const fs::path moved = replaced_name(destination_);
  if (there) {
    const int error = rename_with(path_, destination_, RENAME_EXCHANGE);
    if (error == 0) return std::exchange(path_, {});  // which is the old one's name now
    if (!lacks_flags(error)) throw_system_error("replace", destination_, error);
    discard(moved);
    LOCKSTEP_CHECK_FILE(!internal::exists(moved), moved.string(), " is in the way of replacing ",
                        destination_.string(), ", and is no checkpoint that could be removed; move it away");
    if (std::rename(destination_.c_str(), moved.c_str()) != 0) {
      throw_system_error("rename to " + moved.string() + " the checkpoint", destination_, errno);
    }
    failpoint::here("checkpoint.moved");
  }
  if (std::rename(path_.c_str(), destination_.c_str()) != 0) {
    const int error = errno;
    if (there)
      std::rename(moved.c_str(), destination_.c_str());  // if that fails too, it is listed where it is
    throw_system_error("rename a temporary directory to", destination_, error);
  }
  path_.clear();
  return {};
}

void remove_checkpoint_directory(const fs::path& directory) {
  const fs::path away = hidden_name(directory);
  if (std::rename(directory.c_str(), away.c_str()) != 0) throw_system_error("remove", directory, errno);
  failpoint::here("checkpoint.removing");
  std::error_code error;
  fs::remove_all(away, error);
  if (error) throw_system_error("remove", away, error.value());
}

}  // namespace lockstep::checkpoint::internal
