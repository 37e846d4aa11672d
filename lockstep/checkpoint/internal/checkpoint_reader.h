#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/checkpoint/internal/file_io.h>
#include <lockstep/checkpoint/internal/manifest.h>
#include <lockstep/checkpoint/internal/tensor_file.h>

namespace lockstep::checkpoint::internal {

/// Reads the files of one checkpoint, and gathers what is wrong with them instead of throwing: a program that
/// restores from a damaged one wants to know all of it. What can't be read is not damage: all functions that
/// read throw CheckpointIoError for it. Not thread-safe.
class CheckpointReader {
 public:
  /// Reads the manifest. Throws CheckpointError when there is none, or it is damaged.
  explicit CheckpointReader(const std::filesystem::path& directory);

  const Manifest& manifest() const { return manifest_; }
  /// What was found to be wrong, a line each.
  const std::vector<std::string>& problems() const { return problems_; }
  /// Throws CheckpointError with all problems; nothing if there are none.
  void raise() const;

  /// Compares all files' sizes with the manifest, or those of which `which` says yes.
  void check_sizes(const std::function<bool(const FileRecord&)>& which = {});
  /// Reads a file, and compares checksums.
  void check_file(const FileRecord& file);
  /// The text of a file of JSON; empty when something is wrong with it.
  std::string read_json(const FileRecord& file, bool verify);
  /// The tensors of a file, by name; empty when something is wrong with it.
  std::map<std::string, at::Tensor> read_tensors(const FileRecord& file, bool verify);

  /// Null if there is none.
  const FileRecord* find(const std::string& name) const;

 private:
  void add_problem(std::string problem);
  template <class Action>
  void guarded(const Action& action);
  void check_header(const FileRecord& file, const OpenTensorFile& open);
  void name_damaged_tensors(const FileRecord& file);

  std::filesystem::path directory_;
  Manifest manifest_;
  std::map<std::string, std::vector<const TensorRecord*>> tensors_of_;  // by file
  std::vector<std::string> problems_;
};

/// verify_checkpoint(), but throws CheckpointIoError for what can't be read.
std::vector<std::string> problems_of(const std::filesystem::path& directory, bool tensors);

}  // namespace lockstep::checkpoint::internal
