#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/mlflow/internal/journal.h>
#include <lockstep/mlflow/mlflow_writer.h>
#include <lockstep/testing/folder_test.h>

// What arrives at a server is the subject of parity/mlflow_test.py.
namespace lockstep::mlflow_test {
namespace {

using mlflow::internal::Journal;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr const char* kRun = R"({"run":{}})";

class MlflowFiles : public testing::FolderTest {
 protected:
  std::string content() const { return testing::content_of(path_); }
  static std::vector<std::string> unsent(const Journal& journal) {
    std::vector<std::string> texts;
    for (const auto& line : journal.read(journal.sent(), 1 << 20)) texts.push_back(line.text);
    return texts;
  }

  std::filesystem::path path_ = folder_ / "a.jsonl";
};

TEST_F(MlflowFiles, AJournalKnowsWhatIsNotSentWhenItIsOpenedAgain) {
  {
    Journal journal(path_, kRun);
    EXPECT_TRUE(journal.all_sent());
    for (const char* line : {"1", "22", "333"}) EXPECT_TRUE(journal.append(line));
    journal.set_create_tried();
    journal.set_run_id("abc");
    journal.set_sent(journal.read(journal.sent(), 0).at(0).end);
    EXPECT_THAT(unsent(journal), ElementsAre("22", "333"));
    EXPECT_THROW(Journal(path_, kRun), c10::Error) << "one process owns it";
  }
  Journal journal(path_, "another");
  EXPECT_EQ(journal.run(), kRun);
  EXPECT_EQ(journal.run_id(), "abc");
  EXPECT_TRUE(journal.create_tried());
  EXPECT_THAT(unsent(journal), ElementsAre("22", "333"));
  journal.set_sent(journal.read(journal.sent(), 1 << 20).back().end);
  EXPECT_TRUE(journal.all_sent());
  journal.rename(folder_ / "b.jsonl");
  EXPECT_TRUE(journal.append("4"));
  EXPECT_THAT(unsent(journal), ElementsAre("4"));
  EXPECT_EQ(journal.path(), folder_ / "b.jsonl");
  journal.remove();
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

TEST_F(MlflowFiles, AJournalReadsAtMostWhatIsAskedForButOneLine) {
  Journal journal(path_, kRun);
  const std::string longer(200'000, 'x');
  for (const std::string& line : {longer, std::string("1"), std::string("2"), longer}) journal.append(line);
  auto at = journal.sent();
  EXPECT_EQ(journal.read(at, 10).size(), 1U);
  at = journal.read(at, 10).back().end;
  EXPECT_EQ(journal.read(at, 10).size(), 2U);
  EXPECT_EQ(journal.read(at, 1).size(), 1U);
  EXPECT_EQ(journal.read(at, 1 << 20).size(), 3U);
}

TEST_F(MlflowFiles, AJournalThatIsSentDoesNotGrowForEver) {
  Journal journal(path_, kRun);
  const std::string line(100'000, 'x');
  for (int i = 0; i < 100; ++i) {
    journal.append(line);
    journal.set_sent(journal.read(journal.sent(), 0).back().end);
    ASSERT_TRUE(journal.all_sent());
    ASSERT_LE(std::filesystem::file_size(path_), 4.3e6);
  }
  journal.append("last");
  EXPECT_THAT(unsent(journal), ElementsAre("last"));
}

TEST_F(MlflowFiles, WhateverWasCutOffAJournalOpensOrSaysWhyNot) {
  {
    Journal journal(path_, kRun);
    for (const char* line : {"1", "22", "333"}) journal.append(line);
    journal.set_sent(journal.read(journal.sent(), 0).at(0).end);
  }
  const std::string whole = content();
  for (size_t length = 0; length <= whole.size(); ++length) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << whole.substr(0, length);
    try {
      Journal journal(path_, kRun);
      const auto rest = unsent(journal);
      EXPECT_LE(rest.size(), 2U);
      journal.append("4");
      EXPECT_EQ(unsent(journal).back(), "4");
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what_without_backtrace(), HasSubstr("is no journal"));
      EXPECT_LT(length, whole.find(kRun) + std::string(kRun).size() + 1);
    }
  }
}

TEST_F(MlflowFiles, ARunIdIsANameAndNoPath) {
  Journal journal(path_, kRun);
  const std::vector<std::string> paths = {"",     "../evil/x", "a/b",     "..",
                                          "a\nb", "a\"b",      "\x1b[2J", std::string(65, 'a')};
  for (const std::string& id : paths) {
    EXPECT_THROW(journal.set_run_id(id), c10::Error) << id;
  }
  EXPECT_EQ(journal.run_id(), "");
  journal.set_run_id("0123456789abcdef0123456789ABCDEF-_");
  EXPECT_EQ(journal.run_id(), "0123456789abcdef0123456789ABCDEF-_");
}

TEST_F(MlflowFiles, OtherFilesAreRefused) {
  for (const char* text : {"\n", "{}\n{}\n", "[1]\n2\n", "{\"sent\":\"x\"}\n\n", "{\"sent\":1e999}\n{}\n",
                           "\xff\xfe\n\n", "half a line"}) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << text;
    EXPECT_THROW(Journal(path_, kRun), c10::Error) << text;
    EXPECT_EQ(content(), text);
  }
}

TEST_F(MlflowFiles, ACallersLineIsInTheFileWhenItIsKilled) {
  const pid_t child = ::fork();
  if (child == 0) {
    MlflowWriter writer({.tracking_uri = "http://127.0.0.1:1", .spool_directory = folder_});
    for (int step = 0; step < 100; ++step) writer.log_metrics({{"loss", 1}}, step);
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    const Journal journal(entry.path(), "");
    EXPECT_EQ(unsent(journal).size(), 100U);
    EXPECT_THAT(unsent(journal).back(), HasSubstr(",99]]"));
    path_ = entry.path();
  }
  EXPECT_THAT(content(), HasSubstr("http://127.0.0.1:1"));
}

/// With no server at the port: what is a question of the program's own.
MlflowWriterOptions without_server(const std::filesystem::path& folder) {
  return {.tracking_uri = "http://127.0.0.1:1/",
          .spool_directory = folder,
          .close_timeout = std::chrono::milliseconds(200),
          .first_retry = std::chrono::milliseconds(1)};
}

TEST_F(MlflowFiles, AWriterWithoutServerKeepsAllAndNamesTheFile) {
  ::testing::internal::CaptureStderr();
  std::filesystem::path file;
  {
    MlflowWriter writer(without_server(folder_));
    writer.log_metrics({{"loss", 1}}, 1);
    EXPECT_FALSE(writer.wait_until_sent(std::chrono::seconds(30)));
    EXPECT_EQ(writer.run_id(), "");
    EXPECT_GE(writer.counts().failures, 1);
    file = writer.spool_file();
    writer.finalize("killed");
    EXPECT_THROW(writer.log_metrics({{"loss", 1}}, 2), c10::Error);
    writer.finalize("finished");
  }
  const std::string warnings = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(warnings, HasSubstr("http://127.0.0.1:1 cannot be written to: "));
  EXPECT_THAT(warnings, HasSubstr("what could not be sent to http://127.0.0.1:1 is in " + file.string()));
  EXPECT_EQ(std::count(warnings.begin(), warnings.end(), '\n'), 2) << warnings;
  const auto lines = unsent(Journal(file, ""));
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_THAT(lines[1], HasSubstr("{\"status\":[\"KILLED\","));
}

TEST_F(MlflowFiles, AForkedChildLogsNothing) {
  MlflowWriter writer(without_server(folder_));
  writer.log_metrics({{"loss", 1}}, 1);
  const pid_t child = ::fork();
  if (child == 0) {
    {
      MlflowWriter own(without_server(folder_ / "own"));
      own.flush();
    }
    writer.log_metrics({{"loss", 2}}, 2);
    writer.flush();
    writer.finalize("failed");
    std::_Exit(writer.run_id().empty() && std::filesystem::exists(folder_ / "own") ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  path_ = writer.spool_file();
  EXPECT_THAT(content(), ::testing::Not(HasSubstr("[\"loss\",2")));
}

TEST_F(MlflowFiles, AFolderThatCannotBeWrittenIsReplaced) {
  std::ofstream(folder_ / "taken") << "a file";
  ::setenv("TMPDIR", folder_.c_str(), 1);
  ::testing::internal::CaptureStderr();
  {
    MlflowWriter writer(without_server(folder_ / "taken/spool"));
    writer.log_metrics({{"loss", 1}}, 1);
    EXPECT_EQ(writer.spool_file().parent_path().parent_path(), folder_);
  }
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("taken/spool"));
  std::filesystem::remove_all(folder_ / ("mlflow_spool_" + std::to_string(::getuid())));
  std::ofstream(folder_ / ("mlflow_spool_" + std::to_string(::getuid()))) << "a file, too";
  ::testing::internal::CaptureStderr();
  {
    MlflowWriter writer(without_server(folder_ / "taken/spool"));
    writer.log_metrics({{"loss", 1}}, 1);
    EXPECT_EQ(writer.counts().lost, 1);
  }
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("nothing can be logged: cannot open"));
  ::unsetenv("TMPDIR");
}

TEST_F(MlflowFiles, AServerMustBeNamedAndBeOne) {
  ::unsetenv("MLFLOW_TRACKING_URI");
  EXPECT_THROW(MlflowWriter(), c10::ValueError);
  EXPECT_THROW(MlflowWriter({.tracking_uri = "sqlite:///mlflow.db"}), c10::ValueError);
  ::setenv("MLFLOW_TRACKING_URI", "https://somewhere.invalid", 1);
  EXPECT_NO_THROW(MlflowWriter());
  EXPECT_NO_THROW(MlflowWriter({.tracking_uri = "http://somewhere.invalid:5000/@team"}));
  ::unsetenv("MLFLOW_TRACKING_URI");
}

TEST_F(MlflowFiles, APasswordInTheUriIsRefusedAndNotShown) {
  for (const char* uri :
       {"https://ada:s3cret@somewhere.invalid:5000/x", "http://s3cret@somewhere.invalid",
        "postgresql://ada:s3cret@somewhere.invalid/mlflow", "ada:s3cret@somewhere.invalid"}) {
    try {
      MlflowWriter writer({.tracking_uri = uri});
      ADD_FAILURE() << uri;
    } catch (const c10::ValueError& error) {
      EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("s3cret")));
      EXPECT_THAT(error.what(), ::testing::AnyOf(HasSubstr("the tracking URI holds a password"),
                                                 HasSubstr("a store that is no server")));
    }
  }
}

}  // namespace
}  // namespace lockstep::mlflow_test
