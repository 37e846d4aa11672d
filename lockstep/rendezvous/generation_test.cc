#include <cstdlib>
#include <gmock/gmock.h>
#include <map>
#include <string>

#include <gtest/gtest.h>

#include <lockstep/rendezvous/exit_status_table.h>
#include <lockstep/rendezvous/generation.h>

namespace lockstep::generation_test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Variables = std::map<std::string, std::string>;

const Variables kSecond = {{"TORCHELASTIC_RUN_ID", "job"},
                           {"TORCHELASTIC_RESTART_COUNT", "1"},
                           {"LOCKSTEP_AGENT_STORE", "127.0.0.1:29500/job"}};

Generation read(const Variables& variables) {
  return Generation::read([&](const char* name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  });
}

Variables with(Variables variables, const std::string& name, const std::string& value) {
  variables[name] = value;
  return variables;
}

TEST(Generation, IsReadFromTheVariablesOfLockstepRunAlone) {
  EXPECT_EQ(read(kSecond).number, 2u);
  EXPECT_EQ(read({}).number, 0u);
  EXPECT_EQ(read(with(kSecond, "TORCHELASTIC_RESTART_COUNT", "x")).number, 0u);
  EXPECT_EQ(read(with(kSecond, "TORCHELASTIC_RUN_ID", "of torchrun inside of lockstep run")).number, 0u);
  Variables of_torchrun = kSecond;
  of_torchrun.erase("LOCKSTEP_AGENT_STORE");
  EXPECT_EQ(read(of_torchrun).number, 0u);
}

TEST(Generation, DiffersFromOthersOfItsJob) {
  const Generation second = read(kSecond);
  EXPECT_FALSE(second.differs_from(second));
  EXPECT_TRUE(second.differs_from(read(with(kSecond, "TORCHELASTIC_RESTART_COUNT", "0"))));
  EXPECT_FALSE(second.differs_from({})) << "started by hand";
  Variables other = with(kSecond, "TORCHELASTIC_RUN_ID", "another");
  other = with(other, "LOCKSTEP_AGENT_STORE", "127.0.0.1:29500/another");
  EXPECT_FALSE(second.differs_from(read(with(other, "TORCHELASTIC_RESTART_COUNT", "0"))));
}

/// This process as one of generation 2, with the table of its launcher.
class OldGeneration : public ::testing::Test {
 protected:
  OldGeneration() {
    for (const auto& [name, value] : kSecond) ::setenv(name.c_str(), value.c_str(), 1);
    ::setenv(ExitStatusTable::kVariable, table.environment_value().c_str(), 1);
  }
  ~OldGeneration() override {
    for (const auto& [name, value] : kSecond) ::unsetenv(name.c_str());
    ::unsetenv(ExitStatusTable::kVariable);
  }
  ExitStatusTable table = ExitStatusTable::create(1);
};

TEST_F(OldGeneration, IsKnownByItsLauncher) {
  EXPECT_EQ(objection_to_old_generation(), std::nullopt) << "a launcher that counts none";
  table.record_generations({.newest = 2, .known_until = BootClock::now() + 1h});
  EXPECT_EQ(objection_to_old_generation(), std::nullopt);
  table.record_generations({.newest = 1, .known_until = BootClock::now() + 1h});
  EXPECT_EQ(objection_to_old_generation(), std::nullopt) << "the launcher's word of the start comes";
  table.record_generations({.newest = 5, .known_until = BootClock::now() + 1h});
  EXPECT_THAT(objection_to_old_generation().value_or(""),
              AllOf(HasSubstr("is of generation 2"), HasSubstr("generation 5 since")));
}

TEST_F(OldGeneration, IsPresumedOnceTheLeaseIsOver) {
  table.record_generations({.newest = 2, .known_until = BootClock::now() - 3s});
  EXPECT_THAT(objection_to_old_generation().value_or(""),
              AllOf(HasSubstr("is of generation 2"), HasSubstr("generation 3 or a later one"),
                    HasSubstr("by 3"), HasSubstr("lost_after")));
}

}  // namespace
}  // namespace lockstep::generation_test
