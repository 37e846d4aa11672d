#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/files/file_replacement.h>
#include <lockstep/base/files/file_size_signal.h>
#include <lockstep/base/files/write_all.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/flight/internal/record_directory.h>
#include <lockstep/rendezvous/flight_directory.h>

namespace lockstep::flight::internal {
namespace {

constexpr const char* kRemedy = "; set LOCKSTEP_FLIGHT_DIR to a directory that can be written";

std::string temporary_root() {
  return environment::text("TMPDIR").value_or("/tmp");
}

/// Opens, and makes if need be, a directory below `parent` that belongs to this user alone.
UniqueFd private_directory(int parent, const std::string& name, const std::string& path) {
  const bool there = ::mkdirat(parent, name.c_str(), 0700) == 0 || errno == EEXIST;
  TORCH_CHECK(there, "can't make ", path, ": ", std::strerror(errno), kRemedy);
  UniqueFd directory(::openat(parent, name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat status {};
  const bool ours = directory && ::fstat(directory.get(), &status) == 0 && status.st_uid == ::geteuid() &&
                    (status.st_mode & 077) == 0;
  TORCH_CHECK(ours, path, " is not a directory that only this user can enter", kRemedy);
  return directory;
}

/// The directory that the user chose, for whose safety the user answers.
UniqueFd chosen_directory(const std::string& path) {
  std::error_code ignored;  // what matters is whether it can be opened
  if (!std::filesystem::exists(path, ignored)) {
    std::filesystem::create_directories(std::filesystem::path(path).parent_path(), ignored);
    ::mkdir(path.c_str(), 0700);
  }
  UniqueFd directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  TORCH_CHECK(directory, "LOCKSTEP_FLIGHT_DIR is '", path,
              "', which can't be opened: ", std::strerror(errno));
  return directory;
}

/// Removes what earlier jobs have left beside `own`: keeps some of the newest, and all of the last hour.
void remove_old_records(const std::filesystem::path& own) {
  namespace fs = std::filesystem;
  constexpr size_t kMostFolders = 16;
  constexpr uintmax_t kMostBytes = uintmax_t{64} << 20;
  std::error_code ignored;  // other ranks do the same now
  std::vector<std::pair<fs::file_time_type, fs::path>> folders;
  for (const auto& entry : fs::directory_iterator(own.parent_path(), ignored)) {
    const bool records = entry.path().filename().string().starts_with("flight-") && entry.path() != own;
    if (records) folders.emplace_back(entry.last_write_time(ignored), entry.path());
  }
  std::sort(folders.rbegin(), folders.rend());
  const auto recent = fs::file_time_type::clock::now() - std::chrono::hours(1);
  uintmax_t bytes = 0;
  for (size_t i = 0; i < folders.size(); ++i) {
    for (const auto& file : fs::directory_iterator(folders[i].second, ignored)) {
      const uintmax_t size = file.file_size(ignored);
      if (size != static_cast<uintmax_t>(-1)) bytes += size;
    }
    const bool many = i + 1 >= kMostFolders || bytes > kMostBytes;
    if (many && folders[i].first < recent) fs::remove_all(folders[i].second, ignored);
  }
}

UniqueFd open_record_directory() {
  if (auto chosen = environment::text("LOCKSTEP_FLIGHT_DIR")) return chosen_directory(*chosen);
  const std::string path = record_directory();
  const std::string root = temporary_root();
  UniqueFd parent(::open(root.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  TORCH_CHECK(parent, "can't open ", root, ": ", std::strerror(errno), kRemedy);
  const std::filesystem::path below = std::filesystem::path(path).parent_path();
  UniqueFd ours = private_directory(parent.get(), below.filename(), below);
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) remove_old_records(path);
  return private_directory(ours.get(), std::filesystem::path(path).filename(), path);
}

}  // namespace

std::string record_directory() {
  return flight_directory(environment::text);
}

std::string write_record(const std::string& name, const std::string& text) {
  const std::string path = record_directory() + "/" + name;
  const FileSizeSignalBlock block;
  const UniqueFd directory = open_record_directory();
  // What lies under the temporary name was left by a process that died while it wrote; ours is made anew.
  FileReplacement fresh("." + name + "." + std::to_string(::getpid()), directory.get());
  ::unlinkat(directory.get(), fresh.name().c_str(), 0);
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  const UniqueFd file(::openat(directory.get(), fresh.name().c_str(), kFlags, 0600));
  const bool written = file && write_all(file.get(), text) == text.size() && fresh.commit(name);
  TORCH_CHECK(written, "can't write ", path, ": ", std::strerror(errno), kRemedy);
  return path;
}

}  // namespace lockstep::flight::internal
