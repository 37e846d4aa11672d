#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <lockstep/checkpoint/checkpoint.h>

namespace lockstep::checkpoint::internal {

/// What a run may go on from.
struct Candidates {
  /// With an intact manifest, in the order of list_checkpoints(): the last is to be tried first.
  std::vector<CheckpointInfo> checkpoints;
  /// Those without, a line each that says what is wrong. They have a manager's name, or their manifest names
  /// our format.
  std::vector<std::string> damaged;
  /// Other directories that could be taken for one, or can't be looked into, a line each that says why it is
  /// none.
  std::vector<std::string> passed_over;
};

/// All checkpoints below `root`, with a warning in the log for each damaged one and for other directories
/// that can't be looked into. Throws CheckpointIoError when `root` or a directory with a manager's name can't
/// be read, after some attempts.
Candidates candidates(const std::filesystem::path& root);

/// list_checkpoints() of those with a manager's name alone; the others are not looked into.
std::vector<CheckpointInfo> list_managed(const std::filesystem::path& root);

/// What to say when there are candidates and all of them are `damaged`; `option` allows to go on without, if
/// it is not empty.
std::string all_damaged_text(const std::filesystem::path& root, const std::vector<std::string>& damaged,
                             const std::string& option);

/// What to say when there is no candidate and must_resume is set: what is in `root` instead. Throws
/// CheckpointIoError when it can't be read.
std::string none_there_text(const std::filesystem::path& root, const std::vector<std::string>& passed_over);

/// What a manager calls a checkpoint: step-00000100, step-00000100-emergency.
std::string managers_name(const CheckpointInfo& info);

/// Whether a manager calls its checkpoints so: step-00000100, with -emergency after it, and with .replaced.
bool is_managers_name(const std::filesystem::path& directory);

/// Where a checkpoint is moved while another takes its name, on file systems that can't exchange names. It is
/// as good as any, so it is listed like any; it stays when the writer is killed in between.
std::filesystem::path replaced_name(const std::filesystem::path& directory);

}  // namespace lockstep::checkpoint::internal
