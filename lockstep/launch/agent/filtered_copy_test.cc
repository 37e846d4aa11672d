#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/launch/agent/filtered_copy.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::launch::filtered_copy_test {
namespace {

struct Copy {
  FilteredCopy of(const std::vector<std::string>& texts) { return {path, texts, "trainer", 2}; }
  std::string content() const { return testing::content_of(path); }

  testing::TemporaryFolder folder;
  std::string path = folder.path("filtered.log");
};

TEST(FilteredCopy, HasWholeLinesThatContainAText) {
  Copy copy;
  FilteredCopy filtered = copy.of({"good", "bad"});
  EXPECT_EQ(copy.content(), "");
  filtered.feed(0, "some\ngo");
  filtered.feed(1, "bad news\n");
  filtered.feed(0, "od news\n\nno");
  filtered.finish(1);
  filtered.feed(0, " end is bad");
  filtered.finish(0);
  EXPECT_EQ(copy.content(), "[trainer1]:bad news\n[trainer0]:good news\n[trainer0]:no end is bad\n");
}

TEST(FilteredCopy, EachStateOfAProgressBarIsALine) {
  Copy copy;
  FilteredCopy filtered = copy.of({"%", "end"});
  filtered.feed(0, "\r10%\r20");
  filtered.feed(0, "%\r");
  filtered.feed(0, "\nend");
  filtered.feed(0, "\r\n");
  EXPECT_EQ(copy.content(), "[trainer0]:10%\n[trainer0]:20%\n[trainer0]:end\n");
}

TEST(FilteredCopy, ACarriageReturnAndANewlineApartEndTwoLines) {
  Copy copy;
  FilteredCopy filtered = copy.of({""});
  filtered.feed(0, "a\r");
  filtered.feed(0, "b");
  filtered.feed(0, "\n\n");
  EXPECT_EQ(copy.content(), "[trainer0]:a\n[trainer0]:b\n[trainer0]:\n");
}

TEST(FilteredCopy, ALongLineIsOneLineAndAnEndlessOneIsCut) {
  Copy copy;
  FilteredCopy filtered = copy.of({"needle"});
  const std::string hay(60000, 'x');
  filtered.feed(0, hay + "nee");
  filtered.feed(0, "dle" + hay);
  filtered.feed(1, "needle\n");
  filtered.feed(0, hay + "\n");
  const std::string expected = "[trainer1]:needle\n[trainer0]:" + hay + "needle" + hay + hay + "\n";
  EXPECT_EQ(copy.content(), expected);
  for (size_t fed = 0; fed < FilteredCopy::kLongestLine + 1; fed += hay.size()) filtered.feed(0, hay);
  filtered.feed(0, "needle\nneedle");
  filtered.finish(0);
  EXPECT_EQ(copy.content(), expected + "[trainer0]:needle\n") << "memory is bounded";
}

}  // namespace
}  // namespace lockstep::launch::filtered_copy_test
