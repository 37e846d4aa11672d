#include <algorithm>
#include <utility>

#include <lockstep/base/errors.h>
#include <lockstep/base/text/printable.h>
#include <lockstep/checkpoint/internal/checkpoint_reader.h>
#include <lockstep/checkpoint/internal/checksum.h>

namespace lockstep::checkpoint::internal {
namespace {

constexpr size_t kProblemsShown = 20;

bool is_tensor_file(const FileRecord& file) {
  return file.name.ends_with(".safetensors");
}

std::string shown(const TensorRecord& tensor) {
  return "tensor '" + printable(tensor.name) + "' of " + printable(tensor.part);
}

}  // namespace

CheckpointReader::CheckpointReader(const std::filesystem::path& directory)
    : directory_(directory), manifest_(read_manifest(directory)) {
  for (const TensorRecord& tensor : manifest_.tensors) tensors_of_[tensor.file].push_back(&tensor);
}

void CheckpointReader::add_problem(std::string problem) {
  if (std::find(problems_.begin(), problems_.end(), problem) == problems_.end()) {
    problems_.push_back(std::move(problem));
  }
}

void CheckpointReader::raise() const {
  if (problems_.empty()) return;
  std::string text = "the checkpoint " + directory_.string() + " is damaged; load another one. ";
  for (size_t i = 0; i < std::min(problems_.size(), kProblemsShown); ++i)
    text += (i > 0 ? "; " : "") + problems_[i];
  if (problems_.size() > kProblemsShown) {
    text += "; and " + std::to_string(problems_.size() - kProblemsShown) + " more";
  }
  LOCKSTEP_CHECK_FILE(false, text);
}

template <class Action>
void CheckpointReader::guarded(const Action& action) {
  try {
    action();
  } catch (const CheckpointIoError&) {
    throw;
  } catch (const CheckpointError& error) {
    add_problem(error.what_without_backtrace());
  }
}

const FileRecord* CheckpointReader::find(const std::string& name) const {
  for (const FileRecord& file : manifest_.files) {
    if (file.name == name) return &file;
  }
  return nullptr;
}

void CheckpointReader::check_sizes(const std::function<bool(const FileRecord&)>& which) {
  for (const FileRecord& file : manifest_.files) {
    if (which && !which(file)) continue;
    guarded([&] {
      const InputFile input(directory_ / file.name);
      if (input.size() == file.bytes) return;
      add_problem(input.path().string() + " has " + std::to_string(input.size()) + " bytes instead of " +
                  std::to_string(file.bytes));
      if (is_tensor_file(file)) name_damaged_tensors(file);
    });
  }
}

/// Of a file that is not as it was written: which of its tensors are not.
void CheckpointReader::name_damaged_tensors(const FileRecord& file) {
  guarded([&] {
    const InputFile input(directory_ / file.name);
    bool found = false;
    for (const TensorRecord* tensor : tensors_of_[file.name]) {
      if (tensor->bytes == 0) continue;
      std::string problem;
      if (tensor->bytes > input.size() || tensor->offset > input.size() - tensor->bytes) {
        problem = " is cut off: the file ends before it does";
      } else if (checksum_of_range(input, tensor->offset, tensor->bytes) != tensor->checksum) {
        problem = " is damaged: its checksum is wrong";
      } else {
        continue;
      }
      found = true;
      add_problem(input.path().string() + ": " + shown(*tensor) + problem);
    }
    if (!found) add_problem(input.path().string() + ": the header or the end is damaged, no tensor");
  });
}

void CheckpointReader::check_header(const FileRecord& file, const OpenTensorFile& open) {
  std::map<std::string, const TensorRecord*> expected;
  for (const TensorRecord* tensor : tensors_of_[file.name]) expected.emplace(tensor->name, tensor);
  const auto what = (directory_ / file.name).string();
  for (const serialization::SafetensorsEntry& entry : open.header.tensors) {
    const auto found = expected.find(entry.name);
    LOCKSTEP_CHECK_FILE(found != expected.end(), what, " has the tensor '", printable(entry.name),
                        "', of which the manifest knows nothing");
    const TensorRecord& record = *found->second;
    LOCKSTEP_CHECK_FILE(
        serialization::safetensors_dtype(entry.dtype) == record.dtype && entry.shape == record.shape &&
            entry.begin + open.data_begin == record.offset && entry.end - entry.begin == record.bytes,
        what, ": ", shown(record), " has another dtype, shape or place than the manifest says");
    expected.erase(found);
  }
  LOCKSTEP_CHECK_FILE(expected.empty(), what, " lacks the tensor '",
                      expected.empty() ? "" : printable(expected.begin()->first),
                      "' that the manifest tells of");
}

void CheckpointReader::check_file(const FileRecord& file) {
  guarded([&] {
    const InputFile input(directory_ / file.name);
    if (input.size() != file.bytes) return;  // check_sizes() has told
    if (checksum_of_range(input, 0, input.size()) != file.checksum) {
      add_problem(input.path().string() + " is damaged: its checksum is wrong");
      if (is_tensor_file(file)) name_damaged_tensors(file);
    } else if (is_tensor_file(file)) {
      check_header(file, read_tensor_header(input));
    }
  });
}

std::string CheckpointReader::read_json(const FileRecord& file, bool verify) {
  std::string text;
  guarded([&] {
    std::string read = read_file(directory_ / file.name, file.bytes);
    if (static_cast<int64_t>(read.size()) != file.bytes) return;  // check_sizes() has told
    LOCKSTEP_CHECK_FILE(!verify || checksum_of(read) == file.checksum, (directory_ / file.name).string(),
                        " is damaged: its checksum is wrong");
    text = std::move(read);
  });
  return text;
}

std::map<std::string, at::Tensor> CheckpointReader::read_tensors(const FileRecord& file, bool verify) {
  std::map<std::string, at::Tensor> tensors;
  guarded([&] {
    const InputFile input(directory_ / file.name);
    if (input.size() != file.bytes) return;  // check_sizes() has told
    std::string checksum;
    try {
      const OpenTensorFile open = read_tensor_header(input);
      check_header(file, open);
      auto read = internal::read_tensors(input, open, verify ? &checksum : nullptr);
      LOCKSTEP_CHECK_FILE(!verify || checksum == file.checksum, input.path().string(),
                          " is damaged: its checksum is wrong");
      tensors = std::move(read);
    } catch (const CheckpointIoError&) {
      throw;
    } catch (const CheckpointError& error) {
      add_problem(error.what_without_backtrace());
      if (verify) name_damaged_tensors(file);
    }
  });
  return tensors;
}

std::vector<std::string> problems_of(const std::filesystem::path& directory, bool tensors) {
  try {
    CheckpointReader reader(directory);
    reader.check_sizes();
    for (const FileRecord& file : reader.manifest().files) {
      if (tensors || file.name.ends_with(".json")) reader.check_file(file);
    }
    return reader.problems();
  } catch (const CheckpointIoError&) {
    throw;
  } catch (const CheckpointError& error) {
    return {error.what_without_backtrace()};
  }
}

}  // namespace lockstep::checkpoint::internal
