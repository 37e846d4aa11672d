#pragma once

#include <cerrno>
#include <cstdio>  // renameat()
#include <fcntl.h>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace lockstep {

/// A file with the new contents of another one, beside it, whose place it takes at once, by rename(2):
/// a reader finds the old contents or all of the new ones. The writer syncs it too, where
/// what is there must survive a crash of the machine. Not thread-safe.
class FileReplacement {
 public:
  /// `fresh`: the new file's name, relative to the open directory, if one is given. The caller makes it.
  explicit FileReplacement(std::string fresh, int directory = AT_FDCWD)
      : fresh_(std::move(fresh)), directory_(directory) {}
  FileReplacement(const FileReplacement&) = delete;
  FileReplacement& operator=(const FileReplacement&) = delete;
  /// Removes the new file unless commit() succeeded.
  ~FileReplacement() {
    if (!fresh_.empty()) ::unlinkat(directory_, fresh_.c_str(), 0);
  }

  const std::string& name() const { return fresh_; }
  /// Gives the new file the name `path`. False, and errno, when that fails, or would put the file in the place of a device
  /// or a pipe, /dev/null say.
  bool commit(const std::string& path) {
    struct stat former {};
    if (::fstatat(directory_, path.c_str(), &former, 0) == 0 && !S_ISREG(former.st_mode)) {
      errno = S_ISDIR(former.st_mode) ? EISDIR : EOPNOTSUPP;
      return false;
    }
    if (::renameat(directory_, fresh_.c_str(), directory_, path.c_str()) != 0) return false;
    fresh_.clear();
    return true;
  }

 private:
  std::string fresh_;  // empty once it has another name
  const int directory_;
};

}  // namespace lockstep
