#include <gmock/gmock.h>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <lockstep/doctor/finding.h>

namespace lockstep::doctor::finding_test {
namespace {

const Findings kMixed = {ok("cores", "2 of 2"), note("ucx", "absent", "nothing"),
                         warning("nofile", "few", "raise"),
                         problem("memfd", "refused\nby the   sandbox", "allow it")};

TEST(Finding, ExitStatusIsForProblemsAndWithStrictForWarnings) {
  EXPECT_EQ(exit_status({}, true), 0);
  EXPECT_EQ(exit_status({kMixed[0], kMixed[1]}, true), 0);
  EXPECT_EQ(exit_status({kMixed[0], kMixed[2]}, false), 0);
  EXPECT_EQ(exit_status({kMixed[0], kMixed[2]}, true), 1);
  EXPECT_EQ(exit_status({kMixed[3]}, false), 1);
}

TEST(Finding, TextHasOneLineForEachAndACount) {
  EXPECT_EQ(to_text(kMixed),
            "ok      cores        2 of 2\n"
            "note    ucx          absent; do: nothing\n"
            "warning nofile       few; do: raise\n"
            "problem memfd        refused by the sandbox; do: allow it\n"
            "1 problem, 1 warning, 1 note\n");
  EXPECT_EQ(to_text({}), "0 problems, 0 warnings, 0 notes\n");
}

TEST(Finding, JsonHasEverythingAndSurvivesBytesThatAreNoText) {
  auto findings = kMixed;
  findings.push_back(problem("odd", "\xff\xfe", "x"));
  const auto json = nlohmann::json::parse(to_json(findings, "1.2.3", false));
  EXPECT_EQ(json.at("lockstep"), "1.2.3");
  EXPECT_EQ(json.at("status"), 1);
  EXPECT_EQ(json.at("counts"), nlohmann::json({{"ok", 1}, {"note", 1}, {"warning", 1}, {"problem", 2}}));
  EXPECT_EQ(json.at("findings").size(), 5);
  EXPECT_EQ(json.at("findings").at(2),
            nlohmann::json(
                {{"severity", "warning"}, {"check", "nofile"}, {"message", "few"}, {"remedy", "raise"}}));
}

}  // namespace
}  // namespace lockstep::doctor::finding_test
