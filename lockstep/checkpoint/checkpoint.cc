#include <algorithm>
#include <set>
#include <system_error>
#include <tuple>
#include <utility>

#include <lockstep/base/log.h>
#include <lockstep/base/printable.h>
#include <lockstep/base/world_defaults.h>
#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/internal/checkpoint_reader.h>
#include <lockstep/checkpoint/internal/member_ranks.h>
#include <lockstep/checkpoint/internal/save_job.h>
#include <lockstep/checkpoint/internal/state_json.h>

namespace lockstep {
namespace {

using internal::CheckpointReader;
using internal::FileRecord;

/// Tensors of a loaded checkpoint, by part and name.
using Tensors = std::map<std::string, std::map<std::string, at::Tensor>>;

/// Reads those files with tensors of which `wanted` says yes, by part.
template <class Wanted>
Tensors read_parts(CheckpointReader& reader, const LoadOptions& options, const Wanted& wanted) {
  std::map<std::string, std::string> part_of;  // by file
  for (const auto& tensor : reader.manifest().tensors) part_of.emplace(tensor.file, tensor.part);
  Tensors tensors;
  for (const auto& [name, part] : part_of) {
    if (!wanted(part)) continue;
    for (auto& [key, tensor] : reader.read_tensors(*reader.find(name), options.verify)) {
      tensors[part].emplace(key, options.device.is_cpu() ? tensor : tensor.to(options.device));
    }
  }
  return tensors;
}

StateDict decode(const std::string& text, const Tensors& tensors, const std::string& what,
                 const std::string& part) {
  const auto find = [&](const std::string& in, const std::string& name) {
    const auto group = tensors.find(in);
    const bool found = group != tensors.end() && group->second.contains(name);
    LOCKSTEP_CHECK_FILE(found, what, " is damaged: it refers to the tensor '", internal::printable(name),
                        "' of ", internal::printable(in), ", which is in no file");
    return group->second.at(name);
  };
  return internal::decode_state(text, find, what, part);
}

}  // namespace

CheckpointInfo save_checkpoint(const std::filesystem::path& directory, const StateDict& state,
                               const StateDict& rank_state, const CheckpointInfo& info,
                               const SaveOptions& options) {
  const internal::MemberRanks ranks(options.group, options.alone);
  internal::SaveJob job(directory, state, rank_state, info, options, /*managed=*/false, ranks);
  return job.write(ranks);
}

LoadedCheckpoint load_checkpoint(const std::filesystem::path& directory, const LoadOptions& options) {
  const WorldDefaults world = world_defaults().value_or(WorldDefaults{});
  const int64_t rank = options.rank.value_or(world.rank);
  const int64_t world_size = options.world_size.value_or(world.world_size);
  CheckpointReader reader(directory);
  reader.check_sizes();
  const auto& manifest = reader.manifest();
  const std::string own_name = internal::rank_name(rank);
  const bool has_own = manifest.info.world_size == world_size &&
                       std::find(manifest.ranks.begin(), manifest.ranks.end(), rank) != manifest.ranks.end();
  std::set<std::string> own_names;
  for (const int64_t each : manifest.ranks) own_names.insert(internal::rank_name(each));

  const auto text_of = [&](const std::string& name) -> std::string {
    const FileRecord* file = reader.find(name);
    LOCKSTEP_CHECK_FILE(file != nullptr, directory.string(), " is damaged: its manifest does not list ",
                        name);
    return reader.read_json(*file, options.verify);
  };
  const std::string state_text = text_of(internal::kStateName);
  const std::string own_text = has_own ? text_of(own_name + ".json") : "";
  const Tensors tensors = read_parts(reader, options, [&](const std::string& part) {
    return own_names.contains(part) ? has_own && part == own_name : true;
  });
  reader.raise();

  LoadedCheckpoint loaded;
  loaded.info = manifest.info;
  loaded.state = decode(state_text, tensors, (directory / internal::kStateName).string(), "");
  if (has_own) {
    loaded.rank_state = decode(own_text, tensors, (directory / (own_name + ".json")).string(), own_name);
  }
  return loaded;
}

std::vector<std::string> verify_checkpoint(const std::filesystem::path& directory, bool tensors) {
  try {
    return internal::problems_of(directory, tensors);
  } catch (const CheckpointError& error) {
    return {error.what_without_backtrace()};
  }
}

CheckpointInfo read_checkpoint_info(const std::filesystem::path& directory) {
  return internal::read_manifest(directory).info;
}

}  // namespace lockstep
