#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <gtest/gtest.h>

#include <lockstep/base/files/append_file.h>
#include <lockstep/testing/folder_test.h>

namespace lockstep::append_file_test {
namespace {

using testing::content_of;

class AppendFileTest : public testing::FolderTest {
 protected:
  void write(const std::filesystem::path& path, const std::string& text) const {
    std::ofstream(path, std::ios::binary) << text;
  }
};

TEST_F(AppendFileTest, MakesFoldersAndContinues) {
  const auto path = folder_ / "a/b/log";
  {
    AppendFile file("test", path, AppendFile::Kind::kLines);
    EXPECT_FALSE(std::filesystem::exists(path)) << "nothing was appended yet";
    EXPECT_TRUE(file.append("1\n"));
  }
  AppendFile file("test", path, AppendFile::Kind::kLines);
  EXPECT_EQ(file.first_line()->text, "1");
  EXPECT_TRUE(file.first_line()->ended);
  EXPECT_TRUE(file.append("2\n"));
  EXPECT_TRUE(file.sync());
  EXPECT_EQ(content_of(path), "1\n2\n");
}

TEST_F(AppendFileTest, CutsOffALineWithoutEndButNoBinaryRecord) {
  const auto path = folder_ / "log";
  for (const std::string& whole : {std::string(), std::string("a\nb\n"), std::string(10000, 'x') + "\n"}) {
    for (const std::string& partial : {std::string(), std::string("c"), std::string(9000, 'y')}) {
      write(path, whole + partial);
      AppendFile lines("test", path, AppendFile::Kind::kLines);
      ASSERT_TRUE(lines.open());
      const auto first = lines.first_line();
      EXPECT_EQ(first.has_value(), !whole.empty() || !partial.empty());
      EXPECT_EQ(first && first->ended, !whole.empty());
      EXPECT_EQ(content_of(path), whole + partial) << "it may be another's";
      EXPECT_TRUE(lines.take_over());
      EXPECT_TRUE(lines.append("d\n"));
      EXPECT_EQ(content_of(path), whole + "d\n");
      write(path, whole + partial);
      AppendFile binary("test", path, AppendFile::Kind::kBinary);
      EXPECT_TRUE(binary.take_over());
      EXPECT_TRUE(binary.append("d\n"));
      EXPECT_EQ(content_of(path), whole + partial + "d\n");
    }
  }
}

TEST_F(AppendFileTest, RewritesLines) {
  const auto path = folder_ / "log";
  write(path, "keep\ndrop\nchange\n");
  AppendFile file("test", path, AppendFile::Kind::kLines);
  EXPECT_TRUE(file.rewrite_lines([](std::string_view line) -> std::optional<std::string> {
    if (line == "drop") return std::nullopt;
    return line == "change" ? "changed" : std::string(line);
  }));
  EXPECT_TRUE(file.append("new\n"));
  EXPECT_EQ(content_of(path), "keep\nchanged\nnew\n");
  EXPECT_FALSE(std::filesystem::exists(path.string() + ".new"));
}

/// While it lives, no file may grow beyond `bytes`: the kernel writes what fits, then refuses.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() { ::setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_{};
};

TEST_F(AppendFileTest, ADiskThatTakesAPartOfARecordKeepsNoneOfIt) {
  const auto path = folder_ / "log";
  AppendFile file("test", path, AppendFile::Kind::kBinary);
  EXPECT_TRUE(file.append(std::string(60000, 'a')));
  ::testing::internal::CaptureStderr();
  {
    const FileSizeLimit limit(100000);  // of the captured warnings, too
    EXPECT_FALSE(file.append(std::string(60000, 'b')));
    EXPECT_EQ(std::filesystem::file_size(path), 60000U);
    EXPECT_TRUE(file.append(std::string(40000, 'c'))) << "there is room for that";
    EXPECT_FALSE(file.append("d"));
    EXPECT_FALSE(file.rewrite_lines([](std::string_view) { return std::string(200000, 'e'); }));
  }
  EXPECT_TRUE(file.append("f")) << "the disk was emptied";
  EXPECT_EQ(file.lost(), 2);
  EXPECT_EQ(content_of(path), std::string(60000, 'a') + std::string(40000, 'c') + "f");
  const std::string warnings = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(warnings.begin(), warnings.end(), '\n'), 1) << warnings;
  EXPECT_THAT(warnings, ::testing::HasSubstr("test: cannot write to " + path.string() + ": File too large"));
}

TEST_F(AppendFileTest, ANameThatCannotBeOpenedIsToldOnceAndTriedAgain) {
  const auto path = folder_ / "taken/log";
  write(folder_ / "taken", "a file, where a folder should be");
  AppendFile file("test", path, AppendFile::Kind::kLines);
  ::testing::internal::CaptureStderr();
  EXPECT_FALSE(file.append("1\n"));
  EXPECT_FALSE(file.append("2\n"));
  EXPECT_FALSE(file.sync());
  const std::string warnings = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(warnings.begin(), warnings.end(), '\n'), 1) << warnings;
  EXPECT_THAT(warnings, ::testing::HasSubstr("Not a directory"));
  std::filesystem::remove(folder_ / "taken");
  EXPECT_TRUE(file.append("3\n"));
  EXPECT_EQ(content_of(path), "3\n");
  EXPECT_EQ(file.lost(), 2);
}

}  // namespace
}  // namespace lockstep::append_file_test
