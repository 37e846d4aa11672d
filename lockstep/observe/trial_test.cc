#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <string>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/world_defaults.h>
#include <lockstep/observe/trial.h>
#include <lockstep/testing/folder_test.h>
#include <lockstep/testing/message_of.h>

namespace lockstep::trial_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

class Trials : public testing::FolderTest {
 protected:
  ~Trials() override {
    clear_world_defaults();
    ::unsetenv("LOCKSTEP_TRIAL");
  }

  std::string description() const {
    return R"({"number": 7, "report": ")" + (folder_ / "deep/metrics.jsonl").string() +
           R"(", "parameters": {"lr": 0.001, "batch": 64, "nesterov": true, "optimizer": "adamw"}})";
  }

  /// {step: metrics} of what was reported.
  nlohmann::json reported() const {
    std::ifstream file(folder_ / "deep/metrics.jsonl");
    nlohmann::json all = nlohmann::json::object();
    for (std::string line; std::getline(file, line);) {
      const auto object = nlohmann::json::parse(line);
      all[std::to_string(object["step"].get<int64_t>())] = object["metrics"];
    }
    return all;
  }
};

TEST_F(Trials, WithoutASweepNothingHappens) {
  const Trial none = trial();
  EXPECT_FALSE(none);
  EXPECT_EQ(none.number(), -1);
  EXPECT_TRUE(none.parameters().empty());
  EXPECT_EQ(none.get("lr", 0.5), 0.5);
  EXPECT_EQ(none.get("batch", 32), 32);
  EXPECT_EQ(none.get("optimizer", "sgd"), "sgd");
  none.report({{"loss", 1.0}}, 1);
}

TEST_F(Trials, ParametersComeWithTheTypeThatIsAskedFor) {
  ::setenv("LOCKSTEP_TRIAL", description().c_str(), 1);
  const Trial now = trial();
  EXPECT_TRUE(now);
  EXPECT_EQ(now.number(), 7);
  EXPECT_EQ(now.parameters().size(), 4U);
  EXPECT_EQ(now.get("lr", 1.0), 0.001);
  EXPECT_EQ(now.get("lr", 1.0F), 0.001F);
  EXPECT_EQ(now.get("batch", 1), 64);
  EXPECT_EQ(now.get("batch", int64_t{1}), 64);
  EXPECT_EQ(now.get("batch", 1.0), 64.0);
  EXPECT_EQ(now.get("nesterov", false), true);
  EXPECT_EQ(now.get("optimizer", std::string("sgd")), "adamw");
  EXPECT_EQ(now.get("momentum", 0.9), 0.9);
}

TEST_F(Trials, AParameterOfAnotherTypeIsNamed) {
  const Trial now(description());
  EXPECT_THAT(message_of<c10::ValueError>([&] { now.get("lr", 1); }),
              AllOf(HasSubstr("'lr'"), HasSubstr("an integer")));
  EXPECT_THAT(message_of<c10::ValueError>([&] { now.get("optimizer", 1.0); }), HasSubstr("'optimizer'"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { now.get("batch", false); }), HasSubstr("'batch'"));
}

TEST_F(Trials, ReportsAreLinesOfTheFileThatTheSweepNames) {
  const Trial first(description());
  const Trial second = first;
  first.report({{"validation/loss", 0.5}}, 1);
  second.report({{"validation/loss", 0.25}, {"validation/accuracy", 0.9}}, 2);
  Trial(description()).report({{"validation/loss", 0.125}}, 3);
  EXPECT_EQ(reported(), nlohmann::json::parse(R"({"1": {"validation/loss": 0.5},
    "2": {"validation/loss": 0.25, "validation/accuracy": 0.9}, "3": {"validation/loss": 0.125}})"));
}

TEST_F(Trials, OnlyRankZeroReports) {
  set_world_defaults({.rank = 1, .world_size = 2});
  Trial(description()).report({{"loss", 1.0}}, 1);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "deep"));
  set_world_defaults({.rank = 0, .world_size = 2});
  Trial(description()).report({{"loss", 1.0}}, 1);
  EXPECT_EQ(reported().size(), 1U);
}

TEST_F(Trials, WhatIsNoTrialIsRefused) {
  for (const std::string text : {"x", "[]", "{}", R"({"number": 1, "parameters": {}})",
                                 R"({"number": "1", "parameters": {}, "report": "f"})"}) {
    EXPECT_THAT(message_of<c10::ValueError>([&] { Trial{text}; }),
                AllOf(HasSubstr("LOCKSTEP_TRIAL"), HasSubstr(text)));
  }
  EXPECT_THAT(message_of<c10::ValueError>(
                  [] { Trial(R"({"number": 1, "parameters": {"lr": [1]}, "report": "f"})"); }),
              AllOf(HasSubstr("'lr'"), HasSubstr("array")));
}

}  // namespace
}  // namespace lockstep::trial_test
