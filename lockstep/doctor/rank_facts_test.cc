#include <gtest/gtest.h>

#include <lockstep/doctor/rank_facts.h>

namespace lockstep::doctor::rank_facts_test {
namespace {

TEST(RankFacts, GoThroughJson) {
  RankFacts facts = gather_rank_facts(3, "/bin/sh");
  facts.core_quota = 1.5;
  facts.environment["LOCKSTEP_ODD"] = "a \"quoted\" \n value";
  facts.ports = 7;
  const auto back = parse_rank_facts(to_json(facts));
  ASSERT_TRUE(back);
  EXPECT_EQ(to_json(*back), to_json(facts));
  EXPECT_EQ(back->rank, 3);
  EXPECT_EQ(back->core_quota, 1.5);
  EXPECT_EQ(back->ports, 7);
  EXPECT_NE(facts.kernel, "");
  EXPECT_GT(facts.memory, 0);
  EXPECT_EQ(back->environment, facts.environment);
  EXPECT_NE(facts.program_fingerprint, "");
  EXPECT_NE(facts.lockstep_fingerprint, "");
  EXPECT_NE(facts.torch_fingerprint, "");
  EXPECT_NE(facts.executable_fingerprint, "");
}

TEST(RankFacts, OfAnotherVersionAreReadAsFarAsTheyGo) {
  const auto facts = parse_rank_facts(R"({"rank": 2, "lockstep_version": "9.0.0", "novelty": [1]})");
  ASSERT_TRUE(facts);
  EXPECT_EQ(facts->rank, 2);
  EXPECT_EQ(facts->lockstep_version, "9.0.0");
  EXPECT_EQ(facts->local_rank, -1);
  for (const char* bad :
       {"", "{", "[]", "3", R"({"rank": "two"})", R"({"cores": {}})", R"({"environment": [1]})"}) {
    EXPECT_FALSE(parse_rank_facts(bad)) << bad;
  }
}

}  // namespace
}  // namespace lockstep::doctor::rank_facts_test
