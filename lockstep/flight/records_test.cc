#include <filesystem>
#include <fstream>
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/flight/records.h>
#include <lockstep/flight/testing/record_folder.h>
#include <lockstep/testing/message_of.h>

// Files from elsewhere: whatever they hold, the reader says what is wrong and in which.
namespace lockstep::flight::records_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

RankRecord small_record() {
  RankRecord record;
  record.world_size = 2;
  record.host = "host";
  record.realtime_ns = 1000;
  record.monotonic_ns = 100;
  record.groups = {{"default", "default", {0, 1}}};
  Entry entry;
  entry.record_id = 1;
  entry.operation = "all_reduce";
  entry.sequence = 1;
  entry.inputs = {{{4}}, {"Float"}};
  entry.created_ns = 50;
  entry.file = "train.cc";
  entry.line = 3;
  record.entries = {entry};
  return record;
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

std::string refusal(const std::string& text) {
  return message_of<c10::ValueError>([&] { parse(text, "DIR/rank_0.json"); });
}

TEST(FlightRecords, EveryTruncationIsRefusedWithTheNameOfTheFile) {
  const std::string text = to_json(small_record());
  EXPECT_EQ(to_json(parse(text, "name")), text);
  for (size_t length = 0; length + 2 < text.size(); ++length) {  // without the last newline it is whole
    EXPECT_THAT(refusal(text.substr(0, length)), HasSubstr("DIR/rank_0.json: not a flight record")) << length;
  }
}

TEST(FlightRecords, WrongValuesAreNamed) {
  struct Damage {
    const char* from;
    const char* to;
    const char* words;
  };
  const std::vector<Damage> damages = {
      {R"("lockstep-flight")", R"("other")", "format"},
      {R"("version": "1.0")", R"("version": "2.0")", "version is '2.0'"},
      {R"("version": "1.0")", R"("version": "x\u001b[1m")", "which is not a version"},
      {R"("rank": 0)", R"("rank": 2)", "rank is not a whole number from 0 to 1"},
      {R"("rank": 0)", R"("rank": -1)", "rank is not"},
      {R"("rank": 0)", R"("rank": 0.5)", "rank is not"},
      {R"("rank": 0)", R"("ranke": 0)", "rank is missing"},
      {R"("world_size": 2)", R"("world_size": 99999999999)", "world_size is not"},
      {R"("world_size": 2)", R"("world_size": 18446744073709551615)", "world_size is not"},
      {R"("host": "host")", R"("host": 7)", "host is not a text"},
      {R"("monotonic_ns": 100)", R"("monotonic_ns": 100000)", "monotonic_ns is not"},
      {R"([0,1])", R"([0,0])", "is given twice"},
      {R"([0,1])", R"([1])", "don't contain this rank"},
      {R"([0,1])", R"([0,7])", "ranks[1] is not"},
      {R"([0,1])", R"([0,1],"hosts":["a"])", "hosts is not as long as ranks"},
      {R"([0,1])", R"([0,1],"hosts":["a",7])", "hosts[1] is not a text"},
      {R"({"0":)", R"({"5":)", "pg_config.0 is missing"},
      {R"("pg_id":0)", R"("pg_id":1)", "entries[0].pg_id is not"},
      {R"("peer":-1)", R"("peer":2)", "entries[0].peer is not"},
      {R"("is_p2p":false)", R"("is_p2p":0)", "entries[0].is_p2p is neither"},
      {R"("state":"scheduled")", R"("state":"asleep")", "it takes scheduled, started"},
      {R"("state":"scheduled")", R"("state":"completed")", "is missing, though it completed"},
      {R"("input_dtypes":["Float"])", R"("input_dtypes":[])", "is not as long as input_sizes"},
      {R"([[4]])", R"([[-4]])", "input_sizes[0][0] is not"},
      {R"([[4]])", R"([4])", "input_sizes[0] is not a list"},
      {R"([[4]])", R"([[[[[[[[4]]]]]]]])", "nested more than"},
      {R"("time_created_ns":950)", R"("time_created_ns":null)", "time_created_ns is not"},
  };
  const std::string text = to_json(small_record());
  for (const Damage& damage : damages) {
    const std::string message = refusal(replaced(text, damage.from, damage.to));
    EXPECT_THAT(message, AllOf(HasSubstr("DIR/rank_0.json"), HasSubstr(damage.words)))
        << damage.from << " -> " << damage.to;
    EXPECT_THAT(message, ::testing::Not(HasSubstr("\x1b")));
  }
}

TEST(FlightRecords, DeepNestingAndForeignTextAreRefused) {
  EXPECT_THAT(refusal(std::string(1 << 20, '[')), HasSubstr("nested more than"));
  EXPECT_THAT(refusal("[]"), HasSubstr("is not an object"));
  EXPECT_THAT(refusal("\x80\x04\x95pickle"), HasSubstr("not a flight record"));
  RankRecord twice = small_record();
  twice.entries.push_back(twice.entries[0]);
  EXPECT_THAT(refusal(to_json(twice)), HasSubstr("record_id does not rise"));
}

/// What reading the folder says.
std::string folder_refusal(const std::string& path) {
  return message_of<c10::ValueError>([&] { read_directories({path}); });
}

TEST(FlightRecords, ADirectoryIsReadByRankAndItsFaultsAreNamed) {
  RecordFolder folder;
  EXPECT_THAT(folder_refusal(folder.path()), HasSubstr("holds no flight records"));
  EXPECT_THAT(folder_refusal(folder.path("absent")), HasSubstr("can't be read"));
  RankRecord record = small_record();
  std::ofstream(folder.path("rank_0.json")) << to_json(record);
  record.rank = 1;
  std::ofstream(folder.path("rank_1.json")) << to_json(record);
  std::ofstream(folder.path("notes.json")) << "anything";
  const auto records = read_directories({folder.path()});
  ASSERT_EQ(records.size(), 2U);
  EXPECT_EQ(records[1].rank, 1);
  std::filesystem::rename(folder.path("rank_1.json"), folder.path("rank_5.json"));
  EXPECT_THAT(folder_refusal(folder.path()), AllOf(HasSubstr("rank_5.json"), HasSubstr("rank 1")));
  std::filesystem::remove(folder.path("rank_5.json"));
  ASSERT_EQ(::mkfifo(folder.path("rank_1.json").c_str(), 0600), 0);
  EXPECT_THAT(folder_refusal(folder.path()), HasSubstr("no regular file"));
  std::filesystem::remove(folder.path("rank_1.json"));
  std::ofstream(folder.path("rank_1.json")) << "";
  std::filesystem::resize_file(folder.path("rank_1.json"), 65 << 20);
  EXPECT_THAT(folder_refusal(folder.path()), HasSubstr("bytes, more than"));
}

TEST(FlightRecords, SeveralDirectoriesAreReadAsOne) {
  RecordFolder folder;
  for (int rank : {0, 1}) {
    const std::string path = folder.path("host-" + std::to_string(rank));
    std::filesystem::create_directory(path);
    RankRecord record = small_record();
    record.rank = rank;
    record.groups.front().hosts = {"host-0", "host-1"};
    std::ofstream(path + "/" + file_name(rank)) << to_json(record);
  }
  std::filesystem::create_directory(folder.path("of no rank"));
  const auto records =
      read_directories({folder.path("host-1"), folder.path("of no rank"), folder.path("host-0")});
  ASSERT_EQ(records.size(), 2U);
  EXPECT_EQ(records[0].rank, 0);
  EXPECT_EQ(records[1].groups.front().hosts[1], "host-1");
  const std::string refused = message_of<c10::ValueError>([&] {
    read_directories({folder.path("host-0"), folder.path("host-0")});
  });
  EXPECT_THAT(refused, HasSubstr("are both of rank 0"));
}

}  // namespace
}  // namespace lockstep::flight::records_test
