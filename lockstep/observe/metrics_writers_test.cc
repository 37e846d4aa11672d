#include <cmath>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <limits>
#include <regex>
#include <sstream>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/base/unique_fd.h>
#include <lockstep/base/world_defaults.h>
#include <lockstep/observe/combined_writer.h>
#include <lockstep/observe/csv_writer.h>
#include <lockstep/observe/json_lines_writer.h>
#include <lockstep/testing/folder_test.h>

namespace lockstep::metrics_writers_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class MetricsWriters : public testing::FolderTest {
 protected:
  ~MetricsWriters() override { clear_world_defaults(); }

  /// The file's lines, with W for the wall time, which must be one.
  std::vector<std::string> lines(const std::filesystem::path& path) const {
    static const std::regex wall_time("[0-9]{10}\\.[0-9]+(e\\+09)?");
    std::ifstream file(path);
    std::vector<std::string> result;
    for (std::string line; std::getline(file, line);)
      result.push_back(std::regex_replace(line, wall_time, "W"));
    return result;
  }
};

TEST_F(MetricsWriters, CsvIsATableWithAColumnForEachMetric) {
  const auto path = folder_ / "deep/metrics.csv";
  CsvWriter writer(path);
  EXPECT_FALSE(std::filesystem::exists(path));
  writer.log_metrics({{"loss", 0.1}, {"lr", 1e-5}}, 1);
  writer.log_metrics({{"loss", 1.0 / 3}}, 2);
  writer.finalize("finished");
  EXPECT_THAT(lines(path), ElementsAre("step,wall_time,loss,lr", "1,W,0.1,1e-05", "2,W,0.3333333333333333,"));
}

TEST_F(MetricsWriters, CsvWritesWhatNumbersCannotBe) {
  CsvWriter writer(folder_ / "metrics.csv");
  writer.log_metrics({{"a", std::nan("")}, {"b", kInfinity}, {"c", -kInfinity}, {"d", 5e-324}}, INT64_MAX);
  EXPECT_EQ(lines(folder_ / "metrics.csv").at(1), "9223372036854775807,W,nan,inf,-inf,5e-324");
}

TEST_F(MetricsWriters, CsvGivesLaterMetricsAColumnAtTheEnd) {
  const auto path = folder_ / "metrics.csv";
  CsvWriter writer(path, {.columns = {"z", "y"}});
  writer.log_metrics({{"y", 1}}, 1);
  writer.log_metrics({{"b", 2}, {"a, \"quoted\"", 3}, {"z", 4}}, 2);
  writer.log_metrics({{"b", 5}}, 3);
  EXPECT_THAT(lines(path), ElementsAre("step,wall_time,z,y,\"a, \"\"quoted\"\"\",b", "1,W,,1,,", "2,W,4,,3,2",
                                       "3,W,,,,5"));
}

TEST_F(MetricsWriters, CsvContinuesAFileWithItsColumns) {
  const auto path = folder_ / "metrics.csv";
  CsvWriter(path).log_metrics({{"a, \"quoted\"", 1}, {"loss", 2}}, 1);
  std::ofstream(path, std::ios::app) << "2,17";  // a machine crashed
  CsvWriter writer(path, {.columns = {"loss", "lr"}});
  writer.log_metrics({{"loss", 3}, {"lr", 4}}, 2);
  EXPECT_THAT(lines(path),
              ElementsAre("step,wall_time,\"a, \"\"quoted\"\"\",loss,lr", "1,W,1,2,", "2,W,,3,4"));
}

TEST_F(MetricsWriters, CsvDropsWhatAResumedRunDoesAgain) {
  const auto path = folder_ / "metrics.csv";
  CsvWriter first(path);
  for (int step = 8; step < 13; ++step) first.log_metrics({{"loss", step}}, step);
  CsvWriter writer(path);
  writer.resume(10);
  writer.log_metrics({{"loss", 0.5}}, 10);
  EXPECT_THAT(lines(path), ElementsAre("step,wall_time,loss", "8,W,8", "9,W,9", "10,W,0.5"));
}

TEST_F(MetricsWriters, CsvRefusesNamesOfItsOwnAndFilesOfOthers) {
  CsvWriter writer(folder_ / "metrics.csv");
  EXPECT_THROW(writer.log_metrics({{"step", 1}}, 1), c10::ValueError);
  EXPECT_THROW(writer.log_metrics({{"a\nb", 1}}, 1), c10::ValueError);
  EXPECT_THROW(CsvWriter(folder_ / "x.csv", {.columns = {"wall_time"}}), c10::ValueError);
  std::ofstream(folder_ / "other.csv") << "time,value\n1,2\n";
  CsvWriter other(folder_ / "other.csv");
  EXPECT_THROW(other.log_metrics({{"loss", 1}}, 1), c10::ValueError);
  EXPECT_THAT(lines(folder_ / "other.csv"), ElementsAre("time,value", "1,2")) << "left as it was";
}

TEST_F(MetricsWriters, WhatOthersWroteStaysAsItIs) {
  // None of them ends with a newline, as editors and programs leave files.
  const std::vector<std::string> texts = {
      "note: buy milk",     "a,b\n1,2\n3,4", "{\"step\":7}\n{\"step\":8}",      "[1,2,3]",
      "steps,wall_time\n1", "{\"wall\":1",   "{\"metrics\":{\"accuracy\":0.9}}"};
  for (const std::string& text : texts) {
    const auto path = folder_ / "notes";
    std::ofstream(path, std::ios::binary) << text;
    CsvWriter csv(path);
    EXPECT_THROW(csv.log_metrics({{"loss", 1}}, 1), c10::ValueError) << text;
    EXPECT_THROW(csv.resume(1), c10::ValueError) << text;
    csv.finalize("finished");
    JsonLinesWriter json(path);
    EXPECT_THROW(json.log_hyperparameters({}), c10::ValueError) << text;
    EXPECT_THROW(json.log_metrics({{"loss", 1}}, 1), c10::ValueError) << text;
    EXPECT_THROW(json.resume(1), c10::ValueError) << text;
    EXPECT_THROW(json.finalize("finished"), c10::ValueError) << text;
    EXPECT_EQ(testing::content_of(path), text);
  }
}

TEST_F(MetricsWriters, APartOfTheFirstLineIsBegunAnew) {
  const auto csv = folder_ / "metrics.csv";
  for (const char* part : {"st", "step,wall_time", "step,wall_time,los"}) {
    std::ofstream(csv, std::ios::binary) << part;
    CsvWriter(csv).log_metrics({{"loss", 1}}, 1);
    EXPECT_THAT(lines(csv), ElementsAre("step,wall_time,loss", "1,W,1")) << part;
  }
  const auto json = folder_ / "log.jsonl";
  for (const char* part : {"{\"m", "{\"metrics\":{\"lo"}) {
    std::ofstream(json, std::ios::binary) << part;
    JsonLinesWriter(json).log_metrics({}, 1);
    EXPECT_THAT(lines(json), ElementsAre(R"({"metrics":{},"step":1,"wall_time":W})")) << part;
  }
}

TEST_F(MetricsWriters, JsonLinesHoldEverything) {
  const auto path = folder_ / "log.jsonl";
  JsonLinesWriter writer(path);
  writer.log_hyperparameters({{"lr", 0.1}, {"layers", int64_t{3}}, {"nesterov", true}, {"name", "a\"b"}});
  writer.log_metrics(
      {{"a", std::nan("")}, {"b", kInfinity}, {"c", -kInfinity}, {"d", 0.1}, {"bytes \xff", 1}}, 7);
  writer.log_artifact("best/model.safetensors");
  writer.finalize("failed");
  EXPECT_THAT(
      lines(path),
      ElementsAre(R"({"hyperparameters":{"layers":3,"lr":0.1,"name":"a\"b","nesterov":true},"wall_time":W})",
                  "{\"metrics\":{\"a\":\"NaN\",\"b\":\"Infinity\",\"bytes "
                  "\xEF\xBF\xBD\":1.0,\"c\":\"-Infinity\",\"d\":0.1},\"step\":7,\"wall_time\":W}",
                  R"({"artifact":"best/model.safetensors","wall_time":W})",
                  R"({"status":"failed","wall_time":W})"));
}

TEST_F(MetricsWriters, JsonLinesDropWhatAResumedRunDoesAgain) {
  const auto path = folder_ / "log.jsonl";
  JsonLinesWriter first(path);
  first.log_hyperparameters({});
  first.log_metrics({}, 9);
  first.log_metrics({}, 10);
  first.finalize("killed");
  std::ofstream(path, std::ios::app) << "no JSON\n{\"step\":";
  JsonLinesWriter writer(path);
  writer.resume(10);
  writer.log_metrics({{"x", 1}}, 10);
  EXPECT_THAT(lines(path),
              ElementsAre(HasSubstr("hyperparameters"), HasSubstr("\"step\":9,"), HasSubstr("killed"),
                          "no JSON", HasSubstr("\"metrics\":{\"x\":1.0},\"step\":10")));
}

TEST_F(MetricsWriters, AFullDiskIsCountedAndStopsNothing) {
  std::filesystem::create_symlink("/dev/full", folder_ / "full");
  JsonLinesWriter writer(folder_ / "full");
  ::testing::internal::CaptureStderr();
  for (int step = 0; step < 3; ++step) writer.log_metrics({{"loss", 1}}, step);
  const std::string warnings = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(writer.lost(), 3);
  EXPECT_THAT(warnings, HasSubstr("No space left on device"));
  EXPECT_EQ(std::count(warnings.begin(), warnings.end(), '\n'), 1) << warnings;
}

TEST_F(MetricsWriters, RowsThatFindNoFileAreCounted) {
  std::ofstream(folder_ / "taken") << "a file, where a folder should be";
  CsvWriter writer(folder_ / "taken/metrics.csv");
  ::testing::internal::CaptureStderr();
  for (int step = 0; step < 2; ++step) writer.log_metrics({{"loss", 1}}, step);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("CsvWriter: cannot open "));
  EXPECT_EQ(writer.lost(), 2);
}

TEST_F(MetricsWriters, NothingIsAppendedToAHalfLineThatCannotBeCutOff) {
  // A file that may grow and not shrink.
  const UniqueFd file(::memfd_create("log", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_TRUE(file);
  const std::string text = "{\"status\":\"killed\",\"wall_time\":1.0}\n{\"metr";
  ASSERT_EQ(::write(file.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
  ASSERT_EQ(::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  JsonLinesWriter writer("/proc/self/fd/" + std::to_string(file.get()));
  ::testing::internal::CaptureStderr();
  for (int step = 0; step < 2; ++step) writer.log_metrics({{"loss", 1}}, step);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("JsonLinesWriter: cannot "));
  EXPECT_EQ(writer.lost(), 2);
  EXPECT_EQ(::lseek(file.get(), 0, SEEK_END), static_cast<off_t>(text.size()));
}

TEST_F(MetricsWriters, APipeIsWrittenToAndNeverRead) {
  const auto path = folder_ / "pipe";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const int reader = ::open(path.c_str(), O_RDWR | O_NONBLOCK);
  CsvWriter csv(path);
  csv.resume(1);
  csv.log_metrics({{"loss", 0.5}}, 1);
  JsonLinesWriter json(path);
  json.resume(1);
  json.log_metrics({{"loss", 0.25}}, 1);
  std::string text(4096, '\0');
  text.resize(static_cast<size_t>(std::max<ssize_t>(::read(reader, text.data(), text.size()), 0)));
  ::close(reader);
  EXPECT_THAT(text, ::testing::StartsWith("step,wall_time"));
  EXPECT_THAT(text, HasSubstr(",0.5\n{\"metrics\":{\"loss\":0.25}"));
  EXPECT_EQ(csv.lost() + json.lost(), 0);
}

TEST_F(MetricsWriters, AFileThatCannotBeReadIsNotReplaced) {
  const auto path = folder_ / "log.jsonl";
  JsonLinesWriter writer(path);
  writer.log_metrics({{"loss", 1}}, 1);
  std::filesystem::rename(path, folder_ / "moved");
  ::testing::internal::CaptureStderr();
  writer.resume(2);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("JsonLinesWriter: cannot rewrite "));
  EXPECT_FALSE(std::filesystem::exists(path)) << "an empty one";
  writer.log_metrics({{"loss", 1}}, 2);
  EXPECT_EQ(lines(folder_ / "moved").size(), 2U);
}

/// Logs, and ends without any clean-up; in a process of its own.
TEST_F(MetricsWriters, AProcessThatIsKilledLeavesAllItsLines) {
  const pid_t child = ::fork();
  if (child == 0) {
    CsvWriter csv(folder_ / "metrics.csv");
    JsonLinesWriter json(folder_ / "log.jsonl");
    for (int step = 0; step < 100; ++step) {
      csv.log_metrics({{"loss", 1}}, step);
      json.log_metrics({{"loss", 1}}, step);
    }
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  EXPECT_EQ(lines(folder_ / "metrics.csv").back(), "99,W,1");
  EXPECT_EQ(lines(folder_ / "metrics.csv").size(), 101U);
  EXPECT_EQ(lines(folder_ / "log.jsonl").size(), 100U);
}

TEST_F(MetricsWriters, OnlyRankZeroWrites) {
  set_world_defaults({.rank = 1, .world_size = 2});
  JsonLinesWriter silent(folder_ / "silent");
  JsonLinesWriter told(folder_ / "told", {.writes = true});
  CsvWriter silent_csv(folder_ / "silent.csv");
  const auto log = [&](int64_t step) {
    for (MetricsWriter* writer : std::initializer_list<MetricsWriter*>{&silent, &told, &silent_csv}) {
      writer->log_metrics({{"loss", 1}}, step);
    }
  };
  log(1);
  clear_world_defaults();
  log(2);  // the group was destroyed, which makes rank 1 no rank 0
  EXPECT_FALSE(std::filesystem::exists(folder_ / "silent"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "silent.csv"));
  EXPECT_EQ(lines(folder_ / "told").size(), 2U);
  set_world_defaults({.rank = 0, .world_size = 1});
  log(3);  // rank 0 died, and the group shrank
  EXPECT_THAT(lines(folder_ / "silent"), ElementsAre(HasSubstr("\"step\":3")));
}

TEST_F(MetricsWriters, BeforeThereIsAGroupTheLauncherTellsTheRank) {
  ::setenv("RANK", "3", 1);
  ::setenv("WORLD_SIZE", "4", 1);
  WritingRank launched;
  ::unsetenv("RANK");
  ::unsetenv("WORLD_SIZE");
  EXPECT_FALSE(launched.here());
  EXPECT_TRUE(WritingRank().here()) << "alone";
  EXPECT_FALSE(WritingRank(false).here());
  set_world_defaults({.rank = 0, .world_size = 4});
  EXPECT_TRUE(launched.here()) << "the group knows better";
}

/// A writer of a user's own, as in docs/logging_metrics.md.
class PrintWriter : public MetricsWriter {
 public:
  explicit PrintWriter(std::ostream& out) : out_(out) {}
  void log_metrics(const Metrics& metrics, int64_t step) override {
    for (const auto& [name, value] : metrics) out_ << step << ' ' << name << ' ' << value << '\n';
  }

 private:
  std::ostream& out_;
};

class BrokenWriter : public MetricsWriter {
 public:
  void log_metrics(const Metrics&, int64_t) override { throw std::runtime_error("out of ink"); }
  void flush() override { throw 7; }
};

TEST_F(MetricsWriters, SeveralAreOneAndABrokenOneStopsNoOther) {
  std::ostringstream printed;
  auto json = std::make_shared<JsonLinesWriter>(folder_ / "log");
  CombinedWriter writer({std::make_shared<BrokenWriter>(), std::make_shared<PrintWriter>(printed), json});
  ::testing::internal::CaptureStderr();
  writer.log_hyperparameters({{"lr", 0.1}});
  writer.log_metrics({{"a", 0.5}, {"b", 2}}, 1);
  writer.log_metrics({{"a", 3}}, 2);
  writer.log_artifact("x");
  writer.resume(2);
  writer.flush();
  writer.finalize("finished");
  const std::string warnings = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(printed.str(), "1 a 0.5\n1 b 2\n2 a 3\n");
  EXPECT_THAT(lines(folder_ / "log"), ElementsAre(HasSubstr("hyper"), HasSubstr("\"step\":1"),
                                                  HasSubstr("artifact"), HasSubstr("finished")));
  EXPECT_EQ(writer.failures(), 3);
  EXPECT_THAT(warnings, HasSubstr("writer 0 of a CombinedWriter failed in log_metrics: out of ink"));
  EXPECT_EQ(std::count(warnings.begin(), warnings.end(), '\n'), 1) << warnings;
  EXPECT_THROW(CombinedWriter({nullptr}), c10::ValueError);
}

TEST_F(MetricsWriters, AWriterOfAUsersOwnNeedNotKnowItsRank) {
  set_world_defaults({.rank = 1, .world_size = 2});
  std::ostringstream printed;
  CombinedWriter writer({std::make_shared<PrintWriter>(printed)});
  writer.log_metrics({{"a", 0.5}}, 1);
  EXPECT_EQ(printed.str(), "");
}

}  // namespace
}  // namespace lockstep::metrics_writers_test
