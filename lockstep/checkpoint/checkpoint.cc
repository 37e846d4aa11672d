#include <algorithm>
#include <set>

#include <lockstep/base/text/printable.h>
#include <lockstep/base/world_defaults.h>
#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/internal/checkpoint_reader.h>
#include <lockstep/checkpoint/internal/member_ranks.h>
#include <lockstep/checkpoint/internal/save_job.h>
#include <lockstep/serialization/state_json.h>

namespace lockstep {
namespace {

using checkpoint::internal::CheckpointReader;
using checkpoint::internal::FileRecord;

/// Tensors of a loaded checkpoint, by part and name.
using Tensors = std::map<std::string, std::map<std::string, at::Tensor>>;

bool is_asked_for(const std::string& part, const LoadOptions& options) {
  return options.parts.empty() ||
         std::find(options.parts.begin(), options.parts.end(), part) != options.parts.end();
}

/// The names of those files with tensors of which `wanted` says yes, with their parts.
template <class Wanted>
std::map<std::string, std::string> tensor_files(const CheckpointReader& reader, const Wanted& wanted) {
  std::map<std::string, std::string> files;
  for (const auto& tensor : reader.manifest().tensors) {
    if (wanted(tensor.part)) files.emplace(tensor.file, tensor.part);
  }
  return files;
}

Tensors read_parts(CheckpointReader& reader, const LoadOptions& options,
                   const std::map<std::string, std::string>& files) {
  Tensors tensors;
  for (const auto& [name, part] : files) {
    for (auto& [key, tensor] : reader.read_tensors(*reader.find(name), options.verify)) {
      tensors[part].emplace(key, options.device.is_cpu() ? tensor : tensor.to(options.device));
    }
  }
  return tensors;
}

/// Tensors of parts that are not asked for are undefined.
StateDict decode(const std::string& text, const Tensors& tensors, const LoadOptions& options,
                 const std::string& what, const std::string& part) {
  const auto find = [&](const std::string& in, const std::string& name) {
    if (!is_asked_for(in, options)) return at::Tensor();
    const auto group = tensors.find(in);
    const bool found = group != tensors.end() && group->second.contains(name);
    LOCKSTEP_CHECK_FILE(found, what, " is damaged: it refers to the tensor '", printable(name), "' of ",
                        printable(in), ", which is in no file");
    return group->second.at(name);
  };
  return serialization::decode_state(text, find, what, part);
}

void leave_only_asked_for(StateDict& state, const LoadOptions& options,
                          const std::filesystem::path& directory) {
  std::string there;
  for (const auto& [part, unused] : state) there += (there.empty() ? "" : ", ") + printable(part);
  for (const std::string& part : options.parts) {
    TORCH_CHECK_VALUE(state.contains(part), "load_checkpoint: ", directory.string(), " has no part '", part,
                      "'; it has ", there);
  }
  std::erase_if(state, [&](const auto& entry) { return !is_asked_for(entry.first, options); });
}

}  // namespace

CheckpointInfo save_checkpoint(const std::filesystem::path& directory, const StateDict& state,
                               const StateDict& rank_state, const CheckpointInfo& info,
                               const SaveOptions& options) {
  const checkpoint::internal::MemberRanks ranks(options.group, options.alone);
  checkpoint::internal::SaveJob job(directory, state, rank_state, info, options, /*managed=*/false, ranks);
  return job.write(ranks);
}

LoadedCheckpoint load_checkpoint(const std::filesystem::path& directory, const LoadOptions& options) {
  const WorldDefaults world = world_defaults().value_or(WorldDefaults{});
  const int64_t rank = options.rank.value_or(world.rank);
  const int64_t world_size = options.world_size.value_or(world.world_size);
  CheckpointReader reader(directory);
  const auto& manifest = reader.manifest();
  const std::string own_name = checkpoint::internal::rank_name(rank);
  const bool has_own = options.parts.empty() && manifest.info.world_size == world_size &&
                       std::find(manifest.ranks.begin(), manifest.ranks.end(), rank) != manifest.ranks.end();
  std::set<std::string> own_names;
  for (const int64_t each : manifest.ranks) own_names.insert(checkpoint::internal::rank_name(each));

  const auto files = tensor_files(reader, [&](const std::string& part) {
    return own_names.contains(part) ? has_own && part == own_name : is_asked_for(part, options);
  });
  reader.check_sizes([&](const FileRecord& file) {
    return options.parts.empty() || file.name == checkpoint::internal::kStateName ||
           files.contains(file.name);
  });

  const auto text_of = [&](const std::string& name) -> std::string {
    const FileRecord* file = reader.find(name);
    LOCKSTEP_CHECK_FILE(file != nullptr, directory.string(), " is damaged: its manifest does not list ",
                        name);
    return reader.read_json(*file, options.verify);
  };
  const std::string state_text = text_of(checkpoint::internal::kStateName);
  const std::string own_text = has_own ? text_of(own_name + ".json") : "";
  const Tensors tensors = read_parts(reader, options, files);
  reader.raise();

  LoadedCheckpoint loaded;
  loaded.info = manifest.info;
  loaded.state =
      decode(state_text, tensors, options, (directory / checkpoint::internal::kStateName).string(), "");
  leave_only_asked_for(loaded.state, options, directory);
  if (has_own) {
    loaded.rank_state =
        decode(own_text, tensors, options, (directory / (own_name + ".json")).string(), own_name);
  }
  return loaded;
}

std::vector<std::string> verify_checkpoint(const std::filesystem::path& directory, bool tensors) {
  try {
    return checkpoint::internal::problems_of(directory, tensors);
  } catch (const CheckpointError& error) {
    return {error.what_without_backtrace()};
  }
}

CheckpointInfo read_checkpoint_info(const std::filesystem::path& directory) {
  return checkpoint::internal::read_manifest(directory).info;
}

}  // namespace lockstep
