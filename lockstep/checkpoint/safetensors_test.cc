#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/safetensors.h>

namespace lockstep {
namespace {

TEST(Checkpoint, ComesBack) {
  const std::filesystem::path root = std::filesystem::temp_directory_path() / "ls-first";
  std::filesystem::remove_all(root);
  const StateDict model = {{"fc1.weight", torch::rand({3, 4})}, {"fc1.bias", torch::rand({3})}};
  save_checkpoint(root / "step-1", {{"model", to_object(model)}}, {{"data", 3}}, {.step = 1});
  const auto loaded = load_checkpoint(root / "step-1");
  EXPECT_EQ(loaded.info.step, 1);
  EXPECT_EQ(loaded.rank_state.at("data").toInt(), 3);
  const auto back = from_object<StateDict>(loaded.state.at("model"));
  EXPECT_TRUE(torch::equal(back.at("fc1.weight").toTensor(), model.at("fc1.weight").toTensor()));
  EXPECT_EQ(verify_checkpoint(root / "step-1").size(), 0U);
  EXPECT_EQ(find_latest_checkpoint(root)->step, 1);
}

}  // namespace
}  // namespace lockstep
