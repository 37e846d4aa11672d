#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/log.h>
#include <lockstep/base/process/fork_guard.h>
#include <lockstep/base/process/interrupt.h>
#include <lockstep/base/process/leaked_in_child.h>
#include <lockstep/base/process/per_process.h>
#include <lockstep/base/random_bytes.h>
#include <lockstep/base/text/hex.h>
#include <lockstep/base/world_defaults.h>
#include <lockstep/checkpoint/checkpoint_manager.h>
#include <lockstep/checkpoint/internal/async_writer.h>
#include <lockstep/checkpoint/internal/candidates.h>
#include <lockstep/checkpoint/internal/file_io.h>
#include <lockstep/checkpoint/internal/folder_lock.h>
#include <lockstep/checkpoint/internal/managed_folder.h>
#include <lockstep/checkpoint/internal/member_ranks.h>
#include <lockstep/checkpoint/internal/pages.h>
#include <lockstep/checkpoint/internal/save_job.h>
#include <lockstep/checkpoint/internal/save_schedule.h>
#include <lockstep/serialization/object_conversion.h>

namespace lockstep {
namespace {

using checkpoint::internal::Failure;
using checkpoint::internal::FolderLock;
using checkpoint::internal::FolderOwner;
using checkpoint::internal::managers_name;
using checkpoint::internal::MemberRanks;
using checkpoint::internal::SaveJob;
using checkpoint::internal::SaveSchedule;

using Clock = SaveSchedule::Clock;

void check(const CheckpointManagerOptions& options) {
  TORCH_CHECK_VALUE(!options.directory.empty(), "CheckpointManager: no directory is given");
  TORCH_CHECK_VALUE(options.keep_last >= 1, "CheckpointManager: keep_last is ", options.keep_last,
                    "; at least 1 is kept");
  TORCH_CHECK_VALUE(options.keep_best >= 0, "CheckpointManager: keep_best is ", options.keep_best);
  TORCH_CHECK_VALUE(options.keep_emergency >= 1, "CheckpointManager: keep_emergency is ",
                    options.keep_emergency, "; at least 1 is kept");
  TORCH_CHECK_VALUE(options.keep_period >= 0, "CheckpointManager: keep_period is ", options.keep_period);
  TORCH_CHECK_VALUE(options.every_steps >= 0, "CheckpointManager: every_steps is ", options.every_steps);
  TORCH_CHECK_VALUE(options.every_epochs >= 0, "CheckpointManager: every_epochs is ", options.every_epochs);
  TORCH_CHECK_VALUE(options.every.count() >= 0, "CheckpointManager: every is ", options.every.count(), " ns");
  TORCH_CHECK_VALUE(options.automatic_share > 0 && options.automatic_share <= 1,
                    "CheckpointManager: automatic_share is ", options.automatic_share,
                    "; it is a part of the run time, above 0 and at most 1");
  TORCH_CHECK_VALUE(!options.must_resume || !options.from_scratch_if_all_damaged,
                    "CheckpointManager: must_resume and from_scratch_if_all_damaged contradict each other");
}

void check_is_there(const std::filesystem::path& directory) {
  const bool there =
      checkpoint::internal::with_retries([&] { return checkpoint::internal::is_directory(directory); });
  LOCKSTEP_CHECK_FILE(there, "there is no folder ", directory.string(),
                      ", so no checkpoint to go on from, and must_resume is set. Name the folder that the "
                      "checkpoints are in, or leave out must_resume to begin at step 0");
}

/// For whom this process has had folders: managers that follow each other are of one job.
struct Owners {
  std::mutex mutex;
  std::map<std::filesystem::path, FolderOwner> by_folder;  // guarded by mutex
};
PerProcess<Owners> owners;

/// This process's, for its part of the job. `job`: empty for what it was before, or a new one.
FolderOwner owner_of(const std::filesystem::path& folder, const std::string& job = {}) {
  Owners& all = owners.get();
  const std::lock_guard guard(all.mutex);
  FolderOwner& owner = all.by_folder[folder];
  if (!job.empty()) owner.job = job;
  if (owner.job.empty()) owner.job = to_hex(random_bytes<16>());
  owner.generation = std::max(owner.generation, world_defaults().value_or(WorldDefaults{}).generation);
  return owner;
}

/// On the leader the lock; what goes wrong is thrown on all ranks. The others wait meanwhile, within the
/// group's timeout.
std::unique_ptr<FolderLock> lock_together(const CheckpointManagerOptions& options, const MemberRanks& ranks) {
  std::unique_ptr<FolderLock> lock;
  FolderOwner owner;
  Failure failure;
  std::exception_ptr interruption;
  if (ranks.leads()) {
    failure = Failure::of(ranks, [&] {
      try {
        if (options.must_resume) check_is_there(options.directory);
        owner = owner_of(options.directory);
        lock = FolderLock::acquire(options.directory, ranks.timeout() / 2, owner);
      } catch (const Interruption&) {
        interruption = std::current_exception();
        throw;
      }
    });
  }
  using Outcome = std::tuple<int64_t, std::string, std::string>;
  const auto [kind, text, job] =
      from_object<Outcome>(ranks.broadcast(to_object(Outcome{failure.kind, failure.text, owner.job})));
  owner_of(options.directory, job);
  if (interruption) std::rethrow_exception(interruption);
  Failure{static_cast<Failure::Kind>(kind), text}.raise();
  return lock;
}

/// The group for the thread that writes: its messages must not mix with the program's.
MemberRanks own_ranks(const MemberRanks& ranks, bool async) {
  if (ranks.size() == 1 || !async) return ranks;
  const bool all = ranks.group() == default_group();
  return MemberRanks(
      new_group(get_process_group_ranks(ranks.group()), {},
                {.use_local_synchronization = !all, .group_desc = "checkpoints", .sort_ranks = false}));
}

SaveSchedule::Look agree_on(const MemberRanks& ranks, const SaveSchedule::Look& look) {
  using Object = std::tuple<bool, int64_t>;
  const auto [save, next] =
      from_object<Object>(ranks.broadcast(to_object(Object{look.save, look.next_step})));
  return {save, next};
}

}  // namespace

class CheckpointManager::Implementation {
 public:
  Implementation(CheckpointManagerOptions options, ProcessGroup group)
      : options_(std::move(options)),
        ranks_(std::move(group)),
        lock_(lock_together(options_, ranks_)),
        writing_ranks_(own_ranks(ranks_, options_.async)),
        schedule_(options_, ranks_.leads(),
                  [this](const SaveSchedule::Look& look) { return agree_on(ranks_, look); }),
        folder_(options_) {}

  ~Implementation() {
    try {
      wait();
    } catch (const std::exception& error) {
      LOCKSTEP_LOG(kError) << "the last checkpoint was not saved: " << text_of(error);
    }
    if (writing_ranks_.size() == 1 || writing_ranks_.group() == ranks_.group() || writer_.busy()) return;
    try {
      if (is_initialized()) destroy_process_group(writing_ranks_.group());
    } catch (const c10::Error&) {  // it has gone with its world, or by shrink_group()
    }
  }

  const CheckpointManagerOptions& options() const { return options_; }
  SaveSchedule& schedule() { return schedule_; }

  void save(const StateDict& state, const StateDict& rank_state, const CheckpointInfo& info) {
    const auto begin = Clock::now();
    if (info.emergency.empty()) {
      wait();
    } else {
      wait_and_forget_error();
    }
    {
      const std::lock_guard lock(mutex_);
      if (took_) schedule_.written(*took_);
    }
    auto job = std::make_shared<SaveJob>(options_.directory / managers_name(info), state, rank_state, info,
                                         save_options(), /*managed=*/true, ranks_);
    job->set_fence([this] {
      if (lock_) lock_->check();
    });
    if (!options_.async || !info.emergency.empty()) {
      completed(job->write(ranks_));
    } else {
      job->stage(memory_, writing_ranks_, options_.copy_later);
      copying_ = options_.copy_later;
      try {
        writer_.start([this, job, begin] { write_in_background(*job, begin); });
      } catch (...) {
        copying_ = false;
        throw;
      }
    }
    const auto now = Clock::now();
    schedule_.saved(info.step, now, now - begin);
  }

  void finish_copy() {
    if (!copying_.load(std::memory_order_acquire) || fork_guard_.in_forked_child()) return;
    const auto begin = Clock::now();
    std::unique_lock lock(mutex_);
    while (copying_) wait_interruptibly(*copied_, lock);
    schedule_.also_held_up(Clock::now() - begin);
  }

  bool save_alone(const StateDict& state, const StateDict& rank_state, const CheckpointInfo& info) {
    wait_and_forget_error();
    const auto last = last_saved();
    if (last && last->emergency.empty() && last->step == info.step && last->epoch == info.epoch) return false;
    const MemberRanks alone(ranks_.rank(), ranks_.group_size());
    // One that has gone on without the leader takes the folder over.
    std::unique_ptr<FolderLock> own_lock;
    FolderOwner owner = owner_of(options_.directory);
    owner.shares_with_own = true;
    if (!lock_ && owner.generation > 0) {
      own_lock = FolderLock::acquire(options_.directory, std::chrono::nanoseconds(0), owner);
    }
    SaveJob job(options_.directory / managers_name(info), state, rank_state, info, save_options(),
                /*managed=*/true, alone);
    job.set_fence([&] {
      if (const FolderLock* lock = lock_ ? lock_.get() : own_lock.get()) return lock->check();
      FolderLock::check_without(options_.directory, owner);
    });
    note(job.write(alone));
    return true;
  }

  std::optional<LoadedCheckpoint> load_latest(LoadOptions options) {
    writer_.wait();
    if (!options.rank) options.rank = ranks_.rank();
    if (!options.world_size) options.world_size = ranks_.group_size();
    checkpoint::internal::Candidates candidates;
    Failure failure;
    if (ranks_.leads()) {
      failure =
          Failure::of(ranks_, [&] { candidates = checkpoint::internal::candidates(options_.directory); });
    }
    std::vector<CheckpointInfo>& checkpoints = candidates.checkpoints;
    std::vector<std::string>& damaged = candidates.damaged;
    for (;;) {
      if (ranks_.leads() && failure.kind == Failure::kNone && checkpoints.empty()) {
        failure = Failure::of(ranks_, [&] { check_from_scratch(candidates); });
      }
      // The leader's directory, or none; or what it could not do.
      using Choice = std::tuple<int64_t, std::string, std::string>;
      Choice choice{failure.kind, failure.text,
                    checkpoints.empty() ? "" : checkpoints.back().directory.string()};
      choice = from_object<Choice>(ranks_.broadcast(to_object(choice)));
      Failure{static_cast<Failure::Kind>(std::get<0>(choice)), std::get<1>(choice)}.raise();
      const std::filesystem::path directory = std::get<2>(choice);
      if (directory.empty()) return {};
      std::string damage;
      auto loaded = load_together(directory, options, damage);
      if (damage.empty()) {
        if (options.verify && options.parts.empty()) folder_.note_good(directory);
        return loaded;
      }
      damaged.push_back(damage);
      if (!checkpoints.empty()) checkpoints.pop_back();
    }
  }

  void wait() {
    writer_.wait();
    if (const auto error = take_error()) std::rethrow_exception(error);
  }

  std::optional<CheckpointInfo> last_saved() const {
    const std::lock_guard lock(mutex_);
    return last_saved_;
  }

 private:
  SaveOptions save_options() const {
    return {
        .group = {}, .alone = false, .sharded = options_.sharded, .overwrite = true, .fsync = options_.fsync};
  }

  std::exception_ptr take_error() {
    if (fork_guard_.in_forked_child()) return nullptr;  // the thread may have held the mutex
    const std::lock_guard lock(mutex_);
    return std::exchange(error_, nullptr);
  }

  /// What must be saved now does not fail for what could not be saved before.
  void wait_and_forget_error() {
    writer_.wait();
    if (take_error()) {
      LOCKSTEP_LOG(kWarning) << "the checkpoint before this one was not saved";
    }
  }

  void note(const CheckpointInfo& info) {
    const std::lock_guard lock(mutex_);
    last_saved_ = info;
  }

  void write_in_background(SaveJob& job, Clock::time_point begin) {
    if (copying_) {
      job.copy_rest(writing_ranks_);
      const std::lock_guard lock(mutex_);
      copying_.store(false, std::memory_order_release);
    }
    copied_->notify_all();
    try {
      const CheckpointInfo info = job.write(writing_ranks_, &writer_.cancelled());
      {
        const std::lock_guard lock(mutex_);
        took_ = Clock::now() - begin;  // without what is removed and checked afterwards
      }
      completed(info);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      error_ = std::current_exception();
    }
  }

  /// In an emergency nothing is removed: checking what earlier runs have left takes time that there may not
  /// be.
  void completed(const CheckpointInfo& info) {
    note(info);
    if (!ranks_.leads()) return;
    folder_.note_written(info.directory);
    if (info.emergency.empty()) folder_.remove_old(info, writer_.cancelled());
  }

  /// Throws unless training may begin at step 0, now that no candidate is left to try.
  void check_from_scratch(const checkpoint::internal::Candidates& candidates) const {
    if (candidates.damaged.empty()) {
      LOCKSTEP_CHECK_FILE(!options_.must_resume,
                          checkpoint::internal::none_there_text(options_.directory, candidates.passed_over));
      return;
    }
    LOCKSTEP_CHECK_FILE(
        options_.from_scratch_if_all_damaged,
        checkpoint::internal::all_damaged_text(
            options_.directory, candidates.damaged,
            options_.must_resume ? "" : "CheckpointManagerOptions::from_scratch_if_all_damaged"));
    LOCKSTEP_LOG(kWarning) << "all checkpoints in " << options_.directory.string()
                           << " are damaged; training from scratch, as from_scratch_if_all_damaged says";
  }

  /// Nothing, and in `found` what is wrong, if any rank finds damage. Whatever else goes wrong on any rank is
  /// thrown on all.
  std::optional<LoadedCheckpoint> load_together(const std::filesystem::path& directory,
                                                const LoadOptions& options, std::string& found) {
    std::optional<LoadedCheckpoint> loaded;
    Failure damage;
    const Failure failure = Failure::of(ranks_, [&] {
      try {
        loaded = checkpoint::internal::with_retries([&] { return load_checkpoint(directory, options); });
      } catch (const CheckpointIoError& error) {
        throw CheckpointIoError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                                c10::str(error.what_without_backtrace(),
                                         "; the checkpoint may be good, so no other one is loaded. Make it "
                                         "readable, or move ",
                                         directory.string(), " away to go on without it"));
      } catch (const CheckpointError&) {
        damage = Failure::of_current_exception(ranks_);
        // By this rank's own reading: another rank's may have another reason.
        folder_.note_damaged(directory);
      }
    });
    using Outcome = std::tuple<std::string, int64_t, std::string>;
    for (const auto& each : ranks_.all_gather(to_object(Outcome{damage.text, failure.kind, failure.text}))) {
      const auto [damaged, kind, text] = from_object<Outcome>(each);
      Failure{static_cast<Failure::Kind>(kind), text}.raise();
      if (damage.text.empty()) damage.text = damaged;
    }
    if (damage.text.empty()) return loaded;
    found = damage.text;
    if (ranks_.leads()) {
      LOCKSTEP_LOG(kWarning) << "skipping the checkpoint " << directory.string() << ": " << damage.text;
    }
    return {};
  }

  const CheckpointManagerOptions options_;
  const MemberRanks ranks_;
  const std::unique_ptr<FolderLock> lock_;  // on the leader
  const MemberRanks writing_ranks_;
  SaveSchedule schedule_;
  checkpoint::internal::Pages memory_;
  ForkGuard fork_guard_;      // in a child there is no thread that copies
  mutable std::mutex mutex_;  // of what the thread writes
  LeakedInChild<std::condition_variable> copied_;
  std::atomic<bool> copying_ = false;
  std::exception_ptr error_;
  std::optional<CheckpointInfo> last_saved_;
  std::optional<std::chrono::nanoseconds> took_;
  // The writer's thread uses it, and load_latest(), which waits for that thread first.
  checkpoint::internal::ManagedFolder folder_;
  checkpoint::internal::AsyncWriter writer_;  // last: its thread uses the rest
};

CheckpointManager::CheckpointManager(CheckpointManagerOptions options, ProcessGroup group) {
  check(options);
  options.directory = std::filesystem::absolute(options.directory).lexically_normal();
  implementation_ = std::make_unique<Implementation>(std::move(options), std::move(group));
}

CheckpointManager::~CheckpointManager() = default;

const CheckpointManagerOptions& CheckpointManager::options() const {
  return implementation_->options();
}

bool CheckpointManager::should_save(int64_t step) {
  return implementation_->schedule().due_at_step(step, Clock::now());
}

bool CheckpointManager::should_save_at_epoch_end(int64_t epoch) {
  return implementation_->schedule().due_at_epoch(epoch);
}

void CheckpointManager::save_state(const StateDict& state, const StateDict& rank_state, CheckpointInfo info) {
  implementation_->save(state, rank_state, info);
}

bool CheckpointManager::save_state_alone(const StateDict& state, const StateDict& rank_state,
                                         CheckpointInfo info) {
  return implementation_->save_alone(state, rank_state, info);
}

std::optional<LoadedCheckpoint> CheckpointManager::load_latest(const LoadOptions& options) {
  return implementation_->load_latest(options);
}

void CheckpointManager::finish_copy() {
  implementation_->finish_copy();
}

void CheckpointManager::wait() {
  implementation_->wait();
}

std::optional<CheckpointInfo> CheckpointManager::last_saved() const {
  return implementation_->last_saved();
}

}  // namespace lockstep
