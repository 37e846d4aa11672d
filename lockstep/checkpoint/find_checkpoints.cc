#include <algorithm>
#include <cinttypes>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include <lockstep/base/log.h>
#include <lockstep/base/text/formatted.h>
#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/internal/candidates.h>
#include <lockstep/checkpoint/internal/checkpoint_reader.h>
#include <lockstep/checkpoint/internal/file_io.h>
#include <lockstep/checkpoint/internal/folder_lock.h>
#include <lockstep/checkpoint/internal/manifest.h>
#include <lockstep/checkpoint/internal/member_ranks.h>
#include <lockstep/checkpoint/internal/save_job.h>
#include <lockstep/checkpoint/internal/temporary_directory.h>
#include <lockstep/serialization/object_conversion.h>

namespace lockstep {
namespace {

namespace fs = std::filesystem;

// Every volume has one, and only root may look into it.
constexpr const char* kLostAndFound = "lost+found";
constexpr size_t kMostShown = 10;
// A job that saves and removes beside find_latest_checkpoint() may take away what was listed.
constexpr int kMostListings = 5;

/// A checkpoint with what decides between several of one step.
struct Found {
  CheckpointInfo info;
  int64_t missing_ranks = 0;  // of which it has no state of their own
};

/// What was found, what is damaged, and what else there is to warn of.
struct Listing {
  std::vector<Found> found;
  std::vector<std::string> damaged;
  std::vector<std::string> passed_over;
};

std::vector<fs::path> entries_of(const fs::path& root) {
  std::vector<fs::path> entries;
  if (!checkpoint::internal::exists(root)) return entries;
  std::error_code error;
  auto entry = fs::directory_iterator(root, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error))
    entries.push_back(entry->path());
  if (error) checkpoint::internal::throw_system_error("read the directory", root, error.value());
  return entries;
}

/// Adds to the listing what a directory is. Throws CheckpointIoError, and has added nothing then.
void look_into(const fs::path& directory, Listing& listing) {
  if (!checkpoint::internal::is_directory(directory)) return;
  const bool named = checkpoint::internal::is_managers_name(directory);
  if (!checkpoint::internal::exists(directory / checkpoint::internal::kManifestName)) {
    // Of other people's directories nothing is to be said; of a checkpoint's there is.
    if (checkpoint::internal::exists(directory / checkpoint::internal::kStateName)) {
      (named ? listing.damaged : listing.passed_over)
          .push_back(directory.string() + ": it is incomplete: there is no " +
                     checkpoint::internal::kManifestName);
    }
    return;
  }
  try {
    const checkpoint::internal::Manifest manifest = checkpoint::internal::read_manifest(directory);
    listing.found.push_back(
        {manifest.info, manifest.info.world_size - static_cast<int64_t>(manifest.ranks.size())});
  } catch (const CheckpointIoError&) {
    throw;
  } catch (const CheckpointError& problem) {
    if (!checkpoint::internal::exists(directory)) return;  // a job has removed it meanwhile
    const bool ours = named || checkpoint::internal::names_our_format(directory);
    (ours ? listing.damaged : listing.passed_over)
        .push_back(directory.string() + ": " + problem.what_without_backtrace());
  }
}

/// Throws CheckpointIoError rather than leave out a manager's checkpoint that it could not look at.
Listing list(const fs::path& root, bool managed_only) {
  Listing listing;
  for (const fs::path& directory : checkpoint::internal::with_retries([&] { return entries_of(root); })) {
    const std::string name = directory.filename().string();
    const bool named = checkpoint::internal::is_managers_name(directory);
    if (name.front() == '.' || name == kLostAndFound || (managed_only && !named)) continue;
    try {
      checkpoint::internal::with_retries([&] { look_into(directory, listing); });
    } catch (const CheckpointIoError& error) {
      if (named) throw;
      listing.passed_over.push_back(directory.string() + ": " + error.what_without_backtrace());
    }
  }
  // Of one step the more complete is later: what a rank saved alone lacks the others' own states. The time
  // comes last, for clocks jump.
  std::sort(listing.found.begin(), listing.found.end(), [](const Found& a, const Found& b) {
    return std::tie(a.info.step, b.missing_ranks, a.info.epoch, a.info.saved_at, a.info.directory) <
           std::tie(b.info.step, a.missing_ranks, b.info.epoch, b.info.saved_at, b.info.directory);
  });
  return listing;
}

std::vector<CheckpointInfo> infos_of(Listing& listing) {
  std::vector<CheckpointInfo> infos;
  for (Found& found : listing.found) infos.push_back(std::move(found.info));
  return infos;
}

/// "a; b; and 3 more"
std::string joined(const std::vector<std::string>& texts) {
  std::string text;
  for (size_t i = 0; i < std::min(texts.size(), kMostShown); ++i) text += (i > 0 ? "; " : "") + texts[i];
  if (texts.size() > kMostShown) text += "; and " + std::to_string(texts.size() - kMostShown) + " more";
  return text;
}

void warn_of(const std::string& damaged) {
  LOCKSTEP_LOG(kWarning) << "skipping " << damaged;
}

std::optional<CheckpointInfo> find(const fs::path& root, const FindOptions& options) {
  for (int listings = 1;; ++listings) {
    checkpoint::internal::Candidates candidates = checkpoint::internal::candidates(root);
    bool list_anew = false;
    for (auto info = candidates.checkpoints.rbegin(); !list_anew && info != candidates.checkpoints.rend();
         ++info) {
      const auto problems = checkpoint::internal::with_retries(
          [&] { return checkpoint::internal::problems_of(info->directory, options.verify); });
      if (problems.empty()) return *info;
      // A job that saves there removes old ones meanwhile.
      if (!checkpoint::internal::with_retries(
              [&] { return checkpoint::internal::exists(info->directory); })) {
        list_anew = listings < kMostListings;
        continue;
      }
      for (const std::string& problem : problems) {
        candidates.damaged.push_back(info->directory.string() + ": " + problem);
        warn_of(candidates.damaged.back());
      }
    }
    if (list_anew) continue;
    LOCKSTEP_CHECK_FILE(
        candidates.damaged.empty() || options.none_if_all_damaged,
        checkpoint::internal::all_damaged_text(root, candidates.damaged, "FindOptions::none_if_all_damaged"));
    return {};
  }
}

}  // namespace

checkpoint::internal::Candidates checkpoint::internal::candidates(const fs::path& root) {
  Listing listing = list(root, /*managed_only=*/false);
  std::for_each(listing.damaged.begin(), listing.damaged.end(), warn_of);
  std::for_each(listing.passed_over.begin(), listing.passed_over.end(), warn_of);
  return {infos_of(listing), std::move(listing.damaged), std::move(listing.passed_over)};
}

std::string checkpoint::internal::all_damaged_text(const fs::path& root,
                                                   const std::vector<std::string>& damaged,
                                                   const std::string& option) {
  const std::string text =
      "all checkpoints in " + root.string() +
      " are damaged, or of a newer version of Lockstep, so there is none to go on from: " + joined(damaged) +
      ". Put back what they lack, or name another directory";
  return option.empty() ? text : text + ", or set " + option + " to begin at step 0";
}

std::string checkpoint::internal::none_there_text(const fs::path& root,
                                                  const std::vector<std::string>& passed_over) {
  std::vector<std::string> names;
  for (const fs::path& entry : checkpoint::internal::with_retries([&] { return entries_of(root); })) {
    std::string name = entry.filename().string();
    if (name == checkpoint::internal::kLockName) continue;
    if (checkpoint::internal::is_temporary_name(entry)) name += " (a save that did not finish)";
    names.push_back(std::move(name));
  }
  std::sort(names.begin(), names.end());
  std::string text = "there is no checkpoint to go on from in " + root.string() +
                     ", and must_resume is set; " +
                     (names.empty() ? "it is empty" : "none of what is there is one: " + joined(names));
  if (!passed_over.empty()) text += ". Passed over: " + joined(passed_over);
  return text +
         ". Name the folder that holds the checkpoints' folders (step-00000500, …), or leave out must_resume "
         "to begin at step 0";
}

std::string checkpoint::internal::managers_name(const CheckpointInfo& info) {
  return formatted("step-%08" PRId64 "%s", info.step, info.emergency.empty() ? "" : "-emergency");
}

bool checkpoint::internal::is_managers_name(const fs::path& directory) {
  std::string name = directory.filename().string();
  for (const std::string end : {".replaced", "-emergency"}) {
    if (name.ends_with(end)) name.resize(name.size() - end.size());
  }
  const size_t digits = name.starts_with("step--") ? 6 : 5;  // steps may be negative
  return name.starts_with("step-") && name.size() > digits &&
         name.find_first_not_of("0123456789", digits) == std::string::npos;
}

std::vector<CheckpointInfo> checkpoint::internal::list_managed(const fs::path& root) {
  Listing listing = list(root, /*managed_only=*/true);
  return infos_of(listing);
}

fs::path checkpoint::internal::replaced_name(const fs::path& directory) {
  return directory.string() + ".replaced";
}

std::vector<CheckpointInfo> list_checkpoints(const fs::path& root) {
  Listing listing = list(root, /*managed_only=*/false);
  return infos_of(listing);
}

std::optional<CheckpointInfo> find_latest_checkpoint(const fs::path& root, const FindOptions& options) {
  if (!options.group) return find(root, options);
  const checkpoint::internal::MemberRanks ranks(options.group);
  // The directory that rank 0 has chosen; empty for none.
  using Answer = std::tuple<int64_t, std::string, std::string>;
  std::optional<CheckpointInfo> found;
  Answer answer;
  if (ranks.leads()) {
    const auto failure = checkpoint::internal::Failure::of(ranks, [&] { found = find(root, options); });
    answer = {failure.kind, failure.text, found ? found->directory.string() : ""};
  }
  const auto [kind, text, directory] = from_object<Answer>(ranks.broadcast(to_object(answer)));
  checkpoint::internal::Failure{static_cast<checkpoint::internal::Failure::Kind>(kind), text}.raise();
  if (ranks.leads() || directory.empty()) return found;
  return checkpoint::internal::with_retries([&] { return read_checkpoint_info(directory); });
}

}  // namespace lockstep
