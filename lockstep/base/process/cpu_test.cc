#include <gmock/gmock.h>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/base/process/cpu.h>
#include <lockstep/base/process/cpu_list.h>

namespace lockstep::cpu_test {
namespace {

using ::testing::ElementsAre;

TEST(CpuList, IsReadAndWritten) {
  EXPECT_THAT(parse_cpu_list("0-3,8"), ElementsAre(0, 1, 2, 3, 8));
  EXPECT_THAT(parse_cpu_list("7"), ElementsAre(7));
  for (const char* bad : {"", "a", "1-", "-1", "3-1", "1,,2", "0-99999999999", "1-2-3"}) {
    EXPECT_TRUE(parse_cpu_list(bad).empty()) << bad;
  }
  EXPECT_EQ(format_cpu_list({0, 1, 2, 3, 8}), "0-3,8");
  EXPECT_EQ(format_cpu_list({}), "");
}

TEST(CoreMask, HoldsTheCoresThatItIsGiven) {
  EXPECT_TRUE(CoreMask({}).cores().empty());
  const CoreMask mask({0, 63, 64, 5000});
  EXPECT_THAT(mask.cores(), ElementsAre(0, 63, 64, 5000));
}

TEST(CoreMask, KeepsAThreadOnItsCores) {
  const CoreMask before = CoreMask::current();
  ASSERT_EQ(static_cast<int>(before.cores().size()), usable_cores());
  const int last = before.cores().back();
  ASSERT_TRUE(CoreMask({last}).apply(0));
  EXPECT_EQ(current_cpu(), last);
  EXPECT_THAT(CoreMask::current().cores(), ElementsAre(last));
  EXPECT_TRUE(before.apply(0));
  EXPECT_EQ(CoreMask::current().cores(), before.cores());
  EXPECT_FALSE(CoreMask({}).apply(0)) << "no core at all";
}

}  // namespace
}  // namespace lockstep::cpu_test
