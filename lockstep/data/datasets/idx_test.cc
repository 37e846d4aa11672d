#include <zlib.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/data/datasets/idx.h>
#include <lockstep/data/testing/test_files.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::data::idx_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

class IdxTest : public ::testing::Test {
 protected:
  /// read_idx's error for a file with these bytes, which must name the file.
  std::string error(const std::string& bytes) {
    const std::string path = folder_.write("file", bytes);
    try {
      read_idx(path);
    } catch (const c10::Error& error) {
      const std::string message = error.what_without_backtrace();
      EXPECT_THAT(message, HasSubstr(path));
      return message;
    }
    return "no error";
  }

  testing::TemporaryFolder folder_;
};

TEST_F(IdxTest, ReadsEachTypePlainAndCompressed) {
  const auto numbers = at::tensor({-2, -1, 0, 1, 2, 3}, at::kDouble).view({2, 3});
  const std::vector<std::pair<uint8_t, at::ScalarType>> types = {{0x08, at::kByte},  {0x09, at::kChar},
                                                                 {0x0b, at::kShort}, {0x0c, at::kInt},
                                                                 {0x0d, at::kFloat}, {0x0e, at::kDouble}};
  for (const auto& [code, type] : types) {
    const auto expected = (type == at::kByte ? numbers.abs() : numbers).to(type);
    // Big-endian: each element's bytes reversed.
    const auto element = static_cast<int64_t>(expected.element_size());
    auto bytes = expected.view(-1).view(at::kByte).view({-1, element}).flip(1).contiguous();
    const std::string content(static_cast<const char*>(bytes.const_data_ptr()),
                              static_cast<size_t>(bytes.numel()));
    const std::string file = idx_header(code, {2, 3}) + content;
    for (const std::string& stored : {file, gzip(file), gzip(file.substr(0, 9)) + gzip(file.substr(9))}) {
      const auto got = read_idx(folder_.write("numbers", stored));
      EXPECT_EQ(got.scalar_type(), type);
      EXPECT_TRUE(at::equal(got, expected)) << type;
    }
  }
}

TEST_F(IdxTest, ReadsMoreThanABuffer) {
  std::string content(3'000'001, '\0');
  for (size_t i = 0; i < content.size(); ++i) content[i] = static_cast<char>(i * 2654435761U >> 13);
  const std::string file = idx_header(8, {3'000'001}) + content;
  for (const std::string& stored : {file, gzip(file)}) {
    const auto got = read_idx(folder_.write("large", stored));
    ASSERT_EQ(got.numel(), 3'000'001);
    EXPECT_EQ(std::memcmp(got.const_data_ptr(), content.data(), content.size()), 0);
  }
}

TEST_F(IdxTest, ReadsZeroElements) {
  EXPECT_EQ(read_idx(folder_.write("none", idx_header(8, {0, 28, 28}))).sizes(),
            at::IntArrayRef({0, 28, 28}));
  EXPECT_EQ(read_idx(folder_.write("none", gzip(idx_header(13, {5, 0})))).sizes(), at::IntArrayRef({5, 0}));
  EXPECT_THAT(error(idx_header(8, {0, 28}) + "x"), HasSubstr("bytes after the 0"));
}

TEST_F(IdxTest, NamesWhatIsWrongWithTheHeader) {
  EXPECT_THAT(error(""), HasSubstr("truncated within the IDX magic number"));
  EXPECT_THAT(error(std::string("\0\0\x08", 3)), HasSubstr("truncated within the IDX magic number"));
  EXPECT_THAT(error("PK\x03\x04 and so on"), HasSubstr("not an IDX file: its first two bytes are 80 and 75"));
  EXPECT_THAT(error(gzip("PK\x03\x04")), HasSubstr("not an IDX file"));
  EXPECT_THAT(error(idx_header(0x0a, {1}) + "x"), HasSubstr("IDX type code 10 is not supported"));
  EXPECT_THAT(error(idx_header(8, {})), HasSubstr("tells 0 dimensions"));
  EXPECT_THAT(error(idx_header(8, std::vector<uint32_t>(65, 1)) + "x"), HasSubstr("tells 65 dimensions"));
  EXPECT_THAT(error(idx_header(8, {2, 3}).substr(0, 10)), HasSubstr("truncated within the IDX header"));
}

TEST_F(IdxTest, ComparesTheHeaderWithTheContent) {
  EXPECT_THAT(error(idx_header(8, {2, 3}) + "12345"),
              AllOf(HasSubstr("truncated"), HasSubstr("promises [2, 3]")));
  EXPECT_THAT(error(idx_header(12, {2}) + "1234567"), AllOf(HasSubstr("truncated"), HasSubstr("8 bytes")));
  EXPECT_THAT(error(gzip(idx_header(8, {2, 3}) + "12345")), HasSubstr("the file holds 5"));
  EXPECT_THAT(error(idx_header(8, {2, 3}) + "1234567"), HasSubstr("bytes after the 6"));
  EXPECT_THAT(error(gzip(idx_header(8, {2, 3}) + "1234567")), HasSubstr("bytes after the 6"));
}

TEST_F(IdxTest, ReservesNoMemoryForWhatTheFileCannotHold) {
  // 2^62 bytes: were they reserved, the error would be the allocator's.
  const std::vector<uint32_t> large = {1U << 31, 1U << 31};
  EXPECT_THAT(error(idx_header(8, large) + "x"), HasSubstr("can't hold more than 1"));
  EXPECT_THAT(error(gzip(idx_header(8, large) + "x")), HasSubstr("can't hold more than"));
  EXPECT_THAT(error(idx_header(8, {0xffffffff, 0xffffffff, 0xffffffff})), HasSubstr("product overflows"));
  EXPECT_THAT(error(idx_header(14, {1U << 31, 1U << 30})), HasSubstr("product overflows"));
}

TEST_F(IdxTest, EveryTruncationOfAGzipFileIsAnError) {
  const std::string whole = gzip(idx_header(8, {40}) + std::string(40, 'x'));
  ASSERT_EQ(error(whole), "no error");
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_NE(error(whole.substr(0, length)), "no error") << length << " of " << whole.size() << " bytes";
  }
  EXPECT_THAT(error(whole.substr(0, whole.size() - 1)), HasSubstr("the gzip stream is truncated"));
}

TEST_F(IdxTest, NoFlippedBitOfAGzipFileGoesUnnoticed) {
  const std::string content = "forty bytes that are not all of one kind";
  const std::string whole = gzip(idx_header(8, {40}) + content);
  for (size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    std::string damaged = whole;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ 1 << bit % 8);
    if (error(damaged) != "no error") continue;
    // What gzip's own header says about time, system and compression changes nothing.
    const auto got = read_idx(folder_.write("file", damaged));
    EXPECT_EQ(std::memcmp(got.const_data_ptr(), content.data(), 40), 0) << "bit " << bit;
  }
  std::string damaged = whole;
  damaged[damaged.size() - 6] ^= 1;  // in the checksum
  EXPECT_THAT(error(damaged),
              AllOf(HasSubstr("the gzip stream is corrupt"), HasSubstr("incorrect data check")));
}

TEST_F(IdxTest, NothingMayFollowAGzipStream) {
  const std::string whole = gzip(idx_header(8, {4}) + "1234");
  EXPECT_THAT(error(whole + "x"), HasSubstr("not gzip follows the gzip stream"));
  EXPECT_THAT(error(whole + "\x1f\x8b"), HasSubstr("truncated"));
  EXPECT_THAT(error(whole + gzip("5")), HasSubstr("bytes after the 4"));
  EXPECT_EQ(error(whole + gzip("")), "no error");
}

TEST_F(IdxTest, NamesAFileThatCannotBeRead) {
  const auto message = [](const std::string& path) {
    return message_of<c10::Error>([&] { read_idx(path); });
  };
  EXPECT_EQ(message(folder_.path("absent")),
            "cannot open " + folder_.path("absent") + ": No such file or directory");
  EXPECT_EQ(message(folder_.path("")), folder_.path("") + " is not a regular file");
}

}  // namespace
}  // namespace lockstep::data::idx_test
