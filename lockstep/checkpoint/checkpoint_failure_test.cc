// Checkpoints under everything that goes wrong: writers that are killed, disks that are full or read-only,
// and files that are damaged.
#include <array>
#include <csignal>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <optional>
#include <random>
#include <sched.h>
#include <string>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/checkpoint_manager.h>
#include <lockstep/checkpoint/internal/file_io.h>
#include <lockstep/checkpoint/testing/scratch.h>
#include <lockstep/checkpoint/testing/states.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::checkpoint_failure_test {
namespace {

using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using testing::run_ranks_collect;
using testing::same;
using testing::Scratch;
using testing::training_state;

namespace fs = std::filesystem;

// Where a writer can die; the manager's are passed when it replaces and removes.
constexpr std::array kFailpoints = {"plan",          "directory_made", "within_file",     "before_sync",
                                    "file_written",  "files_written",  "before_manifest", "within_manifest",
                                    "before_rename", "renamed",        "removing"};

TEST(CheckpointFailure, AWriterKilledAnywhereLeavesTheOneBefore) {
  for (const char* place : kFailpoints) {
    const Scratch scratch;
    const auto save = [&](int64_t step, bool async) {
      CheckpointManager manager({.directory = scratch.path(), .keep_last = 1, .async = async});
      manager.save_state(training_state(static_cast<double>(step)), {{"own", torch::ones({2})}},
                         {.step = step});
      manager.wait();
    };
    if (!Scratch::in_rank()) save(1, false);
    const auto outcomes =
        run_ranks_collect(1,
                          [&](int) {
                            failpoint::configure(std::string("checkpoint.") + place + "=kill(9)");
                            save(2, true);
                          },
                          {.environment = scratch.environment()});
    if (Scratch::in_rank()) continue;
    ASSERT_EQ(outcomes[0].signal, SIGKILL) << place << ": " << outcomes[0].output;
    const bool complete = std::string(place) == "renamed" || std::string(place) == "removing";
    const auto found = find_latest_checkpoint(scratch.path());
    ASSERT_TRUE(found) << place;
    EXPECT_EQ(found->step, complete ? 2 : 1) << place;
    EXPECT_TRUE(same(load_checkpoint(found->directory).state, training_state(complete ? 2 : 1))) << place;
    // The next writer takes away what this one left.
    save(3, true);
    EXPECT_THAT(scratch.entries(), ElementsAre("step-00000003")) << place;
  }
}

TEST(CheckpointFailure, AMemberKilledFailsTheOthersAndLeavesNothing) {
  const Scratch scratch;
  const testing::RunRanksOptions options{.expected_failures = {1}, .environment = scratch.environment()};
  for (const char* place : {"within_file", "files_written"}) {
    run_ranks(
        3,
        [&](int rank) {
          const auto group = init_process_group();
          const auto directory = scratch.path() / place;
          save_checkpoint(directory, training_state(1), {}, {.step = 1}, {.sharded = true});
          if (rank == 1) failpoint::configure(std::string("checkpoint.") + place + "=kill(9)");
          const auto text = message_of<c10::DistBackendError>([&] {
            save_checkpoint(directory, training_state(2), {{"own", torch::ones({2})}}, {.step = 2},
                            {.sharded = true, .overwrite = true});
          });
          EXPECT_THAT(text, HasSubstr("1"));
        },
        options);
    EXPECT_EQ(find_latest_checkpoint(scratch.path())->step, 1);
  }
  EXPECT_THAT(scratch.entries(), ElementsAre("files_written", "within_file"));
}

TEST(CheckpointFailure, ASaveOnOneRankAloneIsNamedInTheErrorsOfAll) {
  const Scratch scratch;
  run_ranks(2,
            [&](int rank) {
              auto world = init_process_group();
              // What an operation is for is no part of what must be the same.
              std::optional<CallSite> site;
              if (rank == 0) site.emplace(CallSite::kCheckpoint);
              auto ones = torch::ones({2});
              all_reduce(ones);
              EXPECT_EQ(ones[0].item<float>(), 2);
              site.reset();

              const auto text = message_of<c10::DistBackendError>([&] {
                if (rank == 0) save_checkpoint(scratch.path() / "alone", training_state(1), {}, {});
                barrier();
              });
              EXPECT_THAT(text,
                          HasSubstr("the ranks called different operations: rank 0: all_gather(Long [1]) for "
                                    "a checkpoint; rank 1: barrier()"));
            },
            {.environment = scratch.environment()});
}

TEST(CheckpointFailure, TheDirectoryOfALivingWriterStays) {
  const Scratch scratch;
  const fs::path left_over = scratch.path() / ".x.lockstep-tmp-0";
  const fs::path alive = scratch.path() / ".y.lockstep-tmp-1";
  const fs::path others = scratch.path() / ".z.tmp-1";
  for (const auto& path : {left_over, alive, others}) fs::create_directory(path);
  std::ofstream(left_over / "model.safetensors") << "part";
  const UniqueFd lock(::open(alive.c_str(), O_RDONLY | O_DIRECTORY));
  ASSERT_EQ(::flock(lock.get(), LOCK_EX), 0);
  save_checkpoint(scratch.path() / "a", training_state(1), {}, {});
  EXPECT_THAT(scratch.entries(), ElementsAre(alive.filename().string(), others.filename().string(), "a"));
}

TEST(CheckpointFailure, AFileThatMayNotGrow) {
  const Scratch scratch;
  if (!Scratch::in_rank()) save_checkpoint(scratch.path() / "good", training_state(1), {}, {.step = 1});
  run_ranks(2,
            [&](int rank) {
              const auto group = init_process_group();
              if (rank == 1) {
                const rlimit limit{5000, 5000};
                ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
              }
              const auto text = message_of<CheckpointError>([&] {
                save_checkpoint(scratch.path() / "a", training_state(1), {{"own", torch::ones({2000})}},
                                {.step = 2}, {.sharded = true});
              });
              EXPECT_THAT(text, HasSubstr("rank 1: cannot write " + scratch.path().string()));
              EXPECT_THAT(text, HasSubstr("File too large"));
            },
            {.environment = scratch.environment()});
  EXPECT_THAT(scratch.entries(), ElementsAre("good"));
}

constexpr const char* kNoFlags = "checkpoint.rename_flags=errno(22)";  // EINVAL, as on NFS

TEST(CheckpointFailure, AFileSystemThatCannotExchangeNames) {
  const Scratch scratch;
  const auto directory = scratch.path() / "step-00000007";
  failpoint::configure(kNoFlags);
  for (const int64_t epoch : {1, 2, 3}) {  // as a step's checkpoint is replaced by that of the epoch's end
    CheckpointManager manager({.directory = scratch.path(), .async = false});
    manager.save_state(training_state(static_cast<double>(epoch)), {}, {.step = 7, .epoch = epoch});
    EXPECT_THAT(scratch.entries(), ElementsAre(directory.filename().string()));
    EXPECT_EQ(load_checkpoint(directory).info.epoch, epoch);
  }
  EXPECT_THAT(message_of<CheckpointError>([&] { save_checkpoint(directory, training_state(4), {}, {}); }),
              HasSubstr("exists already"));
  fs::create_directory(scratch.path() / "notes");
  std::ofstream(scratch.path() / "notes" / "text") << "mine";
  EXPECT_THAT(message_of<CheckpointError>([&] {
                save_checkpoint(scratch.path() / "notes", training_state(4), {}, {}, {.overwrite = true});
              }),
              HasSubstr("is no checkpoint"));
  failpoint::configure("");
  EXPECT_THAT(scratch.entries(), ElementsAre("notes", "step-00000007"));
}

TEST(CheckpointFailure, DirectoriesOfOthersStay) {
  for (const char* failpoints : {"", kNoFlags}) {
    const Scratch scratch;
    const auto put = [&](const std::string& name, const std::string& file) {
      fs::create_directory(scratch.path() / name);
      std::ofstream(scratch.path() / name / file) << "mine";
    };
    const auto save = [&](const std::string& name, bool overwrite) {
      save_checkpoint(scratch.path() / name, training_state(1), {}, {.step = 1}, {.overwrite = overwrite});
    };
    failpoint::configure(failpoints);
    put("data", "manifest.json");
    EXPECT_THAT(message_of<CheckpointError>([&] { save("data", true); }), HasSubstr("is no checkpoint"));
    // Names that this library gives to what it moves away.
    put("a.replaced", "manifest.json");
    put("b.replaced", "text");
    fs::create_directory(scratch.path() / "c.replaced");
    save("d.replaced", false);
    for (const char* name : {"a", "b", "c", "d"}) {
      save(name, false);
      EXPECT_TRUE(fs::exists(scratch.path() / (std::string(name) + ".replaced"))) << name;
    }
    for (const char* name : {"a", "b", "c"}) {
      if (*failpoints == '\0') {
        save(name, true);
      } else {
        EXPECT_THAT(message_of<CheckpointError>([&] { save(name, true); }), HasSubstr("is in the way of"));
      }
    }
    save("d", true);
    failpoint::configure("");
    EXPECT_THAT(scratch.entries(),
                ElementsAre("a", "a.replaced", "b", "b.replaced", "c", "c.replaced", "d", "data"));
    EXPECT_TRUE(fs::exists(scratch.path() / "data" / "manifest.json"));
    EXPECT_TRUE(fs::exists(scratch.path() / "b.replaced" / "text"));
  }
}

TEST(CheckpointFailure, AWriterKilledBetweenTwoRenamesLeavesAGoodOne) {
  const Scratch scratch;
  const auto save = [&](int64_t step, double seed) {
    CheckpointManager manager({.directory = scratch.path(), .keep_last = 1, .async = false});
    manager.save_state(training_state(seed), {}, {.step = step});
  };
  const auto kill_between = [&](double seed) {
    return run_ranks_collect(1,
                             [&](int) {
                               failpoint::configure(std::string(kNoFlags) + ";checkpoint.moved=kill(9)");
                               save(1, seed);
                             },
                             {.environment = scratch.environment()});
  };
  if (!Scratch::in_rank()) save(1, 1);
  auto outcomes = kill_between(2);
  if (!Scratch::in_rank()) {
    ASSERT_EQ(outcomes[0].signal, SIGKILL) << outcomes[0].output;
    const auto found = find_latest_checkpoint(scratch.path());
    ASSERT_TRUE(found);
    EXPECT_EQ(found->directory.filename(), "step-00000001.replaced");
    EXPECT_TRUE(same(load_checkpoint(found->directory).state, training_state(1)));
    // Saved again, it is of no use any more.
    save(1, 3);
    EXPECT_THAT(scratch.entries(), ElementsAre("step-00000001"));
    EXPECT_TRUE(same(load_checkpoint(scratch.path() / "step-00000001").state, training_state(3)));
  }
  outcomes = kill_between(4);
  if (Scratch::in_rank()) return;
  ASSERT_EQ(outcomes[0].signal, SIGKILL) << outcomes[0].output;
  // Or it goes when enough newer ones are there.
  save(2, 5);
  EXPECT_THAT(scratch.entries(), ElementsAre("step-00000002"));
}

/// A mount namespace of this process's own; false where that is not allowed.
bool own_mounts() {
  return ::unshare(CLONE_NEWNS) == 0 && ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
}

TEST(CheckpointFailure, AFullDisk) {
  if (::geteuid() != 0) GTEST_SKIP() << "mounting a small tmpfs needs root";
  const Scratch scratch;
  run_ranks(1,
            [&](int) {
              if (!own_mounts() || ::mount("tmpfs", scratch.path().c_str(), "tmpfs", 0, "size=256k") != 0) {
                std::cerr << "cannot mount here: " << std::strerror(errno) << "\n";
                return;
              }
              save_checkpoint(scratch.path() / "good", training_state(1), {}, {.step = 1});
              for (const bool async : {false, true}) {
                CheckpointManager manager({.directory = scratch.path(), .async = async});
                const auto text = message_of<CheckpointError>([&] {
                  manager.save_state(training_state(2, 50'000), {}, {.step = 2});
                  manager.wait();
                });
                EXPECT_THAT(text, HasSubstr("No space left on device"));
                EXPECT_THAT(text, HasSubstr("model.safetensors"));
                EXPECT_THAT(scratch.entries(), ElementsAre("good"));
                EXPECT_EQ(find_latest_checkpoint(scratch.path())->step, 1);
                // Where there is space again, it goes on.
                manager.save_state(training_state(2), {}, {.step = 3});
                manager.wait();
                EXPECT_EQ(find_latest_checkpoint(scratch.path())->step, 3);
                fs::remove_all(scratch.path() / "step-00000003");
              }
              // A few bytes are left: the files get in, the manifest or a part of it does not.
              for (int64_t left = 64 << 10; left > 0; left -= 4096) {
                std::ofstream filler(scratch.path() / "filler", std::ios::trunc);
                const auto space = static_cast<int64_t>(fs::space(scratch.path()).available);
                filler << std::string(static_cast<size_t>(std::max<int64_t>(space - left, 0)), 'x')
                       << std::flush;
                try {
                  save_checkpoint(scratch.path() / "a", training_state(2), {}, {.step = 4});
                  fs::remove_all(scratch.path() / "a");
                } catch (const CheckpointError& error) {
                  EXPECT_THAT(error.what(), HasSubstr("No space left on device"));
                  EXPECT_THAT(scratch.entries(), ElementsAre("filler", "good"));
                }
                EXPECT_EQ(find_latest_checkpoint(scratch.path())->step, 1);
              }
            },
            {.environment = scratch.environment()});
}

TEST(CheckpointFailure, AReadOnlyDirectory) {
  const Scratch scratch;
  if (!Scratch::in_rank()) save_checkpoint(scratch.path() / "good", training_state(1), {}, {.step = 1});
  run_ranks(1,
            [&](int) {
              const char* path = scratch.path().c_str();
              if (::geteuid() != 0) {
                ASSERT_EQ(::chmod(path, 0500), 0);
              } else if (!own_mounts() || ::mount(path, path, nullptr, MS_BIND, nullptr) != 0 ||
                         ::mount(nullptr, path, nullptr, MS_REMOUNT | MS_BIND | MS_RDONLY, nullptr) != 0) {
                std::cerr << "cannot mount here: " << std::strerror(errno) << "\n";
                return;
              }
              const auto text = message_of<CheckpointError>(
                  [&] { save_checkpoint(scratch.path() / "a", training_state(2), {}, {.step = 2}); });
              EXPECT_THAT(text, HasSubstr("cannot create " + scratch.path().string()));
              EXPECT_THAT(text, AnyOf(HasSubstr("Read-only file system"), HasSubstr("Permission denied")));
              EXPECT_EQ(find_latest_checkpoint(scratch.path())->step, 1);
              EXPECT_EQ(::chmod(path, 0700), ::geteuid() == 0 ? -1 : 0);
            },
            {.environment = scratch.environment()});
}

/// A good checkpoint of step 1 and one of step 2 to damage; all that loading one needs.
class Damage : public ::testing::Test {
 protected:
  void SetUp() override {
    save_checkpoint(scratch_.path() / "1", training_state(1), {}, {.step = 1}, {.fsync = false});
    save_checkpoint(directory_, state_, state_, {.step = 2, .metrics = {{"loss", 0.5}}}, {.fsync = false});
    for (const auto& name : Scratch::entries_of(directory_)) {
      files_.emplace_back(directory_ / name, checkpoint::internal::read_file(directory_ / name, 1 << 20));
      bytes_ += files_.back().second.size();
    }
  }

  /// The file in which the n-th of all bytes is, and where in it.
  std::pair<size_t, size_t> place_of(size_t n) const {
    size_t i = 0;
    for (; n >= files_[i].second.size(); ++i) n -= files_[i].second.size();
    return {i, n};
  }

  static void write(const fs::path& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
  }

  /// The damage is found, and said to be in the file; the one before loads.
  void expect_found(const fs::path& file) {
    const auto problems = verify_checkpoint(directory_);
    ASSERT_FALSE(problems.empty()) << file;
    EXPECT_THAT(problems, Contains(HasSubstr(file.string())));
    EXPECT_THAT(message_of<CheckpointError>([&] { load_checkpoint(directory_); }), HasSubstr(file.string()));
  }

  Scratch scratch_;
  const fs::path directory_ = scratch_.path() / "2";
  const StateDict state_ = training_state(2, 100);
  std::vector<std::pair<fs::path, std::string>> files_;
  size_t bytes_ = 0;
  std::mt19937 random_{20240607};
};

TEST_F(Damage, AFlippedBitIsAlwaysFound) {
  for (int i = 0; i < 1000; ++i) {
    const auto [index, at] = place_of(random_() % bytes_);
    const auto& [path, bytes] = files_[index];
    std::string damaged = bytes;
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << (random_() % 8)));
    write(path, damaged);
    expect_found(path);
    if (i % 50 == 0) {
      EXPECT_EQ(find_latest_checkpoint(scratch_.path())->step, 1);
    }
    // Without verification it may load, or be refused; it must not end the process.
    try {
      load_checkpoint(directory_, {.verify = false});
    } catch (const CheckpointError&) {
    }
    write(path, bytes);
  }
  EXPECT_TRUE(verify_checkpoint(directory_).empty());
}

TEST_F(Damage, ATruncatedFileIsAlwaysFound) {
  for (int i = 0; i < 1000; ++i) {
    const auto [index, at] = place_of(random_() % bytes_);
    const auto& [path, bytes] = files_[index];
    write(path, bytes.substr(0, at));
    expect_found(path);
    if (i % 50 == 0) {
      EXPECT_EQ(find_latest_checkpoint(scratch_.path())->step, 1);
    }
    EXPECT_THROW(load_checkpoint(directory_, {.verify = false}), CheckpointError);
    write(path, bytes);
  }
  EXPECT_TRUE(verify_checkpoint(directory_).empty());
}

TEST_F(Damage, TheDamagedTensorIsNamed) {
  const fs::path path = directory_ / "model.safetensors";
  std::string bytes = checkpoint::internal::read_file(path, 1 << 20);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);  // the smallest elements come last: the weights
  write(path, bytes);
  EXPECT_THAT(
      verify_checkpoint(directory_),
      ElementsAre(path.string() + " is damaged: its checksum is wrong",
                  path.string() + ": tensor 'fc1.weight' of model is damaged: its checksum is wrong"));
  write(path, bytes.substr(0, bytes.size() - 1));
  EXPECT_THAT(verify_checkpoint(directory_), Contains(HasSubstr("'fc1.weight' of model is cut off")));
  fs::remove(path);
  EXPECT_THAT(verify_checkpoint(directory_), ElementsAre(HasSubstr("cannot open " + path.string())));
  EXPECT_THAT(verify_checkpoint(directory_, false), ElementsAre(HasSubstr("cannot open " + path.string())));
}

TEST_F(Damage, FilesThatAreNoneOfOurs) {
  const fs::path manifest = directory_ / "manifest.json";
  const auto refused = [&](const std::string& text) {
    write(manifest, text);
    EXPECT_EQ(find_latest_checkpoint(scratch_.path())->step, 1);
    return message_of<CheckpointError>([&] { load_checkpoint(directory_); });
  };
  EXPECT_THAT(refused(""), HasSubstr("does not end with its checksum"));
  EXPECT_THAT(refused("{}"), HasSubstr("does not end with its checksum"));
  fs::remove(manifest);
  fs::create_directory(manifest);
  EXPECT_THAT(message_of<CheckpointError>([&] { load_checkpoint(directory_); }),
              HasSubstr("no regular file"));
  EXPECT_THAT(message_of<CheckpointError>([&] { load_checkpoint(scratch_.path() / "none"); }),
              HasSubstr("No such file"));
  fs::remove(manifest);
  ASSERT_EQ(::mkfifo(manifest.c_str(), 0600), 0);
  EXPECT_THAT(message_of<CheckpointError>([&] { load_checkpoint(directory_); }),
              HasSubstr("no regular file"));
}

}  // namespace
}  // namespace lockstep::checkpoint_failure_test
