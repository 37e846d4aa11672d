#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <limits>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <torch/torch.h>

#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/inspect_checkpoint.h>
#include <lockstep/checkpoint/testing/scratch.h>
#include <lockstep/checkpoint/testing/states.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::inspect_checkpoint_test {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;
using testing::Scratch;
using testing::training_state;

TEST(InspectCheckpoint, TellsWhatIsThereAndWhatIsWrong) {
  const Scratch scratch;
  const auto directory = scratch.path() / "step-5";
  save_checkpoint(directory, training_state(1), {{"x", torch::ones({2})}},
                  {.step = 5, .metrics = {{"loss", 0.5}}, .emergency = "a signal"});
  const auto good = inspect_checkpoint(directory);
  EXPECT_FALSE(good.problem);
  EXPECT_THAT(good.text,
              AllOf(HasSubstr("step-5: verified"), HasSubstr("step 5, epoch 0"), HasSubstr("loss 0.5"),
                    HasSubstr("in an emergency: a signal"), HasSubstr("model: fc1.weight  F32 [3, 4]  48 B"),
                    HasSubstr("rank00000: x  F32 [2]"), HasSubstr("state.json")));
  const json parsed = json::parse(inspect_checkpoint(directory, {.json = true}).text);
  EXPECT_EQ(parsed["kind"], "checkpoint");
  EXPECT_EQ(parsed["info"]["step"], 5);
  EXPECT_EQ(parsed["tensors"].size(), 4U);
  EXPECT_EQ(parsed["files"].size(), 4U);
  EXPECT_TRUE(parsed["problems"].empty());
  EXPECT_THAT(inspect_checkpoint(directory, {.verify = false}).text, HasSubstr("step-5: complete"));

  save_checkpoint(scratch.path() / "step-6", training_state(1), {}, {.step = 6});
  std::filesystem::create_directory(scratch.path() / "notes");
  EXPECT_FALSE(inspect_checkpoint(scratch.path()).problem);
  std::ofstream(directory / "model.safetensors", std::ios::in) << "damage";
  const auto all = inspect_checkpoint(scratch.path());
  EXPECT_TRUE(all.problem);
  EXPECT_THAT(all.text, AllOf(HasSubstr("step-5: DAMAGED"), HasSubstr("its checksum is wrong"),
                              HasSubstr("step-6: verified"), Not(HasSubstr("notes"))));
  EXPECT_FALSE(inspect_checkpoint(scratch.path(), {.verify = false}).problem);
  EXPECT_EQ(json::parse(inspect_checkpoint(scratch.path(), {.json = true}).text)["checkpoints"].size(), 2U);
  std::filesystem::remove(directory / "manifest.json");
  EXPECT_TRUE(inspect_checkpoint(directory).problem);
  EXPECT_THAT(inspect_checkpoint(scratch.path()).text, HasSubstr("step-5: DAMAGED"));
  EXPECT_THAT(message_of<CheckpointError>([&] { inspect_checkpoint(scratch.path() / "notes"); }),
              HasSubstr("is no checkpoint, and holds none"));
  EXPECT_THAT(message_of<CheckpointError>([&] { inspect_checkpoint(scratch.path() / "nothing"); }),
              HasSubstr("No such file"));
}

TEST(InspectCheckpoint, TellsInWhatTwoDiffer) {
  const Scratch scratch;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const StateDict first = {{"same", torch::arange(3)},
                           {"moved", torch::tensor({1.0, nan, infinity, 4.0})},
                           {"form", torch::ones({2})},
                           {"gone", torch::ones({1})},
                           {"flags", torch::tensor({true, false})},
                           {"complex", torch::zeros({2}, at::kComplexFloat)}};
  const StateDict second = {{"same", torch::arange(3)},
                            {"moved", torch::tensor({1.5, nan, infinity, 3.75})},
                            {"form", torch::ones({3})},
                            {"new", torch::ones({1})},
                            {"flags", torch::tensor({true, true})},
                            {"complex", torch::full({2}, c10::complex<float>(3, 4), at::kComplexFloat)}};
  const auto save = [&](const char* name, const StateDict& model, double rate) {
    save_checkpoint(
        scratch.path() / name,
        {{"model", to_object(model)}, {"scheduler", to_object(StateDict{{"lr", rate}, {"steps", 3}})}},
        {{"position", rate > 1 ? 5 : 6}}, {});
    return scratch.path() / name;
  };
  const auto a = save("a", first, 0.1);
  const auto b = save("b", second, 0.2);
  const auto same = compare_checkpoints(a, a);
  EXPECT_FALSE(same.problem);
  EXPECT_THAT(same.text, HasSubstr("no difference: 6 tensors are the same"));
  const auto difference = compare_checkpoints(a, b);
  EXPECT_TRUE(difference.problem);
  EXPECT_THAT(
      difference.text,
      AllOf(HasSubstr("model: moved: 2 elements differ, by at most 0.5"),
            HasSubstr("model: form: F32 [2] in the first, F32 [3] in the second"),
            HasSubstr("model: gone: only the first has it"), HasSubstr("model: new: only the second has it"),
            HasSubstr("model: flags: 1 elements differ, by at most 1"),
            HasSubstr("model: complex: 2 elements differ, by at most 5"),
            HasSubstr("state.json['scheduler']['lr']: 0.1 -> 0.2"), Not(HasSubstr("'steps'")),
            HasSubstr("1 tensors are the same, 6 differ; 1 other values differ")));
  const json parsed = json::parse(compare_checkpoints(a, b, {.json = true}).text);
  EXPECT_EQ(parsed["kind"], "difference");
  EXPECT_EQ(parsed["same_tensors"], 1);
  EXPECT_EQ(parsed["differences"].size(), 7U);
  EXPECT_THROW(compare_checkpoints(a, scratch.path() / "none"), CheckpointError);
}

}  // namespace
}  // namespace lockstep::inspect_checkpoint_test
