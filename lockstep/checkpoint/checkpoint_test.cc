#include <bit>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <limits>
#include <sched.h>
#include <string>
#include <sys/mount.h>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/inspect_checkpoint.h>
#include <lockstep/checkpoint/internal/manifest.h>
#include <lockstep/checkpoint/safetensors.h>
#include <lockstep/checkpoint/testing/scratch.h>
#include <lockstep/checkpoint/testing/states.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>

namespace lockstep::checkpoint_test {
namespace {

using ::testing::AllOf;
using testing::dict_of;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::model_state;
using testing::run_ranks;
using testing::same;
using testing::Scratch;
using testing::training_state;

/// One of everything that a state may hold.
StateDict everything() {
  using Items = std::vector<std::pair<std::string, c10::IValue>>;
  const double odd_nan = std::bit_cast<double>(uint64_t{0xfff8000000000123});
  std::vector<double> numbers = {0.0,
                                 -0.0,
                                 1.0,
                                 0.1,
                                 1e300,
                                 5e-324,
                                 1.0 / 3,
                                 123456789012345680.0,
                                 odd_nan,
                                 std::numeric_limits<double>::quiet_NaN(),
                                 std::numeric_limits<double>::infinity(),
                                 -std::numeric_limits<double>::infinity(),
                                 std::numeric_limits<double>::max()};
  return {
      {"none", c10::IValue()},
      {"bools", to_object(std::vector<bool>{true, false})},
      {"integers", to_object(std::vector<int64_t>{0, -1, INT64_MIN, INT64_MAX})},
      {"numbers", to_object(numbers)},
      {"texts",
       to_object(std::vector<std::string>{"", "ünï \" \\ \n \x01", "\xff\xfe", std::string("a\0b", 3)})},
      {"tuple", to_object(std::tuple<int64_t, std::string, std::tuple<>>{1, "two", {}})},
      {"devices", to_object(std::vector<c10::Device>{c10::Device("cpu"), c10::Device("cuda:1")})},
      {"complex", c10::complex<double>(-0.0, odd_nan)},
      {"by number", dict_of<int64_t>({{3, "three"}, {-1, torch::arange(3)}})},
      {"by truth", dict_of<bool>({{true, 1}, {false, 0}})},
      {"by float", dict_of<double>({{0.5, 1}, {std::numeric_limits<double>::infinity(), 2}})},
      {"odd keys", to_object(StateDict{{"$tensor", "x"}, {"\xff", torch::ones({1})}, {"", 1}})},
      {"empty", to_object(std::vector<c10::IValue>{c10::IValue(serialization::make_object_dict()),
                                                   c10::IValue(serialization::make_object_list(0))})},
      {"clash", to_object(Items{{"unused", 1}})},
      {"dots", to_object(StateDict{{"a.b", torch::zeros({1})},
                                   {"a", to_object(StateDict{{"b", torch::ones({2})}})}})},
      {"undefined", at::Tensor()},
      {"a tensor alone", torch::full({2, 2}, 7, at::kHalf)},
      {"strange/../name", to_object(StateDict{{"__metadata__", torch::zeros({0, 3})}})},
      {"views", to_object(std::vector<at::Tensor>{torch::rand({3, 4}).t(), torch::rand({4}).expand({2, 4})})},
  };
}

TEST(Checkpoint, HoldsEverything) {
  const Scratch scratch;
  const StateDict state = everything();
  const auto directory = scratch.path() / "new" / "step-1";
  const auto info = save_checkpoint(directory, state, state,
                                    {.step = 7,
                                     .epoch = 2,
                                     .metrics = {{"loss", 0.25}, {"nan", NAN}, {"inf", -INFINITY}},
                                     .emergency = "why\n\"so\""});
  EXPECT_EQ(info.directory, directory);
  EXPECT_EQ(info.world_size, 1);
  EXPECT_TRUE(verify_checkpoint(directory).empty());
  for (const bool verify : {true, false}) {
    const LoadedCheckpoint loaded = load_checkpoint(directory, {.verify = verify});
    for (const auto& [key, value] : state) {
      EXPECT_TRUE(same(value, loaded.state.at(key))) << key;
      EXPECT_TRUE(same(value, loaded.rank_state.at(key))) << key;
    }
    EXPECT_EQ(loaded.info.step, 7);
    EXPECT_EQ(loaded.info.epoch, 2);
    EXPECT_EQ(loaded.info.emergency, "why\n\"so\"");
    EXPECT_EQ(loaded.info.metrics.at("loss"), 0.25);
    EXPECT_TRUE(std::isnan(loaded.info.metrics.at("nan")));
    EXPECT_EQ(loaded.info.metrics.at("inf"), -INFINITY);
    EXPECT_EQ(loaded.info.saved_at, info.saved_at);
  }
  EXPECT_TRUE(load_checkpoint(directory, {.world_size = 2}).rank_state.empty());
  EXPECT_TRUE(load_checkpoint(directory, {.rank = 1}).rank_state.empty());
}

TEST(Checkpoint, ModelsAreFilesWithPlainNames) {
  const Scratch scratch;
  const StateDict model = model_state(2);
  save_checkpoint(scratch.path() / "a", training_state(2), {{"data", torch::arange(3)}}, {});
  EXPECT_THAT(scratch.entries_of(scratch.path() / "a"),
              ElementsAre("manifest.json", "model.safetensors", "rank00000.json", "rank00000.safetensors",
                          "state.json"));
  const auto tensors = safetensors::load_file(scratch.path() / "a" / "model.safetensors");
  ASSERT_EQ(tensors.size(), model.size());
  for (const auto& [name, tensor] : model) EXPECT_TRUE(same(tensor, tensors.at(name))) << name;
}

TEST(Checkpoint, RefusesWhatItCannotHold) {
  const Scratch scratch;
  const auto refused = [&](const StateDict& state) {
    const auto text =
        message_of<c10::ValueError>([&] { save_checkpoint(scratch.path() / "a", state, {}, {}); });
    EXPECT_TRUE(scratch.entries().empty());
    return text;
  };
  EXPECT_THAT(refused({{"model", to_object(StateDict{{"w", torch::ones({2}).to_sparse()}})}}),
              HasSubstr("state['model']['w'] has the layout Sparse"));
  EXPECT_THAT(refused({{"a", to_object(std::vector<at::Tensor>{torch::ones({1}, at::kComplexDouble)})}}),
              HasSubstr("state['a'][0] has the dtype ComplexDouble"));
  EXPECT_THAT(refused({{"$a", 1}}), HasSubstr("'$a'"));
  EXPECT_THAT(refused({{"", torch::ones({1})}}), HasSubstr("1 to 200 characters"));
  EXPECT_THAT(refused({{"\xff", 1}}), HasSubstr("UTF-8"));
  EXPECT_THAT(refused({{"rank00000", torch::ones({1})}}), HasSubstr("can't be called 'rank00000'"));
  c10::IValue deep = 1;
  for (int i = 0; i < 250; ++i) deep = to_object(std::vector<c10::IValue>{deep});
  EXPECT_THAT(refused({{"a", deep}}), HasSubstr("nested deeper than 200"));
}

TEST(Checkpoint, ReplacesOnlyWhenTold) {
  const Scratch scratch;
  save_checkpoint(scratch.path() / "a", training_state(1), {}, {.step = 1});
  EXPECT_THAT(
      message_of<CheckpointError>([&] { save_checkpoint(scratch.path() / "a", training_state(2), {}, {}); }),
      HasSubstr("exists already"));
  EXPECT_EQ(load_checkpoint(scratch.path() / "a").info.step, 1);
  save_checkpoint(scratch.path() / "a/", training_state(2), {}, {.step = 2},
                  {.overwrite = true, .fsync = false});
  EXPECT_EQ(load_checkpoint(scratch.path() / "a").info.step, 2);
  EXPECT_THAT(scratch.entries(), ElementsAre("a"));
}

TEST(Checkpoint, OnlyTheAskedForPartsAreRead) {
  const Scratch scratch;
  const auto directory = scratch.path() / "a";
  StateDict state = training_state(1);
  state["average"] = to_object(model_state(2));
  state["optimizer"] = to_object(model_state(3));
  save_checkpoint(directory, state, {{"place", torch::arange(3)}}, {.step = 5});
  for (const char* own : {"rank00000.json", "rank00000.safetensors"})
    std::filesystem::remove(directory / own);
  for (unsigned subset = 1; subset < 1U << state.size(); ++subset) {
    LoadOptions options;
    StateDict expected;
    unsigned bit = 0;
    std::filesystem::create_directory(scratch.path() / "elsewhere");
    for (const auto& [part, value] : state) {
      const std::string file = part + ".safetensors";
      if (((subset >> bit++) & 1U) != 0) {
        options.parts.push_back(part);
        expected.emplace(part, value);
      } else if (std::filesystem::exists(directory / file)) {
        std::filesystem::rename(directory / file, scratch.path() / "elsewhere" / file);
      }
    }
    const LoadedCheckpoint loaded = load_checkpoint(directory, options);
    EXPECT_TRUE(same(loaded.state, expected)) << subset;
    EXPECT_TRUE(loaded.rank_state.empty());
    EXPECT_EQ(loaded.info.step, 5);
    for (const auto& file : scratch.entries_of(scratch.path() / "elsewhere")) {
      std::filesystem::rename(scratch.path() / "elsewhere" / file, directory / file);
    }
  }
  EXPECT_THAT(message_of<c10::ValueError>([&] {
                load_checkpoint(directory, {.parts = {"model", "modle"}});
              }),
              HasSubstr("has no part 'modle'; it has average, model, optimizer, scheduler"));
  std::ofstream(directory / "model.safetensors", std::ios::in) << "damage";
  EXPECT_THAT(message_of<CheckpointError>([&] { load_checkpoint(directory, {.parts = {"model"}}); }),
              HasSubstr("model.safetensors"));
  EXPECT_EQ(load_checkpoint(directory, {.parts = {"average"}}).state.size(), 1U);
}

TEST(Checkpoint, TheLatestGoodOneIsFound) {
  const Scratch scratch;
  EXPECT_FALSE(find_latest_checkpoint(scratch.path() / "none"));
  EXPECT_FALSE(find_latest_checkpoint(scratch.path()));
  for (const int64_t step : {900, 1000, 99, 1001, 1002}) {
    save_checkpoint(scratch.path() / ("step-" + std::to_string(step)), training_state(1), {},
                    {.step = step, .emergency = step == 1000 ? "a signal" : ""});
  }
  std::filesystem::create_directory(scratch.path() / "step-2000");
  std::filesystem::remove(scratch.path() / "step-1002" / "model.safetensors");
  std::ofstream(scratch.path() / "step-1001" / "model.safetensors", std::ios::in) << "damage";
  EXPECT_EQ(find_latest_checkpoint(scratch.path())->step, 1000);
  EXPECT_EQ(find_latest_checkpoint(scratch.path())->emergency, "a signal");
  EXPECT_EQ(find_latest_checkpoint(scratch.path(), {.verify = false})->step, 1001);
  std::vector<int64_t> steps;
  for (const auto& info : list_checkpoints(scratch.path())) steps.push_back(info.step);
  EXPECT_THAT(steps, ElementsAre(99, 900, 1000, 1001, 1002));
  std::filesystem::remove(scratch.path() / "step-1000" / "manifest.json");
  EXPECT_EQ(find_latest_checkpoint(scratch.path())->step, 900);
}

/// What rank `rank` of `world` has: the same model on all ranks, and its part of an optimizer's state.
StateDict state_of(int rank, int world) {
  StateDict state = training_state(3);
  // Large enough to be assigned.
  auto model = state.at("model").toGenericDict();
  model.insert("wide.weight", torch::full({128, 128}, 0.5));
  model.insert("wide.bias", torch::full({1 << 14}, 0.25));
  auto moments = serialization::make_object_dict();
  for (int64_t i = 0; i < 6; ++i) {
    if (i % world == rank)
      moments.insert(i, to_object(StateDict{{"exp_avg", torch::full({2}, i)}, {"step", i}}));
  }
  state["optimizer"] = to_object(StateDict{{"state", c10::IValue(moments)}, {"lr", 0.1}});
  return state;
}

TEST(Checkpoint, RanksSaveTogether) {
  const Scratch scratch;
  for (const int world : {1, 2, 3, 4}) {
    run_ranks(world,
              [&](int rank) {
                const auto group = init_process_group();
                for (const bool sharded : {false, true}) {
                  const auto directory =
                      scratch.path() / (std::to_string(world) + (sharded ? "-sharded" : ""));
                  const StateDict own = {{"rank", rank}, {"rng", torch::full({3}, rank)}};
                  const auto info = save_checkpoint(directory, state_of(rank, world), own, {.step = 1},
                                                    {.sharded = sharded, .fsync = false});
                  EXPECT_EQ(info.world_size, world);
                  EXPECT_EQ(info.directory, directory);
                  const auto loaded = load_checkpoint(directory);
                  EXPECT_TRUE(same(loaded.state, state_of(0, 1)));
                  EXPECT_TRUE(same(loaded.rank_state, own));
                  EXPECT_EQ(loaded.info.saved_at, info.saved_at);
                }
                EXPECT_EQ(find_latest_checkpoint(scratch.path(), {.group = default_group()})->step, 1);
              },
              {.environment = scratch.environment()});
    for (const char* kind : {"", "-sharded"}) {
      const auto directory = scratch.path() / (std::to_string(world) + kind);
      EXPECT_TRUE(verify_checkpoint(directory).empty());
      const auto loaded = load_checkpoint(directory);
      EXPECT_TRUE(same(loaded.state, state_of(0, 1)));
      EXPECT_EQ(loaded.rank_state.empty(), world != 1);
      EXPECT_EQ(
          load_checkpoint(directory, {.rank = world - 1, .world_size = world}).rank_state.at("rank").toInt(),
          world - 1);
    }
  }
  EXPECT_THAT(scratch.entries_of(scratch.path() / "2-sharded"),
              ElementsAre("manifest.json", "model-00001-of-00002.safetensors",
                          "model-00002-of-00002.safetensors", "optimizer-00001-of-00002.safetensors",
                          "optimizer-00002-of-00002.safetensors", "rank00000.json", "rank00000.safetensors",
                          "rank00001.json", "rank00001.safetensors", "state.json"));
}

TEST(Checkpoint, WhatGoesWrongOnOneRankIsThrownOnAll) {
  const Scratch scratch;
  run_ranks(
      3,
      [&](int rank) {
        const auto group = init_process_group();
        const auto directory = scratch.path() / "a";
        StateDict bad = training_state(1);
        if (rank == 1) bad["bad"] = torch::ones({1}, at::kComplexDouble);
        EXPECT_THAT(message_of<c10::ValueError>([&] { save_checkpoint(directory, bad, {}, {}); }),
                    HasSubstr("rank 1: state['bad'] has the dtype"));
        for (const char* place : {"within_file", "before_sync", "file_written", "files_written"}) {
          if (rank == 2)
            failpoint::configure(std::string("checkpoint.") + place + "=error(the disk is gone)");
          const auto text = message_of<CheckpointError>([&] {
            save_checkpoint(directory, training_state(1), {{"own", torch::ones({2})}}, {}, {.sharded = true});
          });
          failpoint::configure("");
          EXPECT_THAT(text, HasSubstr("rank 2: "));
          EXPECT_THAT(text, HasSubstr("the disk is gone"));
        }
        for (const char* place :
             {"plan", "directory_made", "before_manifest", "within_manifest", "before_rename"}) {
          if (rank == 0)
            failpoint::configure(std::string("checkpoint.") + place + "=error(the disk is gone)");
          EXPECT_THAT(
              message_of<CheckpointError>([&] { save_checkpoint(directory, training_state(1), {}, {}); }),
              HasSubstr("rank 0: "));
          failpoint::configure("");
        }
        // Nothing is broken, and nothing left.
        if (rank == 0) {
          EXPECT_TRUE(scratch.entries().empty()) << scratch.entries()[0];
        }
        save_checkpoint(directory, training_state(1), {}, {.step = 4});
        EXPECT_EQ(find_latest_checkpoint(scratch.path(), {.group = default_group()})->step, 4);
      },
      {.environment = scratch.environment()});
}

TEST(Checkpoint, PartsOfTensorsKeepTheirPlacesAndAreEachRanksOwn) {
  const Scratch scratch;
  run_ranks(
      3,
      [&](int rank) {
        const auto group = init_process_group();
        const auto rows = torch::chunk(torch::arange(21).view({7, 3}), 3)[rank].contiguous();
        const auto part_of = [&](const torch::Tensor& local, int64_t row, const std::vector<int64_t>& sizes) {
          return to_object(StateDict{{"local", local},
                                     {"row", row},
                                     {"global_sizes", to_object(sizes)},
                                     {"mesh_dim", std::string("shard")}});
        };
        const auto state = StateDict{{"weight", part_of(rows, 3 * rank, {7, 3})},
                                     {"number", part_of(torch::ones({rank == 0 ? 1 : 0}), 0, {})},
                                     {"whole", torch::ones({2})}};
        EXPECT_THAT(message_of<c10::ValueError>([&] {
                      save_checkpoint(scratch.path() / "shared", {{"model", to_object(state)}}, {}, {});
                    }),
                    ::testing::AllOf(
                        HasSubstr("rank 0: state: tensor 'weight.local' of model is a part of sizes [3, 3]"),
                        HasSubstr("pass sharded states as rank_state")));
        save_checkpoint(scratch.path() / "own", {}, {{"model", to_object(state)}}, {});
      },
      {.environment = scratch.environment()});
  const auto manifest = checkpoint::internal::read_manifest(scratch.path() / "own");
  ASSERT_EQ(manifest.tensors.size(), 9U);
  for (const auto& tensor : manifest.tensors) {
    const int64_t rank = tensor.part.back() - '0';
    if (tensor.name == "model.whole") {
      EXPECT_EQ(tensor.part_of, std::nullopt);
    } else if (tensor.name == "model.number.local") {
      EXPECT_EQ(tensor.part_of,
                (serialization::TensorPart{.global_shape = {}, .offsets = {}, .mesh_dim = "shard"}));
    } else {
      EXPECT_EQ(tensor.name, "model.weight.local");
      EXPECT_EQ(tensor.part_of, (serialization::TensorPart{
                                    .global_shape = {7, 3}, .offsets = {3 * rank, 0}, .mesh_dim = "shard"}));
    }
  }
  EXPECT_TRUE(verify_checkpoint(scratch.path() / "own").empty());
  EXPECT_THAT(inspect_checkpoint(scratch.path() / "own").text,
              HasSubstr("[1, 3] at [6,0] of [7,3] along shard"));
}

TEST(Checkpoint, AnObjectThatOnlyLooksLikeAPartIsAnOrdinaryOne) {
  const Scratch scratch;
  run_ranks(1,
            [&](int) {
              const auto group = init_process_group();
              StateDict state;
              for (const auto& [name, row, rows] : {std::tuple{"beyond", 5, 3}, std::tuple{"negative", -1, 3},
                                                    std::tuple{"of other dimensions", 0, 8}}) {
                std::vector<int64_t> sizes{rows, 2};
                if (rows == 8) sizes.push_back(1);
                state.emplace(name, to_object(StateDict{{"local", torch::ones({2, 2})},
                                                        {"row", int64_t{row}},
                                                        {"global_sizes", to_object(sizes)}}));
              }
              save_checkpoint(scratch.path() / "one", {{"model", to_object(state)}}, {}, {});
              EXPECT_EQ(load_checkpoint(scratch.path() / "one").state.size(), 1U);
              for (const auto& tensor : checkpoint::internal::read_manifest(scratch.path() / "one").tensors) {
                EXPECT_EQ(tensor.part_of, std::nullopt) << tensor.name;
              }
            },
            {.environment = scratch.environment()});
}

/// For this thread another file system stands there, as on a host with disks of its own. False if that is not allowed.
bool hide(const std::filesystem::path& folder) {
  return ::unshare(CLONE_NEWNS) == 0 && ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         ::mount("none", folder.c_str(), "tmpfs", 0, nullptr) == 0;
}

TEST(Checkpoint, ARankThatDoesNotSeeTheFolderSaysSo) {
  const Scratch scratch;
  run_ranks(2,
            [&](int rank) {
              const auto group = init_process_group();
              torch::Tensor hidden = torch::ones({1}).mul(rank == 0 || hide(scratch.path()) ? 1 : 0);
              all_reduce(hidden, ReduceOp::MIN);
              if (hidden.item<float>() == 0) return;  // that takes root
              EXPECT_THAT(
                  message_of<CheckpointError>([&] {
                    save_checkpoint(scratch.path() / "a", training_state(1), {{"own", torch::ones({2})}}, {});
                  }),
                  AllOf(HasSubstr("rank 1: cannot create"), HasSubstr("rank 0 has made this folder"),
                        HasSubstr("must share a file system")));
            },
            {.environment = scratch.environment()});
}

TEST(Checkpoint, OneRankSavesAlone) {
  const Scratch scratch;
  run_ranks(2,
            [&](int rank) {
              const auto group = init_process_group();
              if (rank != 1) return;
              const auto info = save_checkpoint(scratch.path() / "a", training_state(1), {{"rank", rank}},
                                                {.emergency = "rank 0 is gone"}, {.alone = true});
              EXPECT_EQ(info.world_size, 2);
              EXPECT_EQ(load_checkpoint(scratch.path() / "a").rank_state.at("rank").toInt(), 1);
              EXPECT_TRUE(load_checkpoint(scratch.path() / "a", {.rank = 0}).rank_state.empty());
            },
            {.environment = scratch.environment()});
}

}  // namespace
}  // namespace lockstep::checkpoint_test
