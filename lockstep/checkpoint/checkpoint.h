#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include <lockstep/base/errors.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/serialization/state_dict.h>

/// Checkpoints on disk: a directory each, which is there as a whole or not at all. docs/checkpoints.md is the
/// guide and describes the files. CheckpointManager (checkpoint_manager.h) decides when, and which to keep;
/// TrainingState (training_state.h) what is in one.
///
///     save_checkpoint("run/step-100", {{"model", to_object(model_state)}}, {}, {.step = 100});
///     auto loaded = load_checkpoint("run/step-100");
///     auto model_state = from_object<StateDict>(loaded.state.at("model"));
namespace lockstep {

/// What a checkpoint says of itself.
struct CheckpointInfo {
  int64_t step = 0;                            ///< optimizer steps done
  int64_t epoch = 0;                           ///< epochs done
  std::map<std::string, double> metrics = {};  ///< as of then: CheckpointManager finds the best by one
  std::string emergency = {};                  ///< why it was saved outside of the plan; empty: by plan
  int64_t world_size = 0;                      ///< ranks that wrote it; set by saving
  std::chrono::system_clock::time_point saved_at = {};  ///< set by saving, to the microsecond
  std::filesystem::path directory = {};                 ///< set by saving, loading and finding
};

/// How save_checkpoint() writes.
struct SaveOptions {
  /// Whose ranks save together. Empty: the default group's, or this process alone if there is none.
  ProcessGroup group = {};
  /// This process saves by itself, though there is a group: for a survivor whose peers are gone. Its own
  /// state is filed under its rank in `group`.
  bool alone = false;
  /// All ranks write; tensors that several have are assigned to them by bytes, so these must be equal
  /// (with PostLocalSGDOptimizer they are only after an averaging). Otherwise, and for what is small, the
  /// lowest rank that has a tensor writes it: rank 0, except for what only others have.
  bool sharded = false;
  /// Replace a checkpoint of that name in one step, on file systems that can exchange names (ext4, XFS,
  /// Btrfs, tmpfs). Without it an existing directory is an error.
  bool overwrite = false;
  /// Have everything on the disk before the checkpoint gets its name. Without it a power failure, though no
  /// crash of a program, may leave a checkpoint that is there and damaged; loading would notice.
  bool fsync = true;
};

/// Writes a checkpoint to `directory`, whose parent directories are made where they are missing. Collective:
/// all ranks of the group call it, with the same `directory`, `info` and options (rank 0's count).
///
/// `state`: what belongs to the whole job, by part: {"model": {…}, "optimizer": {…}}. The union over ranks is
/// saved: dicts are united key by key, and of what several ranks have at the same place the lowest rank's is
/// taken. `rank_state`: each rank's own. Both may hold None, bool, int, double, complex, strings, devices,
/// tensors (strided, of a dtype that safetensors knows, on any device), and lists, tuples and dicts of them
/// to a depth of 200. Tensors that share memory are written each.
///
/// The files are written under a temporary name beside `directory`, synced, and renamed last, so that no
/// process ever sees a part of them. Left-overs of writers that were killed are removed on the way.
///
/// Returns `info` completed. Throws on all ranks alike CheckpointError with the rank, the path and the
/// system's reason when anything can't be written (the temporary directory is removed), c10::ValueError for
/// what can't be saved, with its place; and what collectives throw when a rank dies.
CheckpointInfo save_checkpoint(const std::filesystem::path& directory, const StateDict& state,
                               const StateDict& rank_state, const CheckpointInfo& info,
                               const SaveOptions& options = {});

/// How load_checkpoint() reads.
struct LoadOptions {
  /// Checks all checksums. Without it, damage that leaves the files' form intact goes unnoticed.
  bool verify = true;
  /// Where all tensors go; CPU unless told.
  c10::Device device = c10::Device(c10::kCPU);
  /// Whose own state is wanted. By default this process's rank in the default group, 0 without one.
  std::optional<int64_t> rank = {};
  /// How many ranks there are now; by default the default group's size, 1 without one.
  std::optional<int64_t> world_size = {};
  /// The parts of `state` that are wanted, {"model"} say; empty: all, and the rank's own state. Files of
  /// other parts are neither read nor looked at, and may be missing.
  std::vector<std::string> parts = {};
};

struct LoadedCheckpoint {
  CheckpointInfo info;
  StateDict state;
  /// Empty if it was written by another number of ranks, if this rank wrote nothing of its own, or with
  /// LoadOptions::parts.
  StateDict rank_state;
};

/// Reads a checkpoint; no collective. Lists and dicts come with elements of any type. Throws CheckpointError
/// that names each damaged file and tensor, and what is wrong with it; CheckpointIoError when something can't
/// be read, which is no damage; c10::ValueError for one of LoadOptions::parts that is not there. Nothing is
/// trusted before it was checked, and no more memory is taken than a small multiple of the files' sizes.
/// Thread-safe.
LoadedCheckpoint load_checkpoint(const std::filesystem::path& directory, const LoadOptions& options = {});

/// What is wrong with a checkpoint, a line each: missing files, sizes, checksums of files and tensors, form.
/// Empty: nothing. `tensors` false leaves out reading the files with tensors (their sizes are checked). What
/// can't be read is told as well. Thread-safe.
std::vector<std::string> verify_checkpoint(const std::filesystem::path& directory, bool tensors = true);

/// What the checkpoint in `directory` says of itself. Reads the manifest alone. Throws CheckpointError.
CheckpointInfo read_checkpoint_info(const std::filesystem::path& directory);

/// All directories directly below `root` with an intact manifest, by step. Of one step those come last that
/// have more ranks' own states, then more epochs, then those saved later. Temporary ones are none. Empty when
/// there is no `root`. Throws CheckpointIoError when `root`, or a directory with a CheckpointManager's name,
/// can't be looked at, after some attempts; other directories are passed over then. Thread-safe.
std::vector<CheckpointInfo> list_checkpoints(const std::filesystem::path& root);

/// How find_latest_checkpoint() looks.
struct FindOptions {
  /// When given, collective: rank 0 looks, and all get its answer.
  ProcessGroup group = {};
  /// Reads all of a checkpoint and checks the checksums. Without it only the manifest and the sizes of files.
  bool verify = true;
  /// Answer "nothing" also when there are checkpoints and all are damaged. Without it that is an error, so
  /// that no training begins at step 0 by mistake.
  bool none_if_all_damaged = false;
};

/// The checkpoint with the highest step below `root` that is complete and undamaged, also when it was saved
/// in an emergency; of equal steps the last in the order of list_checkpoints(). Logs a warning for each that
/// it skips, with the reason. Nothing when there is none, or no `root`. Throws CheckpointError when there are
/// some and all are damaged, and CheckpointIoError when `root` or a checkpoint can't be read, after some
/// attempts: whether that one is good is not known.
std::optional<CheckpointInfo> find_latest_checkpoint(const std::filesystem::path& root,
                                                     const FindOptions& options = {});

}  // namespace lockstep
