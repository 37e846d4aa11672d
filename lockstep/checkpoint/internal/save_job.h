#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/internal/manifest.h>
#include <lockstep/checkpoint/internal/member_ranks.h>
#include <lockstep/checkpoint/internal/save_plan.h>
#include <lockstep/checkpoint/internal/temporary_directory.h>
#include <lockstep/checkpoint/internal/tensor_snapshot.h>
#include <lockstep/serialization/state_json.h>

namespace lockstep::checkpoint::internal {

/// What went wrong on some rank, as it travels to the others.
struct Failure {
  enum Kind : int64_t { kNone, kValue, kFile, kIo };
  Kind kind = kNone;
  std::string text;

  /// What `action` throws, with the rank if there are several.
  template <class Action>
  static Failure of(const MemberRanks& ranks, const Action& action);
  static Failure of_current_exception(const MemberRanks& ranks);
  /// Throws c10::ValueError, CheckpointError or CheckpointIoError; nothing if nothing went wrong.
  void raise() const;
};

template <class Action>
Failure Failure::of(const MemberRanks& ranks, const Action& action) {
  try {
    action();
    return {};
  } catch (...) {
    return of_current_exception(ranks);
  }
}

/// One checkpoint on its way to the disk, in three steps, so that only the first two hold a training up:
///
/// 1. The construction: ranks tell rank 0 what they have; it makes the temporary directory and says who writes
///    what into which file.
/// 2. stage(), if at all: the tensors that this rank writes are copied, and may be changed from then on.
/// 3. write(): ranks write and sync their files and tell rank 0 their checksums; it writes the manifest and
///    gives the directory its name.
///
/// 1 and 3 are collective, and throw the same on all ranks. An unfinished job removes its directory. Not
/// thread-safe, but 3 may run in another thread.
class SaveJob {
 public:
  SaveJob(const std::filesystem::path& directory, const StateDict& state, const StateDict& rank_state,
          const CheckpointInfo& info, const SaveOptions& options, bool managed, const MemberRanks& ranks);

  /// Copies into `memory`, which must stay as it is until write() has returned, as TensorSnapshot does. What
  /// goes wrong is thrown by write(), on all ranks: the others are about to call it.
  void stage(Pages& memory, const MemberRanks& ranks, bool later = false);
  SaveJob(const SaveJob&) = delete;
  SaveJob& operator=(const SaveJob&) = delete;
  /// Copies what stage() left, in any thread; what goes wrong, write() throws.
  void copy_rest(const MemberRanks& ranks);

  /// `fence` runs on the leader, before the checkpoint gets its name, and throws if it must not get it.
  void set_fence(std::function<void()> fence) { fence_ = std::move(fence); }

  /// Once. `cancelled` ends it early with an error; may be null.
  CheckpointInfo write(const MemberRanks& ranks, const std::atomic<bool>* cancelled = nullptr);

 private:
  struct File {
    std::string name;
    std::string part;
    std::vector<serialization::StateTensor> tensors;
  };
  struct Results {
    std::vector<FileRecord> files;
    std::vector<TensorRecord> tensors;
  };

  Results write_files(const std::atomic<bool>* cancelled) const;
  void write_text(const std::string& name, const std::string& text, Results& results) const;
  void finish(const std::vector<c10::IValue>& reports);

  CheckpointInfo info_;
  SaveOptions options_;
  bool managed_;
  std::function<void()> fence_;
  Failure staging_;          // what went wrong in stage()
  std::vector<File> files_;  // that this rank writes
  std::string own_name_;     // "rank00003"; empty if it has no state of its own
  std::string own_json_;
  std::string state_json_;                         // on the leader
  std::vector<int64_t> ranks_with_own_;            // on the leader
  std::filesystem::path path_;                     // of the temporary directory
  std::unique_ptr<TemporaryDirectory> temporary_;  // on the leader
  TensorSnapshot snapshot_;  // of the files' tensors; ends first, for it may still read them
};

}  // namespace lockstep::checkpoint::internal
