#include <exception>
#include <string>
#include <vector>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/checkpoint/internal/candidates.h>
#include <lockstep/checkpoint/internal/checkpoint_reader.h>
#include <lockstep/checkpoint/internal/file_io.h>
#include <lockstep/checkpoint/internal/managed_folder.h>
#include <lockstep/checkpoint/internal/manifest.h>
#include <lockstep/checkpoint/internal/temporary_directory.h>

namespace lockstep::checkpoint::internal {

void ManagedFolder::remove_old(const CheckpointInfo& newest, const std::atomic<bool>& cancelled) {
  try {
    std::vector<ManagedCheckpoint> managed;
    for (const CheckpointInfo& info : list_managed(options_.directory)) {
      const std::string name = info.directory.filename().string();
      const bool named = name == managers_name(info) || name == replaced_name(managers_name(info));
      if (!named) continue;
      const auto manifest = with_retries([&] { return read_manifest(info.directory); });
      if (!manifest.managed) continue;
      const auto written = written_.find(info.directory);
      managed.push_back({info, written == written_.end() ? 0 : written->second});
    }
    for (const CheckpointInfo& info :
         checkpoints_to_remove(managed, options_, {newest.directory},
                               [&](const CheckpointInfo& each) { return condition_of(each, cancelled); })) {
      if (cancelled) return;
      LOCKSTEP_LOG(kInfo) << "removing the checkpoint " << info.directory.string();
      remove_checkpoint_directory(info.directory);
    }
  } catch (const std::exception& error) {
    LOCKSTEP_LOG(kWarning) << "old checkpoints stay: " << text_of(error);
  }
}

Condition ManagedFolder::condition_of(const CheckpointInfo& info, const std::atomic<bool>& cancelled) {
  const std::filesystem::path& directory = info.directory;
  const auto problems_of = [&](bool tensors) {
    return with_retries([&] { return internal::problems_of(directory, tensors); });
  };
  try {
    if (written_.contains(directory)) {
      return problems_of(/*tensors=*/false).empty() ? Condition::kGood : Condition::kDamaged;
    }
    if (good_.contains(directory)) return Condition::kGood;
    if (damaged_.contains(directory)) return Condition::kDamaged;
    if (cancelled) return Condition::kUnknown;
    const auto problems = problems_of(/*tensors=*/true);
    if (!problems.empty()) {
      LOCKSTEP_LOG(kWarning) << "the checkpoint " << directory.string()
                             << " is damaged, so an older one is kept: " << problems.front();
    }
    (problems.empty() ? good_ : damaged_).insert(directory);
    return problems.empty() ? Condition::kGood : Condition::kDamaged;
  } catch (const CheckpointIoError& error) {
    LOCKSTEP_LOG(kWarning) << "the checkpoint " << directory.string()
                           << " can't be checked, so it is kept, and an older one, too: "
                           << error.what_without_backtrace();
    return Condition::kUnknown;
  }
}

}  // namespace lockstep::checkpoint::internal
