#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>

#include <lockstep/base/process/fork_guard.h>
#include <lockstep/base/unique_fd.h>

namespace lockstep::fsdp::internal {

/// Memory that lies in a file, so that the kernel can write out what there is no room for.
///
/// The file has a name only until all processes that share it have opened it (unlink()); its blocks are the file system's again
/// when the last of them has unmapped it or ended, however it ended. What a process that was killed before has left is removed
/// when the next one makes a file in the same directory: a living one holds a lock on its file. Forked children don't have it.
class OffloadFile {
 public:
  /// Makes a file of `bytes` zeros, whose blocks are reserved, so that no later write finds the disk full. Throws
  /// c10::DistBackendError that names the directory, the size and what is free when it can't be made.
  static std::shared_ptr<OffloadFile> create(const std::filesystem::path& directory, size_t bytes);
  /// Opens what another process of this host has made. Throws c10::DistBackendError.
  static std::shared_ptr<OffloadFile> open(const std::filesystem::path& path, size_t bytes);

  OffloadFile(const OffloadFile&) = delete;
  OffloadFile& operator=(const OffloadFile&) = delete;
  ~OffloadFile();

  std::byte* data() const { return data_; }
  const std::filesystem::path& path() const { return path_; }
  /// Takes the name away, in the process that has made it.
  void unlink();

 private:
  OffloadFile(UniqueFd fd, std::filesystem::path path, size_t bytes, bool has_name);

  ForkGuard fork_guard_;
  UniqueFd fd_;  // keeps the lock while there is a name
  std::filesystem::path path_;
  std::byte* data_ = nullptr;
  size_t size_;
  bool has_name_;
};

/// `directory`, or where temporary files go if it is empty.
std::filesystem::path offload_directory(const std::filesystem::path& directory);

}  // namespace lockstep::fsdp::internal
