#include <vector>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/checkpoint/internal/save_plan.h>

namespace lockstep::save_plan_test {
namespace {

TEST(SavePlan, AssignsByBytesToThoseThatHaveATensor) {
  using checkpoint::internal::assign_files;
  using checkpoint::internal::TensorOffer;
  const std::vector<TensorOffer> replicated = {
      {"m", "big", 100}, {"m", "a", 40}, {"m", "b", 40}, {"m", "c", 30}};
  std::vector<TensorOffer> more = replicated;
  more.emplace_back("o", "own", 50);
  const auto plain = assign_files({replicated, more}, false);
  EXPECT_EQ(plain[0], (std::vector<checkpoint::internal::FileTask>{{"m.safetensors", "m", {0, 1, 2, 3}}}));
  EXPECT_EQ(plain[1], (std::vector<checkpoint::internal::FileTask>{{"o.safetensors", "o", {4}}}));
  const auto sharded = assign_files({replicated, more}, true, /*least_assigned=*/1);
  // 100 to rank 0, its own 50 to rank 1, then the rest so that both come out even: 130 and 130.
  EXPECT_EQ(sharded[0],
            (std::vector<checkpoint::internal::FileTask>{{"m-00001-of-00002.safetensors", "m", {0, 3}}}));
  EXPECT_EQ(sharded[1], (std::vector<checkpoint::internal::FileTask>{
                            {"m-00002-of-00002.safetensors", "m", {1, 2}}, {"o.safetensors", "o", {4}}}));
  // What is small stays together.
  EXPECT_EQ(assign_files({replicated, more}, true), plain);
  EXPECT_THROW(assign_files({{{"a-00001-of-00002", "x", 1}, {"a", "y", 1}}, {{"a", "z", 1}}}, false),
               c10::ValueError);
  EXPECT_EQ(checkpoint::internal::file_stem("../a b"), "%2E.%2Fa%20b");
}

}  // namespace
}  // namespace lockstep::save_plan_test
