#include <algorithm>
#include <exception>
#include <functional>
#include <system_error>
#include <tuple>
#include <utility>

#include <lockstep/base/log.h>
#include <lockstep/base/object_conversion.h>
#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/internal/candidates.h>
#include <lockstep/checkpoint/internal/file_io.h>
#include <lockstep/checkpoint/internal/manifest.h>
#include <lockstep/checkpoint/internal/member_ranks.h>
#include <lockstep/checkpoint/internal/save_job.h>

namespace lockstep {
namespace {

namespace fs = std::filesystem;

/// What was found, and what was skipped with the reason.
struct Listing {
  std::vector<CheckpointInfo> checkpoints;
  std::vector<std::string> skipped;
};

Listing list(const fs::path& root) {
  Listing listing;
  std::error_code error;
  const auto status = fs::status(root, error);
  if (status.type() == fs::file_type::not_found) return listing;
  auto entry = fs::directory_iterator(root, error);
  if (error) internal::throw_system_error("read the directory", root, error.value());
  for (; entry != fs::directory_iterator(); entry.increment(error)) {
    std::error_code ignored;
    if (!entry->is_directory(ignored) || entry->path().filename().string().front() == '.') continue;
    if (!fs::exists(entry->path() / internal::kManifestName, ignored)) {
      // Of other people's directories nothing is to be said; of a checkpoint's there is.
      if (fs::exists(entry->path() / internal::kStateName, ignored)) {
        listing.skipped.push_back(entry->path().string() + ": it is incomplete: there is no " +
                                  internal::kManifestName);
      }
      continue;
    }
    try {
      listing.checkpoints.push_back(read_checkpoint_info(entry->path()));
    } catch (const CheckpointError& problem) {
      listing.skipped.push_back(entry->path().string() + ": " + problem.what_without_backtrace());
    }
  }
  if (error) internal::throw_system_error("read the directory", root, error.value());  // ends the loop, too
  std::sort(listing.checkpoints.begin(), listing.checkpoints.end(), [](const auto& a, const auto& b) {
    return std::tie(a.step, a.saved_at, a.directory) < std::tie(b.step, b.saved_at, b.directory);
  });
  return listing;
}

void warn_of(const std::string& skipped) {
  LOCKSTEP_LOG(kWarning) << "skipping the checkpoint " << skipped;
}

std::optional<CheckpointInfo> find(const fs::path& root, bool verify) {
  const auto candidates = internal::candidates(root);
  for (auto info = candidates.rbegin(); info != candidates.rend(); ++info) {
    const auto problems = verify_checkpoint(info->directory, verify);
    if (problems.empty()) return *info;
    for (const std::string& problem : problems) warn_of(info->directory.string() + ": " + problem);
  }
  return {};
}

}  // namespace

std::vector<CheckpointInfo> internal::candidates(const fs::path& root) {
  Listing listing = list(root);
  std::for_each(listing.skipped.begin(), listing.skipped.end(), warn_of);
  return std::move(listing.checkpoints);
}

std::vector<CheckpointInfo> list_checkpoints(const fs::path& root) {
  return list(root).checkpoints;
}

std::optional<CheckpointInfo> find_latest_checkpoint(const fs::path& root, const FindOptions& options) {
  if (!options.group) return find(root, options.verify);
  const internal::MemberRanks ranks(options.group);
  // The directory that rank 0 has chosen; empty for none.
  using Answer = std::tuple<int64_t, std::string, std::string>;
  std::optional<CheckpointInfo> found;
  Answer answer;
  if (ranks.leads()) {
    const auto failure = internal::Failure::of(ranks, [&] { found = find(root, options.verify); });
    answer = {failure.kind, failure.text, found ? found->directory.string() : ""};
  }
  const auto [kind, text, directory] = from_object<Answer>(ranks.broadcast(to_object(answer)));
  internal::Failure{static_cast<internal::Failure::Kind>(kind), text}.raise();
  if (ranks.leads() || directory.empty()) return found;
  return read_checkpoint_info(directory);
}

}  // namespace lockstep
