#include <algorithm>
#include <array>
#include <ctime>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <system_error>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/StringUtil.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/process/memory.h>
#include <lockstep/base/text/counted.h>
#include <lockstep/base/text/json_number.h>
#include <lockstep/base/text/json_text.h>
#include <lockstep/base/text/printable.h>
#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/inspect_checkpoint.h>
#include <lockstep/checkpoint/internal/file_io.h>
#include <lockstep/checkpoint/internal/manifest.h>
#include <lockstep/checkpoint/safetensors.h>
#include <lockstep/serialization/state_json.h>

namespace lockstep {
namespace {

namespace fs = std::filesystem;

using checkpoint::internal::Manifest;
using checkpoint::internal::TensorRecord;
using nlohmann::ordered_json;

std::string dump(const ordered_json& value) {
  return json_text(value, 2) + "\n";
}

std::string time_text(std::chrono::system_clock::time_point time) {
  const std::time_t seconds = std::chrono::system_clock::to_time_t(time);
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  std::array<char, 64> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text.data();
}

int64_t bytes_of(const Manifest& manifest) {
  int64_t bytes = 0;
  for (const auto& file : manifest.files) bytes += file.bytes;
  return bytes;
}

ordered_json info_to_json(const Manifest& manifest) {
  const CheckpointInfo& info = manifest.info;
  ordered_json metrics = ordered_json::object();
  for (const auto& [name, value] : info.metrics) metrics[name] = json_number(value);
  return {{"directory", info.directory.string()},
          {"step", info.step},
          {"epoch", info.epoch},
          {"metrics", metrics},
          {"emergency", info.emergency},
          {"world_size", info.world_size},
          {"saved_at", time_text(info.saved_at)},
          {"managed", manifest.managed},
          {"ranks", manifest.ranks},
          {"bytes", bytes_of(manifest)},
          {"tensors", manifest.tensors.size()}};
}

std::string info_to_text(const Manifest& manifest) {
  const CheckpointInfo& info = manifest.info;
  std::ostringstream text;
  text << "step " << info.step << ", epoch " << info.epoch << ", saved " << time_text(info.saved_at) << " by "
       << counted(info.world_size, "rank") << ", " << format_bytes(bytes_of(manifest)) << " in "
       << manifest.files.size() << " files, " << manifest.tensors.size() << " tensors";
  for (const auto& [name, value] : info.metrics) text << ", " << printable(name) << " " << value;
  if (!info.emergency.empty()) text << "; in an emergency: " << printable(info.emergency);
  return text.str();
}

std::string shape_text(const TensorRecord& tensor) {
  const std::string text = tensor.dtype + " [" + c10::Join(", ", tensor.shape) + "]";
  if (!tensor.part_of) return text;
  const auto list = [](const std::vector<int64_t>& numbers) { return ordered_json(numbers).dump(); };
  return text + " at " + list(tensor.part_of->offsets) + " of " + list(tensor.part_of->global_shape) +
         " along " + printable(tensor.part_of->mesh_dim);
}

std::string name_text(const TensorRecord& tensor) {
  return printable(tensor.part) + ": " + printable(tensor.name);
}

std::string state_text(const std::vector<std::string>& problems, bool verify) {
  if (!problems.empty()) return "DAMAGED";
  return verify ? "verified" : "complete";
}

CheckpointInspection inspect_one(const fs::path& directory, const InspectCheckpointOptions& options) {
  const auto problems = verify_checkpoint(directory, options.verify);
  std::optional<Manifest> manifest;
  try {
    manifest = checkpoint::internal::read_manifest(directory);
  } catch (const CheckpointError&) {  // is among the problems
  }
  CheckpointInspection inspection{.text = {}, .problem = !problems.empty()};
  if (options.json) {
    ordered_json json = {{"kind", "checkpoint"}};
    if (manifest) json["info"] = info_to_json(*manifest);
    json["verified"] = options.verify;
    json["problems"] = problems;
    json["files"] = ordered_json::array();
    json["tensors"] = ordered_json::array();
    if (manifest) {
      for (const auto& file : manifest->files) {
        json["files"].push_back({{"name", file.name}, {"bytes", file.bytes}, {"xxh3_128", file.checksum}});
      }
      for (const auto& tensor : manifest->tensors) {
        json["tensors"].push_back({{"part", tensor.part},
                                   {"name", tensor.name},
                                   {"file", tensor.file},
                                   {"dtype", tensor.dtype},
                                   {"shape", tensor.shape},
                                   {"offset", tensor.offset},
                                   {"bytes", tensor.bytes},
                                   {"xxh3_128", tensor.checksum}});
        if (!tensor.part_of) continue;
        json["tensors"].back().update(ordered_json{{"global_shape", tensor.part_of->global_shape},
                                                   {"offsets", tensor.part_of->offsets},
                                                   {"mesh_dim", tensor.part_of->mesh_dim}});
      }
    }
    inspection.text = dump(json);
    return inspection;
  }
  std::ostringstream text;
  text << directory.string() << ": " << state_text(problems, options.verify) << "\n";
  for (const std::string& problem : problems) text << "  " << problem << "\n";
  if (manifest) {
    text << info_to_text(*manifest) << "\n\n";
    for (const auto& file : manifest->files) {
      text << "  " << file.checksum << "  " << printable(file.name) << "  " << format_bytes(file.bytes)
           << "\n";
    }
    text << (manifest->tensors.empty() ? "" : "\n");
    for (const auto& tensor : manifest->tensors) {
      text << "  " << tensor.checksum << "  " << name_text(tensor) << "  " << shape_text(tensor) << "  "
           << format_bytes(tensor.bytes) << "\n";
    }
  }
  inspection.text = text.str();
  return inspection;
}

bool has(const fs::path& directory, const char* file) {
  std::error_code ignored;
  return fs::exists(directory / file, ignored);
}

bool looks_like_one(const fs::path& directory) {
  return has(directory, checkpoint::internal::kManifestName) ||
         has(directory, checkpoint::internal::kStateName);
}

CheckpointInspection inspect_all(const fs::path& root, const InspectCheckpointOptions& options) {
  std::vector<fs::path> directories;
  std::error_code error;
  for (auto entry = fs::directory_iterator(root, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    if (entry->path().filename().string().front() != '.' && looks_like_one(entry->path())) {
      directories.push_back(entry->path());
    }
  }
  if (error) checkpoint::internal::throw_system_error("read the directory", root, error.value());
  LOCKSTEP_CHECK_FILE(!directories.empty(), root.string(), " is no checkpoint, and holds none");
  std::sort(directories.begin(), directories.end());
  CheckpointInspection inspection;
  ordered_json json = {
      {"kind", "checkpoints"}, {"verified", options.verify}, {"checkpoints", ordered_json::array()}};
  std::ostringstream text;
  for (const fs::path& directory : directories) {
    const auto problems = verify_checkpoint(directory, options.verify);
    inspection.problem = inspection.problem || !problems.empty();
    ordered_json one = {{"directory", directory.string()}};
    text << directory.string() << ": " << state_text(problems, options.verify);
    try {
      const Manifest manifest = checkpoint::internal::read_manifest(directory);
      one = info_to_json(manifest);
      text << ", " << info_to_text(manifest) << "\n";
    } catch (const CheckpointError&) {  // is among the problems
      text << "\n";
    }
    for (const std::string& problem : problems) text << "  " << problem << "\n";
    one["problems"] = problems;
    json["checkpoints"].push_back(std::move(one));
  }
  inspection.text = options.json ? dump(json) : text.str();
  return inspection;
}

// --- comparing

/// The elements of a tensor as doubles, or as complex doubles; undefined for a dtype that can't be converted.
at::Tensor as_numbers(const at::Tensor& tensor) {
  try {
    return tensor.to(tensor.is_complex() ? at::kComplexDouble : at::kDouble);
  } catch (const c10::Error&) {
    return {};
  }
}

struct Difference {
  int64_t elements = 0;
  double most = 0;
};

/// Where both are NaN, or the same infinity, they don't differ. Nothing where elements are no numbers.
std::optional<Difference> difference_of(const at::Tensor& first, const at::Tensor& second) {
  const at::Tensor a = as_numbers(first);
  const at::Tensor b = as_numbers(second);
  if (!a.defined() || !b.defined() || a.numel() == 0) return {};
  const at::Tensor equal = a.eq(b).logical_or(a.isnan().logical_and(b.isnan()));
  const at::Tensor distance = (a - b).abs();
  const at::Tensor counted = at::where(equal, at::zeros_like(distance), distance);
  return Difference{equal.logical_not().sum().item<int64_t>(), counted.max().item<double>()};
}

using Key = std::pair<std::string, std::string>;

std::map<Key, const TensorRecord*> by_name(const Manifest& manifest) {
  std::map<Key, const TensorRecord*> tensors;
  for (const auto& tensor : manifest.tensors) tensors.emplace(Key{tensor.part, tensor.name}, &tensor);
  return tensors;
}

at::Tensor read(const fs::path& directory, const TensorRecord& record) {
  return safetensors::SafeOpen(directory / record.file).get_tensor(record.name);
}

/// All values of a state but its tensors, by their places, as JSON.
class Values {
 public:
  Values(const fs::path& directory, const std::string& file, const std::string& part) {
    const fs::path path = directory / file;
    const auto no_tensor = [](const std::string&, const std::string&) { return at::Tensor(); };
    const auto state = serialization::decode_state(
        checkpoint::internal::read_file(path, checkpoint::internal::InputFile(path).size()), no_tensor,
        path.string(), part);
    for (const auto& [key, value] : state) add(file + "['" + printable(key) + "']", value);
  }
  const std::map<std::string, std::string>& values() const { return values_; }

 private:
  void add(const std::string& place, const c10::IValue& value) {
    if (value.isTensor()) return;  // the manifests tell of them
    if (value.isGenericDict() && !value.toGenericDict().empty()) {
      for (const auto& item : value.toGenericDict()) {
        add(place + "[" +
                (item.key().isString() ? "'" + printable(item.key().toStringRef()) + "'"
                                       : text_of(item.key())) +
                "]",
            item.value());
      }
    } else if ((value.isList() || value.isTuple()) && length(value) > 0) {
      for (size_t i = 0; i < length(value); ++i)
        add(place + "[" + std::to_string(i) + "]", element(value, i));
    } else {
      values_[place] = text_of(value);
    }
  }
  static size_t length(const c10::IValue& value) {
    return value.isList() ? value.toListRef().size() : value.toTupleRef().elements().size();
  }
  static const c10::IValue& element(const c10::IValue& value, size_t i) {
    return value.isList() ? value.toListRef()[i] : value.toTupleRef().elements()[i];
  }
  static std::string text_of(const c10::IValue& value) {
    const std::string json = serialization::encode_state({{"x", value}}, "value").json;
    const size_t begin = json.find(": ") + 2;
    return json.substr(begin, json.rfind("\n}") - begin);
  }

  std::map<std::string, std::string> values_;
};

/// Gathers differences, as text and as JSON.
class Comparison {
 public:
  Comparison(const Manifest& first, const Manifest& second) : first_(first), second_(second) {}

  CheckpointInspection take(bool json) {
    const int64_t problems = tensors_ + values_;
    CheckpointInspection inspection{.text = {}, .problem = problems > 0};
    if (json) {
      inspection.text = dump({{"kind", "difference"},
                              {"first", info_to_json(first_)},
                              {"second", info_to_json(second_)},
                              {"same_tensors", same_},
                              {"differences", json_}});
      return inspection;
    }
    std::ostringstream text;
    text << "first:  " << first_.info.directory.string() << ": " << info_to_text(first_) << "\n"
         << "second: " << second_.info.directory.string() << ": " << info_to_text(second_) << "\n"
         << text_.str() << (problems == 0 ? "no difference: " : "") << same_ << " tensors are the same, "
         << tensors_ << " differ; " << values_ << " other values differ\n";
    inspection.text = text.str();
    return inspection;
  }

  void compare_tensors() {
    const auto ours = by_name(first_);
    const auto theirs = by_name(second_);
    for (const auto& [key, tensor] : ours) {
      const auto found = theirs.find(key);
      if (found == theirs.end()) {
        add(*tensor, "only_first", "only the first has it, " + shape_text(*tensor));
      } else {
        compare(*tensor, *found->second);
      }
    }
    for (const auto& [key, tensor] : theirs) {
      if (!ours.contains(key)) add(*tensor, "only_second", "only the second has it, " + shape_text(*tensor));
    }
  }

  void compare_values() {
    std::set<std::pair<std::string, std::string>> files = {{checkpoint::internal::kStateName, ""}};
    const auto add_ranks = [&](const Manifest& manifest) {
      for (const int64_t rank : manifest.ranks) {
        files.emplace(checkpoint::internal::rank_name(rank) + ".json", checkpoint::internal::rank_name(rank));
      }
    };
    add_ranks(first_);
    add_ranks(second_);
    for (const auto& [file, part] : files) {
      const auto ours = values_of(first_, file, part);
      const auto theirs = values_of(second_, file, part);
      for (const auto& [place, value] : ours) {
        const auto found = theirs.find(place);
        if (found == theirs.end()) {
          add_value(place, value, {});
        } else if (found->second != value) {
          add_value(place, value, found->second);
        }
      }
      for (const auto& [place, value] : theirs) {
        if (!ours.contains(place)) add_value(place, {}, value);
      }
    }
  }

 private:
  static std::map<std::string, std::string> values_of(const Manifest& manifest, const std::string& file,
                                                      const std::string& part) {
    for (const auto& each : manifest.files) {
      if (each.name == file) return Values(manifest.info.directory, file, part).values();
    }
    return {};
  }

  void compare(const TensorRecord& ours, const TensorRecord& theirs) {
    if (ours.dtype != theirs.dtype || ours.shape != theirs.shape) {
      add(ours, "form", shape_text(ours) + " in the first, " + shape_text(theirs) + " in the second");
    } else if (ours.checksum == theirs.checksum) {
      ++same_;
    } else {
      const auto difference =
          difference_of(read(first_.info.directory, ours), read(second_.info.directory, theirs));
      std::ostringstream text;
      ordered_json more = ordered_json::object();
      if (difference) {
        text << difference->elements << " elements differ, by at most " << difference->most;
        more = {{"elements", difference->elements}, {"at_most", json_number(difference->most)}};
      } else {
        text << "its bytes differ";
      }
      add(ours, "elements", text.str(), more);
    }
  }

  void add(const TensorRecord& tensor, const char* what, const std::string& words,
           const ordered_json& more = ordered_json::object()) {
    ++tensors_;
    text_ << "  " << name_text(tensor) << ": " << words << "\n";
    ordered_json json = {{"part", tensor.part}, {"name", tensor.name}, {"what", what}};
    json.update(more);
    json_.push_back(std::move(json));
  }

  void add_value(const std::string& place, const std::optional<std::string>& ours,
                 const std::optional<std::string>& theirs) {
    ++values_;
    text_ << "  " << place << ": " << printable(ours.value_or("not in the first")) << " -> "
          << printable(theirs.value_or("not in the second")) << "\n";
    const auto value = [](const std::optional<std::string>& text) {
      return text ? ordered_json(*text) : ordered_json();
    };
    json_.push_back({{"place", place}, {"what", "value"}, {"first", value(ours)}, {"second", value(theirs)}});
  }

  const Manifest& first_;
  const Manifest& second_;
  std::ostringstream text_;
  ordered_json json_ = ordered_json::array();
  int64_t same_ = 0;
  int64_t tensors_ = 0;
  int64_t values_ = 0;
};

}  // namespace

CheckpointInspection inspect_checkpoint(const fs::path& directory, const InspectCheckpointOptions& options) {
  return looks_like_one(directory) ? inspect_one(directory, options) : inspect_all(directory, options);
}

CheckpointInspection compare_checkpoints(const fs::path& first, const fs::path& second,
                                         const InspectCheckpointOptions& options) {
  const Manifest ours = checkpoint::internal::read_manifest(first);
  const Manifest theirs = checkpoint::internal::read_manifest(second);
  Comparison comparison(ours, theirs);
  comparison.compare_tensors();
  comparison.compare_values();
  return comparison.take(options.json);
}

}  // namespace lockstep
