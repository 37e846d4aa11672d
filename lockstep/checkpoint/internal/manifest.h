#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/serialization/tensor_part.h>

/// manifest.json: what a checkpoint consists of. It is written last, so a directory without one is none.
namespace lockstep::checkpoint::internal {

constexpr const char* kManifestName = "manifest.json";
constexpr const char* kStateName = "state.json";
constexpr int64_t kMaxManifest = int64_t{256} << 20;

/// A file beside the manifest.
struct FileRecord {
  std::string name;
  int64_t bytes = 0;
  std::string checksum;
};

/// A tensor in one of the files.
struct TensorRecord {
  std::string part;  ///< "model"; of a rank's own state "rank00003"
  std::string name;  ///< its key in the file
  std::string file;
  std::string dtype;  ///< safetensors' name
  std::vector<int64_t> shape;
  int64_t offset = 0;  ///< of its first byte in the file
  int64_t bytes = 0;
  std::string checksum;
  std::optional<serialization::TensorPart> part_of =
      {};  ///< of a whole that several ranks share; since version 2
};

struct Manifest {
  CheckpointInfo info;
  bool managed = false;        ///< a CheckpointManager wrote it, and may remove it
  std::vector<int64_t> ranks;  ///< which have a state of their own in it
  std::vector<FileRecord> files;
  std::vector<TensorRecord> tensors;
};

/// "rank00003"
std::string rank_name(int64_t rank);

/// The file's text. Its last member is the checksum of everything before the comma ahead of it, which through
/// the files' checksums stands for the whole checkpoint.
std::string to_text(const Manifest& manifest);

/// Throws CheckpointError that begins with `what` for a checksum that is wrong and for anything malformed.
/// Memory stays below a few hundred times the bytes. Thread-safe.
Manifest parse_manifest(const std::string& text, const std::string& what);

/// The manifest in `directory`. Throws CheckpointError.
Manifest read_manifest(const std::filesystem::path& directory);

/// Whether the manifest in `directory` names our format, damaged or not; programs of others call files so,
/// too. False when there is none. Throws CheckpointIoError.
bool names_our_format(const std::filesystem::path& directory);

}  // namespace lockstep::checkpoint::internal
