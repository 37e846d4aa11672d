#include <gmock/gmock.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/rendezvous/internal/hostlist.h>

namespace lockstep::rendezvous_internal::hostlist_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Hostlist, Expands) {
  EXPECT_THAT(expand_hostlist("one"), ElementsAre("one"));
  EXPECT_THAT(expand_hostlist("a-b,c.example.org"), ElementsAre("a-b", "c.example.org"));
  EXPECT_THAT(expand_hostlist("node[01-03,7],other"),
              ElementsAre("node01", "node02", "node03", "node7", "other"));
  EXPECT_THAT(expand_hostlist("n[8-11]"), ElementsAre("n8", "n9", "n10", "n11"));
  EXPECT_THAT(expand_hostlist("n[098-101]x"), ElementsAre("n098x", "n099x", "n100x", "n101x"));
  EXPECT_THAT(expand_hostlist("r[1-2]n[3,5]"), ElementsAre("r1n3", "r1n5", "r2n3", "r2n5"));
}

TEST(Hostlist, RefusesWhatIsMalformedAndShowsIt) {
  for (const char* list : {"", ",", "a,", "a[", "a]", "a[1", "a[]", "a[1-]", "a[-1]", "a[3-1]", "a[x]",
                           "a[[1]]", "a[1,]", "a[0-9999999]", "a[0-999]b[0-999]", "a[99999999999999999999]",
                           "a[1-9223372036854775807]", "a[9223372036854775807]"}) {
    try {
      expand_hostlist(list);
      ADD_FAILURE() << list << " was accepted";
    } catch (const c10::ValueError& error) {
      EXPECT_THAT(error.what(), HasSubstr("'" + std::string(list) + "' is not a list of hosts"));
    }
  }
}

TEST(Hostlist, RefusesWhatWouldCostMemoryAndStackOnly) {
  std::string nested;
  for (int i = 0; i < 20'000; ++i) nested += "[1]";
  EXPECT_THROW(expand_hostlist(nested), c10::ValueError);
  EXPECT_THROW(expand_hostlist("a[" + std::string(1000, '0') + "1-65536]"), c10::ValueError);
  EXPECT_THROW(expand_hostlist(std::string(1000, 'a') + "[1-65536]"), c10::ValueError);
}

TEST(TasksPerNode, Expands) {
  EXPECT_THAT(expand_tasks_per_node("4"), ElementsAre(4));
  EXPECT_THAT(expand_tasks_per_node("2(x3),1"), ElementsAre(2, 2, 2, 1));
  for (const char* list : {"", "x", "2(x", "2(x)", "2(x3", "-1", "2(x99999999)", "1,,1"}) {
    EXPECT_THROW(expand_tasks_per_node(list), c10::ValueError) << list;
  }
}

}  // namespace
}  // namespace lockstep::rendezvous_internal::hostlist_test
