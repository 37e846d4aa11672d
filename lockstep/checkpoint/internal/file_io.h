#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include <lockstep/base/errors.h>
#include <lockstep/base/unique_fd.h>

/// Files with errors that say what could not be done to which path, and why.
namespace lockstep::checkpoint::internal {

/// Throws "cannot WHAT PATH: No space left on device": CheckpointError for a name that leads nowhere (a part
/// of a checkpoint is missing), CheckpointIoError for any other reason.
[[noreturn]] void throw_system_error(std::string_view what, const std::filesystem::path& path, int error);

/// Whether there is something of that name, or a directory. Throws CheckpointIoError when the system refuses
/// to tell.
bool exists(const std::filesystem::path& path);
bool is_directory(const std::filesystem::path& path);

/// Logs the error, waits, and says whether to try again after so many attempts.
bool try_again(int attempts, const CheckpointIoError& error);

/// What `read` returns. It is tried again, twice within a second, when it throws CheckpointIoError: a
/// server may have been away, a handle stale. Then the last error is thrown.
template <class Read>
auto with_retries(const Read& read) {
  for (int attempts = 1;; ++attempts) {
    try {
      return read();
    } catch (const CheckpointIoError& error) {
      if (!try_again(attempts, error)) throw;
    }
  }
}

/// A new file, written from its beginning. Not thread-safe.
class OutputFile {
 public:
  /// Throws CheckpointError, also when there is one of that name.
  explicit OutputFile(std::filesystem::path path);
  void write(const void* data, size_t bytes);
  /// Closes it, after what was written has reached the disk if `sync`. Without a call it is only closed.
  void finish(bool sync);
  int64_t size() const { return size_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  UniqueFd fd_;
  int64_t size_ = 0;
};

/// A regular file, read at any place. Thread-safe.
class InputFile {
 public:
  /// Throws CheckpointError when it can't be opened or is no regular file.
  explicit InputFile(std::filesystem::path path);
  /// Throws CheckpointError unless there are so many bytes at `offset`.
  void read(void* data, size_t bytes, int64_t offset) const;
  int64_t size() const { return size_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  UniqueFd fd_;
  int64_t size_ = 0;
};

/// All of a file. Throws CheckpointError, also when it has more than `most` bytes.
std::string read_file(const std::filesystem::path& path, int64_t most);

/// A name beside `path` that no other process uses, on any host that shares the disk.
std::filesystem::path temporary_name(const std::filesystem::path& path);

/// Removes what killed processes have left of writing `path` under a temporary_name(): files that nothing was
/// written to for an hour. What can't be removed stays.
void remove_old_temporaries(const std::filesystem::path& path);

/// Before a file or folder gets the name `path`: throws CheckpointError in a process that is left over from an earlier
/// generation of its job (objection_to_old_generation), whose present one saves there.
void check_generation(const std::filesystem::path& path);

/// Makes renames, creations and removals in a directory last.
void sync_directory(const std::filesystem::path& directory);

}  // namespace lockstep::checkpoint::internal
