// What a CheckpointManager goes on from: which checkpoint is found, and what is said where none can be taken.
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <string>
#include <sys/stat.h>
#include <thread>
#include <utility>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/checkpoint/checkpoint_manager.h>
#include <lockstep/checkpoint/internal/checksum.h>
#include <lockstep/checkpoint/internal/file_io.h>
#include <lockstep/checkpoint/testing/scratch.h>
#include <lockstep/checkpoint/testing/states.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::checkpoint_restore_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::run_ranks;
using testing::run_ranks_collect;
using testing::Scratch;
using testing::StateHolder;
using testing::training_state;

TEST(CheckpointManager, RanksRestoreTheSameThoughOnlyOneSeesDamage) {
  const Scratch scratch;
  run_ranks(2,
            [&](int rank) {
              const auto group = init_process_group();
              CheckpointManager manager({.directory = scratch.path(), .async = false});
              StateHolder training;
              EXPECT_FALSE(manager.restore(training));
              for (const int64_t step : {1, 2}) {
                training.own = {{"rng", torch::full({3}, rank)}};
                manager.save(training, {.step = step});
              }
              barrier();
              if (rank == 1)
                std::filesystem::remove(scratch.path() / "step-00000002" / "rank00001.safetensors");
              barrier();
              EXPECT_EQ(manager.restore(training)->step, 1);
              // By itself, for the one that is left.
              if (rank == 1) manager.save_alone(training, {.step = 3, .emergency = "rank 0 is gone"});
              barrier();
              EXPECT_EQ(manager.restore(training)->step, 3);
              EXPECT_EQ(training.own.empty(), rank == 0);
            },
            {.environment = scratch.environment()});
}

/// The folder's checkpoints of steps 1 and 2, the second of which is to be tried first.
void save_two(const std::filesystem::path& folder) {
  CheckpointManager manager({.directory = folder, .async = false});
  StateHolder training;
  for (const int64_t step : {1, 2}) manager.save(training, {.step = step});
}

TEST(CheckpointManager, WhatWasReadInPartIsNotTakenForGood) {
  const Scratch scratch;
  save_two(scratch.path());
  std::ofstream(scratch.path() / "step-00000002" / "model.safetensors", std::ios::in) << "damage";
  CheckpointManager manager({.directory = scratch.path(), .keep_last = 2, .async = false});
  EXPECT_EQ(manager.load_latest({.parts = {"scheduler"}})->info.step, 2);
  StateHolder training;
  manager.save(training, {.step = 3});
  EXPECT_THAT(scratch.entries(), ElementsAre("step-00000001", "step-00000002", "step-00000003"));
}

TEST(CheckpointManager, AReadThatFailsOnceIsTriedAgain) {
  const Scratch scratch;
  save_two(scratch.path());
  CheckpointManager manager({.directory = scratch.path()});
  StateHolder training;
  // EIO, ESTALE; in the listing, in a manifest, in a tensor file.
  for (const char* place : {"look=errno(5)@2", "look=errno(116)@4", "open=errno(116)@1", "open=errno(5)@4",
                            "read=errno(5)@2", "read=errno(116)@6"}) {
    failpoint::configure(std::string("checkpoint.") + place);
    EXPECT_EQ(manager.restore(training)->step, 2) << place;
    failpoint::configure(std::string("checkpoint.") + place);
    EXPECT_EQ(find_latest_checkpoint(scratch.path())->step, 2) << place;
  }
  failpoint::configure("");
}

TEST(CheckpointManager, AReadThatFailsForEverIsAnErrorAndNoDamage) {
  const Scratch scratch;
  save_two(scratch.path());
  StateHolder training;
  CheckpointManager manager(
      {.directory = scratch.path(), .from_scratch_if_all_damaged = true, .async = false});
  for (const auto& [place, reason] : {std::pair{"look=errno(13)", "Permission denied"},
                                      {"open=errno(116)", "Stale file handle"},
                                      {"read=errno(5)", "Input/output error"}}) {
    failpoint::configure(std::string("checkpoint.") + place);
    EXPECT_THAT(message_of<CheckpointIoError>([&] { manager.restore(training); }), HasSubstr(reason));
  }
  EXPECT_THAT(message_of<CheckpointIoError>([&] { find_latest_checkpoint(scratch.path()); }),
              HasSubstr("Input/output error"));
  failpoint::configure("");
  EXPECT_THAT(scratch.entries(), ElementsAre("step-00000001", "step-00000002"));
}

TEST(CheckpointManager, ARankThatCannotReadFailsAll) {
  const Scratch scratch;
  if (!Scratch::in_rank()) save_two(scratch.path());
  run_ranks(2,
            [&](int rank) {
              const auto group = init_process_group();
              CheckpointManager manager({.directory = scratch.path(), .async = false});
              StateHolder training;
              if (rank == 1) failpoint::configure("checkpoint.read=errno(5)");
              EXPECT_THAT(message_of<CheckpointIoError>([&] { manager.restore(training); }),
                          ::testing::AllOf(HasSubstr("rank 1: cannot read"), HasSubstr("step-00000002"),
                                           HasSubstr("Input/output error")));
              failpoint::configure("");
              EXPECT_EQ(manager.restore(training)->step, 2);
            },
            {.environment = scratch.environment()});
}

TEST(CheckpointManager, TrainsFromScratchBesideDamagedOnesOnlyWhenAsked) {
  const Scratch scratch;
  save_two(scratch.path());
  std::ofstream(scratch.path() / "step-00000001" / "model.safetensors", std::ios::in) << "damage";
  std::filesystem::remove(scratch.path() / "step-00000002" / "manifest.json");
  StateHolder training;
  {
    CheckpointManager manager({.directory = scratch.path()});
    const auto text = message_of<CheckpointError>([&] { manager.restore(training); });
    for (const char* part : {"all checkpoints in", "step-00000001/model.safetensors", "step-00000002",
                             "there is no manifest.json", "from_scratch_if_all_damaged"}) {
      EXPECT_THAT(text, HasSubstr(part));
    }
  }
  EXPECT_THAT(message_of<CheckpointError>([&] { find_latest_checkpoint(scratch.path()); }),
              HasSubstr("none_if_all_damaged"));
  EXPECT_FALSE(find_latest_checkpoint(scratch.path(), {.none_if_all_damaged = true}));
  CheckpointManager manager({.directory = scratch.path(), .from_scratch_if_all_damaged = true});
  EXPECT_FALSE(manager.restore(training));
}

void write(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

TEST(CheckpointManager, WhereItMustResumeItSaysWhatIsThereInstead) {
  const Scratch scratch;
  const auto folder = scratch.path() / "run";
  StateHolder training;
  const auto refused = [&] {
    return message_of<CheckpointError>([&] {
      CheckpointManager manager({.directory = folder, .must_resume = true});
      manager.restore(training);
    });
  };
  EXPECT_THAT(refused(), AllOf(HasSubstr("there is no folder " + folder.string()), HasSubstr("must_resume")));
  EXPECT_FALSE(std::filesystem::exists(folder));

  std::filesystem::create_directory(folder);
  EXPECT_THAT(refused(), AllOf(HasSubstr("no checkpoint to go on from in " + folder.string()),
                               HasSubstr("it is empty")));

  std::filesystem::create_directories(folder / ".step-00000001.lockstep-tmp-0123");
  write(folder / "half" / "state.json", "{}");
  write(folder / "notes.txt", "");
  EXPECT_THAT(refused(),
              AllOf(HasSubstr("is one: .step-00000001.lockstep-tmp-0123 (a save that did not finish); half; "
                              "notes.txt. Passed over: "),
                    HasSubstr("half: it is incomplete: there is no manifest.json. Name the folder")));
  for (int i = 0; i < 20; ++i) write(folder / ("other" + std::to_string(i)), "");
  EXPECT_THAT(refused(), HasSubstr("; and 13 more"));

  save_two(folder);
  CheckpointManager manager({.directory = folder, .must_resume = true});
  EXPECT_EQ(manager.restore(training)->step, 2);
  for (const char* name : {"step-00000001", "step-00000002"}) {
    std::filesystem::remove(folder / name / "model.safetensors");
  }
  EXPECT_THAT(refused(), AllOf(HasSubstr("all checkpoints in"), HasSubstr("step-00000001/model.safetensors"),
                               HasSubstr("step-00000002/model.safetensors"),
                               ::testing::Not(HasSubstr("begin at step 0"))));
}

TEST(CheckpointManager, AllRanksLearnThatThereIsNothingToResume) {
  const Scratch scratch;
  run_ranks(2,
            [&](int) {
              const auto group = init_process_group();
              EXPECT_THAT(
                  message_of<CheckpointError>([&] {
                    CheckpointManager manager({.directory = scratch.path() / "missing", .must_resume = true});
                  }),
                  HasSubstr("rank 0: there is no folder"));
              CheckpointManager manager({.directory = scratch.path(), .must_resume = true});
              StateHolder training;
              EXPECT_THAT(message_of<CheckpointError>([&] { manager.restore(training); }),
                          HasSubstr("rank 0: there is no checkpoint to go on from"));
            },
            {.environment = scratch.environment()});
}

TEST(CheckpointManager, DirectoriesOfOthersAreNoCheckpoints) {
  const Scratch scratch;
  write(scratch.path() / "data" / "manifest.json", R"({"format": "something else", "files": []})");
  write(scratch.path() / "page" / "state.json", "{}");
  // Two that can't be looked into: opening a socket fails with ENXIO, root's too.
  std::filesystem::create_directory(scratch.path() / "service");
  ASSERT_EQ(::mknod((scratch.path() / "service" / "manifest.json").c_str(), S_IFSOCK | 0600, 0), 0);
  std::filesystem::create_directory(scratch.path() / "private");
  ASSERT_EQ(::chmod((scratch.path() / "private").c_str(), 0), 0);
  {
    CheckpointManager manager({.directory = scratch.path(), .keep_last = 1, .async = false});
    StateHolder training;
    EXPECT_FALSE(manager.restore(training)) << "from scratch";
    for (const int64_t step : {1, 2}) manager.save(training, {.step = step});
    EXPECT_THAT(scratch.entries(), ElementsAre("data", "page", "private", "service", "step-00000002"));
    EXPECT_EQ(manager.restore(training)->step, 2);
  }
  ASSERT_EQ(::chmod((scratch.path() / "private").c_str(), 0700), 0);
}

TEST(CheckpointManager, AManifestThatNamesOurFormatIsACheckpoints) {
  const Scratch scratch;
  const auto path = scratch.path() / "best" / "manifest.json";
  save_checkpoint(scratch.path() / "best", training_state(1), {}, {.step = 1});
  const std::string text = checkpoint::internal::read_file(path, 1 << 20);
  write(path, text.substr(0, text.size() / 2));
  EXPECT_THAT(message_of<CheckpointError>([&] { find_latest_checkpoint(scratch.path()); }),
              ::testing::AllOf(HasSubstr("all checkpoints in"), HasSubstr("best/manifest.json is damaged")));
  // A later format, as far as it is known by now.
  std::string body = text.substr(0, text.find(",\n\"checksum\""));
  const std::string version = "\"version\": 2";
  body.replace(body.find(version), version.size(), "\"version\": 3");
  write(path, body + ",\n\"checksum\": \"" + checkpoint::internal::checksum_of(body) + "\"\n}\n");
  EXPECT_THAT(message_of<CheckpointError>([&] { find_latest_checkpoint(scratch.path()); }),
              HasSubstr("best/manifest.json was written by a newer version of Lockstep: its format is 3"));
  // That before this one.
  body.replace(body.find("\"version\": 3"), version.size(), "\"version\": 1");
  write(path, body + ",\n\"checksum\": \"" + checkpoint::internal::checksum_of(body) + "\"\n}\n");
  EXPECT_EQ(load_checkpoint(scratch.path() / "best").info.step, 1);
}

TEST(CheckpointManager, TheLatestIsFoundBesideAJobThatRemovesOldOnes) {
  const Scratch scratch;
  std::atomic<bool> done = false;
  std::thread job([&] {
    CheckpointManager manager({.directory = scratch.path(), .keep_last = 1, .async = false, .fsync = false});
    StateHolder training;
    for (int64_t step = 1; step <= 200; ++step) manager.save(training, {.step = step});
    done = true;
  });
  // With one checkpoint at a time most listings are out of date when they are read.
  while (!done) EXPECT_NO_THROW(find_latest_checkpoint(scratch.path()));
  job.join();
  EXPECT_EQ(find_latest_checkpoint(scratch.path())->step, 200);
}

TEST(CheckpointManager, OneRankSaysThatItTrainsFromScratch) {
  const Scratch scratch;
  if (!Scratch::in_rank()) {
    save_two(scratch.path());
    for (const char* name : {"step-00000001", "step-00000002"}) {
      std::filesystem::remove(scratch.path() / name / "model.safetensors");
    }
  }
  const auto outcomes = run_ranks_collect(
      2,
      [&](int) {
        const auto group = init_process_group();
        CheckpointManager manager(
            {.directory = scratch.path(), .from_scratch_if_all_damaged = true, .async = false});
        StateHolder training;
        EXPECT_FALSE(manager.restore(training));
      },
      {.environment = scratch.environment()});
  if (Scratch::in_rank()) return;
  for (const auto& outcome : outcomes) {
    EXPECT_EQ(outcome.exit_status.value_or(-1), 0) << outcome.output;
    const auto said = HasSubstr("training from scratch");
    if (outcome.rank == 0) {
      EXPECT_THAT(outcome.output, said);
    } else {
      EXPECT_THAT(outcome.output, ::testing::Not(said));
    }
  }
}

TEST(CheckpointManager, OfOneStepTheMoreCompleteIsRestored) {
  const Scratch scratch;
  run_ranks(2,
            [&](int rank) {
              const auto group = init_process_group();
              CheckpointManager manager({.directory = scratch.path(), .async = false});
              StateHolder training;
              training.own = {{"rank", rank}};
              manager.save(training, {.step = 1});
              if (rank == 1) {
                EXPECT_FALSE(manager.save_alone(training, {.step = 1, .emergency = "rank 0 is gone"}))
                    << "there is a complete one";
                // By one that does not know of it: saved later, and it lacks rank 0's own state.
                save_checkpoint(scratch.path() / "step-00000001-emergency", training.state, training.own,
                                {.step = 1, .emergency = "rank 0 is gone"}, {.alone = true});
              }
              barrier();
              const auto info = manager.restore(training);
              EXPECT_EQ(info->emergency, "");
              EXPECT_EQ(training.own.at("rank").toInt(), rank);
            },
            {.environment = scratch.environment()});
  EXPECT_THAT(scratch.entries(), ElementsAre("step-00000001", "step-00000001-emergency"));
}

}  // namespace
}  // namespace lockstep::checkpoint_restore_test
