// Who may save into a folder.
#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <gmock/gmock.h>
#include <memory>
#include <stdexcept>
#include <string>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <utility>

#include <gtest/gtest.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/base/process/interrupt.h>
#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/checkpoint_manager.h>
#include <lockstep/checkpoint/internal/folder_lock.h>
#include <lockstep/checkpoint/testing/scratch.h>
#include <lockstep/checkpoint/testing/states.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::folder_lock_test {
namespace {

using namespace std::chrono_literals;
using checkpoint::internal::FolderLock;
using checkpoint::internal::FolderOwner;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using testing::run_ranks_collect;
using testing::Scratch;
using testing::training_state;

constexpr const char* kNoLocks = "checkpoint.lock=errno(37)";  // ENOLCK

TEST(FolderLock, IsHeldByOneProcess) {
  const Scratch scratch;
  for (const bool locks : {true, false}) {
    run_ranks(2,
              [&](int rank) {
                const auto group = init_process_group();
                if (!locks) failpoint::configure(kNoLocks);
                const auto folder = scratch.path() / (locks ? "locks" : "none");
                std::unique_ptr<FolderLock> lock;
                if (rank == 0) lock = FolderLock::acquire(folder);
                barrier();
                if (rank == 1) {
                  EXPECT_THAT(message_of<CheckpointError>([&] { FolderLock::acquire(folder, 0s); }),
                              AllOf(HasSubstr("the folder " + folder.string() + " is in use: process "),
                                    HasSubstr(" on host '"), HasSubstr("another directory")));
                }
                barrier();
                lock.reset();
                barrier();
                if (rank == 1) {
                  EXPECT_NE(FolderLock::acquire(folder), nullptr);
                }
              },
              {.environment = scratch.environment()});
  }
}

TEST(FolderLock, OfADeadProcessIsFree) {
  const Scratch scratch;
  for (const bool locks : {true, false}) {
    const auto folder = scratch.path() / (locks ? "locks" : "none");
    const auto outcomes = run_ranks_collect(1,
                                            [&](int) {
                                              if (!locks) failpoint::configure(kNoLocks);
                                              const auto lock = FolderLock::acquire(folder);
                                              testing::die();
                                            },
                                            {.environment = scratch.environment()});
    if (Scratch::in_rank()) continue;
    ASSERT_EQ(outcomes[0].signal, SIGKILL) << outcomes[0].output;
    if (!locks) failpoint::configure(kNoLocks);
    EXPECT_NE(FolderLock::acquire(folder), nullptr);
    failpoint::configure("");
  }
}

/// Two processes that tell each other how far they are.
class Signal {
 public:
  explicit Signal(const std::filesystem::path& path) : path_(path) {
    if (!Scratch::in_rank()) ::mkfifo(path_.c_str(), 0600);
  }
  void give() const { std::ofstream(path_) << "x"; }
  void await() const { std::ifstream(path_).get(); }

 private:
  std::string path_;
};

std::function<void()> on_first_check;  // by the main thread, which waits for a lock

void check() {
  if (const auto action = std::exchange(on_first_check, nullptr)) action();
}

TEST(FolderLock, WaitsForAProcessThatIsJustEnding) {
  const Scratch scratch;
  for (const bool locks : {true, false}) {
    const std::string name = locks ? "locks" : "none";
    const Signal held(scratch.path() / (name + ".held"));
    const Signal waited_for(scratch.path() / (name + ".waited_for"));
    const auto outcomes = run_ranks_collect(2,
                                            [&](int rank) {
                                              if (!locks) failpoint::configure(kNoLocks);
                                              if (rank == 0) {
                                                const auto lock = FolderLock::acquire(scratch.path() / name);
                                                held.give();
                                                waited_for.await();
                                                testing::die();
                                              }
                                              held.await();
                                              on_first_check = [&] { waited_for.give(); };
                                              set_interrupt_check(check);
                                              EXPECT_NE(FolderLock::acquire(scratch.path() / name), nullptr);
                                              EXPECT_FALSE(on_first_check) << "it has waited";
                                            },
                                            {.environment = scratch.environment()});
    if (Scratch::in_rank()) continue;
    EXPECT_EQ(outcomes[0].signal.value_or(0), SIGKILL) << outcomes[0].output;
    EXPECT_EQ(outcomes[1].exit_status.value_or(-1), 0) << outcomes[1].output;
    EXPECT_THAT(outcomes[1].output, HasSubstr("a process that was killed may need some seconds to end"));
  }
}

struct Pressed final : std::runtime_error, Interruption {
  Pressed() : runtime_error("Ctrl-C") {}
};

std::atomic<bool> pressed = false;
const std::thread::id main_thread = std::this_thread::get_id();

/// In the main thread alone, as Python's signals.
void check_pressed() {
  if (std::this_thread::get_id() == main_thread && pressed.exchange(false)) throw Pressed();
}

TEST(FolderLock, IsTakenOverByTheLaterGenerationOfItsJob) {
  const Scratch scratch;
  for (const bool locks : {true, false}) {
    run_ranks(2,
              [&](int rank) {
                const auto group = init_process_group();
                if (!locks) failpoint::configure(kNoLocks);
                const auto folder = scratch.path() / (locks ? "locks" : "none");
                std::unique_ptr<FolderLock> lock;
                if (rank == 0) {
                  lock = FolderLock::acquire(folder, 0s, {.job = "a", .generation = 1});
                  lock->check();
                }
                barrier();
                if (rank == 1) {
                  const auto in_use = [&](const FolderOwner& owner) {
                    return message_of<CheckpointError>([&] { FolderLock::acquire(folder, 0s, owner); });
                  };
                  EXPECT_THAT(in_use({.job = "b", .generation = 2}), HasSubstr("is in use"));
                  EXPECT_THAT(in_use({.job = "a", .generation = 1}), HasSubstr("is in use"));
                  EXPECT_THAT(in_use({.job = "a", .generation = 0, .shares_with_own = true}),
                              HasSubstr("is in use"));
                  lock = FolderLock::acquire(folder, 0s, {.job = "a", .generation = 2});
                  lock->check();
                }
                barrier();
                if (rank == 0) {
                  EXPECT_THAT(message_of<CheckpointError>([&] { lock->check(); }),
                              AllOf(HasSubstr("is not this process's any more: process "),
                                    HasSubstr("nothing was saved")));
                  lock.reset();
                  EXPECT_THAT(message_of<CheckpointError>(
                                  [&] { FolderLock::acquire(folder, 0s, {.job = "a", .generation = 1}); }),
                              HasSubstr("is in use"));
                }
                barrier();
                if (rank == 1) lock->check();
                barrier();
              },
              {.environment = scratch.environment()});
  }
}

TEST(FolderLock, IsTakenOverByAProcessOfTheSameNumberOnAHostOfTheSameName) {
  const Scratch scratch;
  const auto lock = FolderLock::acquire(scratch.path(), 0s, {.job = "a"});
  lock->check();
  const auto path = scratch.path() / checkpoint::internal::kLockName;
  // As the next generation's process writes it, in another container.
  std::string text = testing::content_of(path);
  const std::string generation = "\"generation\":0";
  ASSERT_THAT(text, HasSubstr(generation));
  text.replace(text.find(generation), generation.size(), "\"generation\":1");
  std::ofstream(path) << text;
  EXPECT_THAT(message_of<CheckpointError>([&] { lock->check(); }),
              HasSubstr("is not this process's any more"));
}

TEST(FolderLock, ManagerThatWasLeftBehindSavesNothing) {
  const Scratch scratch;
  const auto folder = scratch.path() / "run";
  run_ranks(3,
            [&](int rank) {
              const auto group = init_process_group();
              CheckpointManager manager({.directory = folder});
              manager.save_state(training_state(1), {}, {.step = 1});
              manager.wait();
              barrier();
              std::unique_ptr<FolderLock> lock;
              if (rank == 1) {
                // Of the job's next generation, which knows what the job is called.
                const std::string text = testing::content_of(folder / checkpoint::internal::kLockName);
                const std::string key = "\"job\":\"";
                const size_t begin = text.find(key) + key.size();
                const std::string job = text.substr(begin, text.find('"', begin) - begin);
                lock = FolderLock::acquire(folder, 0s, {.job = job, .generation = 1});
              }
              barrier();
              EXPECT_THAT(message_of<CheckpointError>([&] {
                            manager.save_state(training_state(2), {}, {.step = 2});
                            manager.wait();
                          }),
                          HasSubstr("is not this process's any more"));
              if (rank == 2) {  // which never had the lock
                EXPECT_THAT(message_of<CheckpointError>(
                                [&] { manager.save_state_alone(training_state(3), {}, {.step = 3}); }),
                            HasSubstr("is not this process's any more"));
              }
              barrier();
              EXPECT_EQ(find_latest_checkpoint(folder)->step, 1);
              barrier();
            },
            {.environment = scratch.environment()});
}

TEST(FolderLock, AnInterruptionEndsTheWait) {
  const Scratch scratch;
  std::unique_ptr<FolderLock> held;
  if (!Scratch::in_rank()) held = FolderLock::acquire(scratch.path());
  run_ranks(2,
            [&](int rank) {
              const auto group = init_process_group();
              barrier();
              const CheckpointManagerOptions options{.directory = scratch.path()};
              if (rank == 0) {
                pressed = true;
                set_interrupt_check(check_pressed);
                EXPECT_THROW(CheckpointManager{options}, Pressed);
                set_interrupt_check(nullptr);
              } else {
                EXPECT_THAT(message_of<CheckpointError>([&] { CheckpointManager manager(options); }),
                            HasSubstr("rank 0: Ctrl-C"));
              }
              barrier();
            },
            {.environment = scratch.environment()});
}

TEST(FolderLock, TriesAgainWhereAServerWasAway) {
  const Scratch scratch;
  failpoint::configure("checkpoint.lock_open=errno(116)@1");  // ESTALE
  EXPECT_NE(FolderLock::acquire(scratch.path()), nullptr);
  failpoint::configure("");
}

TEST(FolderLock, AManagerThatCannotHaveItFailsOnAllRanks) {
  const Scratch scratch;
  std::unique_ptr<CheckpointManager> other;
  if (!Scratch::in_rank()) {
    other = std::make_unique<CheckpointManager>(CheckpointManagerOptions{.directory = scratch.path()});
    CheckpointManager same(CheckpointManagerOptions{.directory = scratch.path() / "."});  // and goes again
  }
  run_ranks(2,
            [&](int) {
              const auto group = init_process_group();
              set_group_timeout(6s);  // of which rank 0 waits half
              EXPECT_THAT(message_of<CheckpointError>(
                              [&] { CheckpointManager manager({.directory = scratch.path()}); }),
                          AllOf(HasSubstr("rank 0: the folder"), HasSubstr("is in use: process ")));
              save_checkpoint(scratch.path() / "by hand", training_state(1), {}, {});  // has no lock
            },
            {.environment = scratch.environment()});
}

}  // namespace
}  // namespace lockstep::folder_lock_test
