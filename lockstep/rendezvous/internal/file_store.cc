#include <filesystem>
#include <string>
#include <sys/stat.h>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include <lockstep/rendezvous/internal/call_by.h>
#include <lockstep/rendezvous/internal/file_store.h>

namespace lockstep::rendezvous_internal {
namespace {

using FileStorePtr = c10::intrusive_ptr<c10d::Store>;

}  // namespace

std::string describe_unreadable(const std::string& path) {
  return "the file " + path +
         " of the store can't be read: it seems to end in the middle of a record, as when a process is "
         "killed while it writes, or the disk is full, or another process holds its lock; delete the file, "
         "or name another one, and start all ranks again";
}

void check_store_file(const std::string& path) {
  namespace fs = std::filesystem;
  auto parent = fs::path(path).parent_path();
  struct stat status {};
  TORCH_CHECK_VALUE(::stat(parent.c_str(), &status) == 0 && S_ISDIR(status.st_mode), "file://", path,
                    ": there is no directory ", parent.string(),
                    "; make it on all hosts, or choose another path");
  bool there = ::stat(path.c_str(), &status) == 0;
  TORCH_CHECK_VALUE(!there || S_ISREG(status.st_mode), "file://", path,
                    " is not a regular file; name one that does ", "not exist yet");
  bool writable = ::access(there ? path.c_str() : parent.c_str(), W_OK) == 0;
  TORCH_CHECK_VALUE(writable, "file://", path, " cannot be written: ", std::strerror(errno));
}

FileStorePtr open_file_store(const std::string& path, int world_size, std::chrono::milliseconds timeout,
                             Deadline deadline) {
  auto store = call_by(deadline, [=]() -> FileStorePtr {
    auto made = c10::make_intrusive<c10d::FileStore>(path, world_size);
    made->setTimeout(timeout);
    made->add("opened", 1);  // now the file is there
    return made;
  });
  TORCH_CHECK_WITH(DistStoreError, store, describe_unreadable(path));
  return *store;
}

}  // namespace lockstep::rendezvous_internal
