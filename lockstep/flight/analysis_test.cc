#include <algorithm>
#include <functional>
#include <gmock/gmock.h>
#include <iterator>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <lockstep/flight/analysis.h>
#include <lockstep/flight/testing/recorded_rank.h>

// Situations of a job, as its ranks would record them, and what the analysis says.
namespace lockstep::flight::analysis_test {
namespace {

using namespace recorded_rank;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Kind = RecordFinding::Kind;

struct Situation {
  std::string name;
  int world_size;
  std::vector<std::function<void(Rank&)>> ranks;  // none: the file is missing
  Kind kind;                                      // of the first finding
  std::vector<int> blamed;
  std::vector<std::string> words;  // in its text
};

void PrintTo(const Situation& situation, std::ostream* stream) {
  *stream << situation.name;
}

Analysis analysis_of(const Situation& situation) {
  std::vector<RankRecord> records;
  for (size_t i = 0; i < situation.ranks.size(); ++i) {
    if (!situation.ranks[i]) continue;
    Rank rank(static_cast<int>(i), situation.world_size);
    situation.ranks[i](rank);
    // Through the file's format, so that the analysis reads what it reads in a job.
    records.push_back(parse(to_json(rank.record()), "record"));
  }
  return analyze(std::move(records));
}

class Situations : public ::testing::TestWithParam<Situation> {};

TEST_P(Situations, AreRecognised) {
  const Situation& situation = GetParam();
  const Analysis analysis = analysis_of(situation);
  const std::string text = describe(analysis);
  ASSERT_FALSE(analysis.findings.empty()) << text;
  const RecordFinding& first = analysis.findings.front();
  EXPECT_STREQ(to_string(first.kind), to_string(situation.kind)) << text;
  EXPECT_EQ(first.ranks, situation.blamed) << text;
  for (const std::string& words : situation.words) EXPECT_THAT(text, HasSubstr(words));
  EXPECT_EQ(analysis.problem(), is_problem(situation.kind)) << text;
  const auto json = nlohmann::json::parse(to_json(analysis));
  EXPECT_EQ(json["status"], is_problem(situation.kind) ? "problem" : "ok");
  EXPECT_EQ(json["findings"][0]["kind"], to_string(situation.kind));
}

const std::vector<Situation> kSituations = {
    {"AbsentRank",
     3,
     {[](Rank& rank) { rank.done(2, all_reduce()).waits(in_bucket(all_reduce())); },
      [](Rank& rank) { rank.done(2, all_reduce()); },
      [](Rank& rank) { rank.done(2, all_reduce()).waits(all_reduce()); }},
     Kind::kMissing,
     {1},
     {"rank 1 has not called all_reduce(SUM, Float [4]), sequence 3 of group \"default\" (ranks 0-2)",
      "rank 0 called it at rank0.cc:3 for DDP bucket 3 of 5 (pending for 97.0 s)",
      "rank 2 called it at rank2.cc:3",
      "rank 1 was last in sequence 2, all_reduce(SUM, Float [4]) at rank1.cc:2 (completed 97.5 s before",
      "now it is in no operation of Lockstep"}},
    {"AbsentRankWhereOthersTimedOut",
     2,
     {[](Rank& rank) { rank.done(all_reduce()).fails(barrier(), "timeout: rank 1 did not come\nmore"); },
      [](Rank& rank) { rank.done(all_reduce()); }},
     Kind::kMissing,
     {1},
     {"rank 1 has not called barrier()", "rank0.cc:2 (failed after 97.5 s)",
      "error on rank 0: timeout: rank 1 did not come\n"}},
    {"DifferentOperations",
     3,
     {[](Rank& rank) { rank.done(all_reduce()).waits(all_reduce()); },
      [](Rank& rank) { rank.done(all_reduce()).waits(broadcast(2)); },
      [](Rank& rank) { rank.done(all_reduce()).waits(all_reduce()); }},
     Kind::kMismatch,
     {1},
     {"sequence 2", "different operations were called",
      "rank 0 called all_reduce(SUM, Float [4]) at rank0.cc:2",
      "rank 1 called broadcast(Float [4], src rank 2) at rank1.cc:2"}},
    {"DifferentShapes",
     2,
     {[](Rank& rank) {
        rank.fails(all_reduce({2, 3}), "differ");
      },
      [](Rank& rank) {
        rank.fails(all_reduce({3, 2}), "differ");
      }},
     Kind::kMismatch,
     {0, 1},
     {"all_reduce was called with different arguments", "Float [2, 3]", "Float [3, 2]",
      "error on rank 1: differ"}},
    {"DifferentRoots",
     2,
     {[](Rank& rank) { rank.waits(broadcast(0)); }, [](Rank& rank) { rank.waits(broadcast(1)); }},
     Kind::kMismatch,
     {0, 1},
     {"src rank 0", "src rank 1"}},
    {"LeftOutOneOfSeveral",
     2,
     {[](Rank& rank) {
        rank.waits(async(all_reduce({1}))).waits(async(all_reduce({2}))).waits(async(all_reduce({3})));
      },
      [](Rank& rank) { rank.waits(async(all_reduce({2}))).waits(async(all_reduce({3}))); }},
     Kind::kMismatch,
     {0, 1},
     {"rank 1 seems to have left out all_reduce(SUM, Float [1])"}},
    {"CalledOneInAddition",
     3,
     {[](Rank& rank) { rank.waits(async(all_reduce({2}))).waits(async(all_reduce({3}))); },
      [](Rank& rank) { rank.waits(async(all_reduce({2}))).waits(async(all_reduce({3}))); },
      [](Rank& rank) {
        rank.waits(async(all_reduce({1}))).waits(async(all_reduce({2}))).waits(async(all_reduce({3})));
      }},
     Kind::kMismatch,
     {2},
     {"rank 2 seems to have called all_reduce(SUM, Float [1]) in addition"}},
    {"OneRankAheadBySeveral",
     2,
     {[](Rank& rank) {
        rank.done(all_reduce());
        for (int i = 0; i < 4; ++i) rank.waits(async(all_reduce()));
      },
      [](Rank& rank) { rank.done(all_reduce()); }},
     Kind::kMissing,
     {1},
     {"sequence 2", "called it at rank0.cc:2"}},
    {"InAnotherGroup",
     3,
     {[](Rank& rank) { rank.waits(all_reduce()); }, [](Rank& rank) { rank.waits(all_reduce()); },
      [](Rank& rank) {
        rank.group("pair", {2, 1}).waits(barrier());
      }},
     Kind::kCircular,
     {1, 2},
     {"rank 1 in all_reduce(SUM, Float [4]) at rank1.cc:1 (group \"default\" (ranks 0-2)) waits for rank 2",
      "rank 2 in barrier() at rank2.cc:1 (group \"pair\" (ranks 1 and 2)) waits for rank 1",
      "now it waits in barrier() at rank2.cc:1 (sequence 1 of group \"pair\""}},
    {"ChainOfGroupsEndsAtOneRank",
     3,
     {[](Rank& rank) {
        rank.group("a", {0, 1}).waits(all_reduce());
      },
      [](Rank& rank) {
        rank.group("a", {0, 1}).group("b", {1, 2}).waits(barrier());
      },
      [](Rank& rank) { rank.done(all_reduce()); }},
     Kind::kMissing,
     {1},
     {"In the end all wait for rank 2", "rank 2 has no collective of this group in its record"}},
    {"SendWithoutReceive",
     2,
     {[](Rank& rank) { rank.waits(send(1, 5)); }, [](Rank& rank) { rank.waits(recv(0, 6)); }},
     Kind::kCircular,
     {0, 1},
     {"rank 0 is in send(Float [4], to rank 1, tag 5) at rank0.cc:1",
      "rank 1 has called no matching receive; rank 1: it waits in recv(Float [4], from rank 0, tag 6)",
      "rank 0 has called no matching send"}},
    {"ReceiveWithoutSend",
     2,
     {[](Rank& rank) { rank.done(recv(1)).waits(recv(1)); }, [](Rank& rank) { rank.done(send(0)); }},
     Kind::kUnmatched,
     {1},
     {"rank 0 is in recv(Float [4], from rank 1) at rank0.cc:2, message 2", "has called no matching send"}},
    {"ReceiveFromAnySource",
     3,
     {[](Rank& rank) { rank.waits(recv(-1, 3)); }, [](Rank& rank) { rank.done(send(2, 3)); },
      [](Rank& rank) { rank.done(recv(1, 3)); }},
     Kind::kUnmatched,
     {1, 2},
     {"recv(Float [4], from any rank, tag 3)", "ranks 1 and 2 have called no matching send"}},
    {"AnySourceIsServedByOne",
     3,
     {[](Rank& rank) { rank.waits(recv(-1)); }, [](Rank& rank) { rank.done(barrier()); },
      [](Rank& rank) { rank.done(barrier()).waits(send(0)); }},
     Kind::kInProgress,
     {},
     {"the other side, rank 2, is there", "Nothing is wrong"}},
    {"MessageOfAnotherSize",
     2,
     {[](Rank& rank) { rank.fails(send(1, 0, {9}), "rank 1 expects 16 bytes"); },
      [](Rank& rank) { rank.fails(recv(0), "rank 0 sent 36 bytes"); }},
     Kind::kMismatch,
     {0, 1},
     {"send(Float [9], to rank 1)", "rank 1 is in recv(Float [4], from rank 0)", "rank 1 expects 16 bytes"}},
    {"EverythingCompleted",
     2,
     {[](Rank& rank) { rank.done(3, all_reduce()).done(send(1)); },
      [](Rank& rank) {
        rank.done(3, all_reduce()).done(recv(0)).group("made anew", {0, 1});
      }},
     Kind::kNote,
     {},
     {}},
    {"InProgress",
     2,
     {[](Rank& rank) { rank.done(all_reduce()).waits(all_reduce()); },
      [](Rank& rank) { rank.done(all_reduce()).done(all_reduce()); }},
     Kind::kInProgress,
     {},
     {"is in progress", "Nothing is wrong in these records."}},
    {"FileMissing",
     3,
     {[](Rank& rank) { rank.waits(all_reduce()); }, [](Rank& rank) { rank.waits(all_reduce()); }, nullptr},
     Kind::kUnknown,
     {2},
     {"waits for ranks of which nothing is known", "nothing is known of rank 2, which wrote no record",
      "rank 2 of 3 wrote no record"}},
    {"RankEnded",
     2,
     {[](Rank& rank) { rank.fails(all_reduce(), "rank 1 (pid 77) was killed by signal 9 (SIGKILL)"); },
      nullptr},
     Kind::kUnknown,
     {1},
     {"FAILED: all_reduce", "error on rank 0: rank 1 (pid 77) was killed by signal 9"}},
    {"FileTooOldToTell",
     2,
     {[](Rank& rank) { rank.waits(at(50, all_reduce())); }, [](Rank& rank) { rank.written_at(20); }},
     Kind::kUnknown,
     {1},
     {"the record was written before the others called it", "kill -USR1"}},
    {"CalledWhenOthersHadGivenUp",
     2,
     {[](Rank& rank) { rank.fails(all_reduce(), "timeout"); },
      [](Rank& rank) { rank.fails(at(100, all_reduce()), "group has failed"); }},
     Kind::kLate,
     {1},
     {"99.0 s after the first call", "rank 1 came too late"}},
    {"FailedTogether",
     2,
     {[](Rank& rank) { rank.fails(all_reduce(), "abort"); },
      [](Rank& rank) { rank.fails(all_reduce(), "abort"); }},
     Kind::kFailed,
     {0, 1},
     {"failed, though all members called it alike"}},
    {"ScatterDiffersByNature",
     2,
     {[](Rank& rank) {
        rank.waits({.operation = "scatter", .peer = 0});
        rank.record().entries.back().outputs = {{{4}}, {"Float"}};
        rank.record().entries.back().inputs = {{{4}, {4}}, {"Float", "Float"}};
      },
      [](Rank& rank) {
        rank.waits({.operation = "scatter", .sizes = {}, .peer = 0});
        rank.record().entries.back().outputs = {{{4}}, {"Float"}};
      }},
     Kind::kInProgress,
     {},
     {}},
    {"UnevenAllToAllDiffersByNature",
     2,
     {[](Rank& rank) { rank.waits({.operation = "all_to_all_single", .sizes = {7}}); },
      [](Rank& rank) { rank.waits({.operation = "all_to_all_single", .sizes = {3}}); }},
     Kind::kInProgress,
     {},
     {}},
};

std::vector<Situation> with_findings() {
  std::vector<Situation> result;
  std::copy_if(kSituations.begin(), kSituations.end(), std::back_inserter(result),
               [](const Situation& situation) { return situation.kind != Kind::kNote; });
  return result;
}

INSTANTIATE_TEST_SUITE_P(All, Situations, ::testing::ValuesIn(with_findings()),
                         [](const auto& info) { return info.param.name; });

TEST(FlightAnalysis, OfCompletedOperationsFindsNothing) {
  const auto situation = std::find_if(kSituations.begin(), kSituations.end(),
                                      [](const Situation& each) { return each.kind == Kind::kNote; });
  const Analysis analysis = analysis_of(*situation);
  EXPECT_THAT(analysis.findings, IsEmpty());
  EXPECT_FALSE(analysis.problem());
  EXPECT_THAT(describe(analysis),
              AllOf(HasSubstr("Nothing is wrong in these records."),
                    HasSubstr("rank 0 (pid 1000 on host; timeout): 4 operations; last: send(")));
}

TEST(FlightAnalysis, LeavesOutRecordsOfAnEarlierRun) {
  Rank fresh(0, 2);
  fresh.waits(all_reduce());
  Rank old(1, 2);
  old.record().realtime_ns = 800 * kSecond;  // before rank 0's program started
  Analysis analysis = analyze({fresh.record(), old.record()});
  EXPECT_THAT(analysis.without_record, ElementsAre(1));
  EXPECT_THAT(describe(analysis), HasSubstr("the records of rank 1 are of an earlier run"));
  EXPECT_STREQ(to_string(analysis.findings.front().kind), "unknown");

  Rank other_world(2, 3);
  other_world.record().realtime_ns -= kSecond;
  analysis = analyze({fresh.record(), other_world.record()});
  EXPECT_EQ(analysis.world_size, 2);
  EXPECT_EQ(analysis.ranks.size(), 1U);
}

TEST(FlightAnalysis, CallsACircleOfAsynchronousOperationsUncertain) {
  Rank zero(0, 2);
  zero.group("a", {0, 1}).waits(async(all_reduce()));
  Rank one(1, 2);
  one.group("b", {0, 1}).waits(all_reduce());
  const std::string text = describe(analyze({zero.record(), one.record()}));
  EXPECT_THAT(text,
              AllOf(HasSubstr("CIRCULAR WAIT: ranks 0 and 1"), HasSubstr("asynchronous operations are")));
}

TEST(FlightAnalysis, ShowsNoControlCharactersOfTheRecords) {
  Rank rank(0, 1);
  rank.fails(all_reduce(),
             "red \x1b[31m, \xc2\x9b"
             "2J");
  rank.record().host = "two\nlines";
  const std::string text = describe(analyze({rank.record()}));
  EXPECT_THAT(text, AllOf(Not(HasSubstr("\x1b")), Not(HasSubstr("\xc2\x9b")), HasSubstr("two lines")));
}

TEST(FlightAnalysis, OfNothingIsRefused) {
  EXPECT_THROW(analyze({}), c10::ValueError);
}

}  // namespace
}  // namespace lockstep::flight::analysis_test
