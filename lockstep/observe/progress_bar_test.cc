#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <gmock/gmock.h>
#include <thread>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/base/log.h>
#include <lockstep/observe/progress_bar.h>

namespace lockstep::progress_bar_test {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

ProgressState halfway() {
  return {.description = "epoch 1",
          .done = 30000,
          .total = 60000,
          .elapsed = 12.9,
          .rate = 2250,
          .unit = "images",
          .postfix = "loss=0.31",
          .ascii = true};
}

size_t code_points(const std::string& text) {
  return static_cast<size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

TEST(FormatProgress, FillsTheWidth) {
  EXPECT_EQ(format_progress(halfway(), 80),
            "epoch 1:  50%|######       | 30000/60000 [00:12<00:13, 2250 images/s, loss=0.31]");
  auto blocks = halfway();
  blocks.ascii = false;
  blocks.done = 31875;  // 53.125 %: 6.9 of 13 columns
  EXPECT_EQ(format_progress(blocks, 80),
            "epoch 1:  53%|██████▉      | 31875/60000 [00:12<00:12, 2250 images/s, loss=0.31]");
}

TEST(FormatProgress, ForALogHasNoBar) {
  EXPECT_EQ(format_progress(halfway(), 0),
            "epoch 1:  50% 30000/60000 [00:12<00:13, 2250 images/s, loss=0.31]");
}

TEST(FormatProgress, GivesUpPartByPartWhenTheTerminalIsNarrow) {
  EXPECT_EQ(format_progress(halfway(), 66),
            "epoch 1:  50% 30000/60000 [00:12<00:13, 2250 images/s, loss=0.31]");
  EXPECT_EQ(format_progress(halfway(), 60), "epoch 1:  50% 30000/60000 [00:12<00:13, 2250 images/s]");
  EXPECT_EQ(format_progress(halfway(), 50), " 50% 30000/60000 [00:12<00:13, 2250 images/s]");
  EXPECT_EQ(format_progress(halfway(), 7), " 50% 30");
  for (auto state : {halfway(), ProgressState{.description = "größer", .done = 7, .postfix = "ü=1"}}) {
    for (const bool ascii : {true, false}) {
      state.ascii = ascii;
      for (int width = 1; width < 200; ++width) {
        EXPECT_LE(code_points(format_progress(state, width)), static_cast<size_t>(width)) << width;
      }
    }
  }
}

TEST(FormatProgress, TheRateMayCountOtherThingsThanTheBar) {
  ProgressState state{.done = 30,
                      .total = 60,
                      .elapsed = 10,
                      .rate = 3,
                      .rate_scale = 512,
                      .unit = "batches",
                      .rate_unit = "samples"};
  EXPECT_EQ(format_progress(state, 0), " 50% 30/60 [00:10<00:10, 1536 samples/s]")
      << "the time left is the bar's";
}

TEST(FormatProgress, WithUnknownOrPassedTotalOrNoTimeYet) {
  ProgressState state{.done = 27, .elapsed = 3725, .rate = 0.125, .unit = "files"};
  EXPECT_EQ(format_progress(state, 80), "27 files [1:02:05, 0.125 files/s]");
  state.total = 26;
  EXPECT_EQ(format_progress(state, 80), "27 files [1:02:05, 0.125 files/s]");
  EXPECT_EQ(format_progress({.total = 4}, 0), "  0% 0/4 [00:00<?, ? it/s]");
  EXPECT_EQ(format_progress({.done = 4, .total = 4, .ascii = true}, 39),
            "100%|#######| 4/4 [00:00<00:00, ? it/s]");
  EXPECT_EQ(format_progress({}, 80), "0 it [00:00, ? it/s]");
  EXPECT_EQ(format_progress({.done = -3, .total = 4}, 80), "-3 it [00:00, ? it/s]") << "update(-3)";
}

TEST(FormatProgress, TellsTheShareOfWaitingForDataWhereItIsKnown) {
  auto state = halfway();
  state.waiting = 0.034;
  EXPECT_EQ(format_progress(state, 0),
            "epoch 1:  50% 30000/60000 [00:12<00:13, 2250 images/s, 3% waiting for data, loss=0.31]");
  EXPECT_EQ(format_progress(state, 60), "epoch 1:  50% 30000/60000 [00:12<00:13, 2250 images/s]");
  state.postfix = "";
  const std::vector<std::pair<double, std::string>> shares = {
      {0.0, "0%"}, {1.7, "100%"}, {-1.0, "0%"}, {0.996, "100%"}};
  for (const auto& [share, shown] : shares) {
    state.waiting = share;
    EXPECT_THAT(format_progress(state, 0), HasSubstr(", " + shown + " waiting for data]"));
  }
  state.waiting = std::nan("");
  EXPECT_THAT(format_progress(state, 0), Not(HasSubstr("waiting")));
}

TEST(FormatProgress, KeepsToOneLine) {
  ProgressState state{.description = "a\nb\x1b[2J", .done = 1, .unit = "x\r", .postfix = "c=\n"};
  EXPECT_EQ(format_progress(state, 0), "a b [2J: 1 x  [00:00, ? x /s, c= ]");
}

TEST(FormatProgress, ExtremeNumbersAreShown) {
  ProgressState state{.done = INT64_MAX, .total = INT64_MAX, .elapsed = 1e300, .rate = 1e300};
  EXPECT_THAT(format_progress(state, 0), HasSubstr("9223372036854775807/9223372036854775807"));
  state.rate = std::nan("");
  EXPECT_THAT(format_progress(state, 0), HasSubstr("[?<00:00, ? it/s]"));
}

/// A bar that writes into a temporary file, with a clock that the test moves.
class ProgressBarTest : public ::testing::Test {
 protected:
  ProgressBarTest() : file_(std::tmpfile()) {}
  ~ProgressBarTest() override { std::fclose(file_); }

  ProgressBarOptions options(bool terminal) {
    return {.unit = "images",
            .fd = ::fileno(file_),
            .terminal = terminal,
            .width = terminal ? std::optional<int>(81) : std::nullopt,
            .ascii = true,
            .clock = [this] { return now_; }};
  }

  std::string written() {
    std::rewind(file_);
    std::string text;
    for (int c = std::fgetc(file_); c != EOF; c = std::fgetc(file_)) text += static_cast<char>(c);
    return text;
  }
  /// What stands between the separators.
  std::vector<std::string> pieces(char separator) {
    std::vector<std::string> result(1);
    for (const char c : written()) {
      if (c == separator) {
        result.emplace_back();
      } else {
        result.back() += c;
      }
    }
    return result;
  }

  std::FILE* file_;
  std::chrono::steady_clock::time_point now_{};
};

TEST_F(ProgressBarTest, RedrawsATerminalEvery100Milliseconds) {
  {
    ProgressBar bar(100, "train", options(true));
    bar.set_postfix("loss", 0.123456);
    for (int i = 0; i < 100; ++i) {
      now_ += 10ms;
      bar.update();
    }
  }
  const auto frames = pieces('\r');
  ASSERT_EQ(frames.size(), 1 + 1 + 10 + 1U)
      << "before the first, at the start, one each 100 ms, the final one";
  EXPECT_THAT(frames[1], HasSubstr("train:   0%|"));
  EXPECT_THAT(frames[6], HasSubstr(" 50/100 [00:00<00:00, 100 images/s, loss=0.1235]\x1b[K"));
  EXPECT_THAT(frames[12], HasSubstr("100/100 [00:01<00:00, 100 images/s, loss=0.1235]\x1b[K\n"));
  EXPECT_EQ(std::count(frames[12].begin(), frames[12].end(), '\n'), 1);
}

TEST_F(ProgressBarTest, ADumbTerminalGetsNoEscapeSequences) {
  const char* before = std::getenv("TERM");
  const std::string kept = before == nullptr ? "" : before;
  ::setenv("LOCKSTEP_TERMINAL_COLUMNS", "80", 1);  // as a launcher on a terminal sets it
  for (const bool dumb : {true, false}) {
    ::setenv("TERM", dumb ? "dumb" : "xterm", 1);
    auto default_options = options(false);
    default_options.terminal.reset();
    ProgressBar(100, "train", default_options).update(100);
    EXPECT_EQ(written().find('\x1b') == std::string::npos, dumb) << written();
  }
  ::unsetenv("LOCKSTEP_TERMINAL_COLUMNS");
  if (before == nullptr) {
    ::unsetenv("TERM");
  } else {
    ::setenv("TERM", kept.c_str(), 1);
  }
}

TEST_F(ProgressBarTest, WritesALogLineAtEachTenth) {
  ProgressBar bar(100, "train", options(false));
  for (int i = 0; i < 100; ++i) {
    now_ += 250ms;
    bar.update();
  }
  bar.finish();
  const auto lines = pieces('\n');
  ASSERT_EQ(lines.size(), 9 + 1 + 1U) << "the tenths, the final one, and what follows it";
  EXPECT_EQ(lines[0], "train:  10% 10/100 [00:02<00:22, 4 images/s]");
  EXPECT_EQ(lines[9], "train: 100% 100/100 [00:25<00:00, 4 images/s]");
  EXPECT_EQ(lines[10], "");
}

TEST_F(ProgressBarTest, LogLinesStayASecondApartAndComeAtLeastEachMinute) {
  {
    ProgressBar fast(100, "", options(false));
    for (int i = 0; i < 100; ++i) {
      now_ += 1ms;
      fast.update();
    }
    EXPECT_EQ(written(), "");
  }
  EXPECT_EQ(written(), "100% 100/100 [00:00<00:00, 1000 images/s]\n");
  ProgressBar slow(0, "", options(false));
  for (int i = 0; i < 3; ++i) {
    now_ += 30s;
    slow.update();
  }
  EXPECT_THAT(pieces('\n'), ElementsAre(HasSubstr("100%"), "2 images [01:00, 0.0333 images/s]", ""));
}

TEST_F(ProgressBarTest, TheRateFollowsTheRecentPast) {
  ProgressBar bar(1000000, "", options(true));
  now_ += 1s;
  bar.update(1000);
  for (int i = 0; i < 30; ++i) {
    now_ += 1s;
    bar.update(10);
  }
  EXPECT_THAT(pieces('\r').back(), HasSubstr("10 images/s")) << "not the 42 of the whole time";
  bar.finish();
  EXPECT_THAT(pieces('\r').back(), HasSubstr("41.9 images/s")) << "1300 images in 31 s";
}

TEST_F(ProgressBarTest, PostfixKeepsItsOrderAndTakesText) {
  ProgressBar bar(2, "", options(false));
  bar.set_postfix("loss", 2);
  bar.set_postfix("phase", "warm-up");
  bar.set_postfix("loss", 1e-5);
  bar.finish();
  EXPECT_THAT(written(), HasSubstr(", loss=1e-05, phase=warm-up]"));
}

TEST_F(ProgressBarTest, CountsTheWaitingSinceItsStart) {
  double waited = 1000;  // in earlier epochs
  auto waiting = options(false);
  waiting.waited = [&] { return waited; };
  ProgressBar bar(100, "", waiting);
  now_ += 10s;
  waited += 2.5;
  bar.update(10);
  now_ += 10s;
  bar.update(90);
  bar.finish();
  EXPECT_THAT(pieces('\n'), ElementsAre(HasSubstr("images/s, 25% waiting for data]"),
                                        HasSubstr("images/s, 12% waiting for data]"), ""));
}

TEST_F(ProgressBarTest, IsSilentWhenQuietOrFinished) {
  {
    auto quiet = options(true);
    quiet.quiet = true;
    ProgressBar bar(2, "", quiet);
    now_ += 1h;
    bar.update(2);
    EXPECT_EQ(bar.done(), 2);
  }
  EXPECT_EQ(written(), "");
  ProgressBar bar(2, "", options(false));
  bar.update();
  bar.finish();
  const std::string before = written();
  now_ += 1h;
  bar.update();
  bar.finish();
  EXPECT_EQ(written(), before);
}

/// What a terminal of 80 columns shows after `bytes`: as many lines as were begun.
std::vector<std::string> screen(const std::string& bytes) {
  std::vector<std::string> lines(1);
  size_t column = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] == '\n') {
      lines.emplace_back();
      column = 0;
    } else if (bytes[i] == '\r') {
      column = 0;
    } else if (bytes.compare(i, 3, "\x1b[K") == 0) {
      lines.back().resize(column);
      i += 2;
    } else {
      lines.back().resize(std::max(lines.back().size(), column + 1));
      lines.back()[column++] = bytes[i];
    }
  }
  return lines;
}

TEST_F(ProgressBarTest, OtherLinesStandAboveTheBarAndLeaveItWhole) {
  // The log goes to standard error, which is where bars are by default.
  const int standard_error = ::dup(STDERR_FILENO);
  ::dup2(::fileno(file_), STDERR_FILENO);
  {
    auto terminal = options(true);
    terminal.fd = STDERR_FILENO;
    ProgressBar bar(100, "train", terminal);
    now_ += 1s;
    bar.update(50);
    bar.write("epoch 1: accuracy 0.87");
    LOCKSTEP_LOG(kError) << "a line of the log";
    EXPECT_THAT(screen(written()),
                ElementsAre("epoch 1: accuracy 0.87", HasSubstr("error: a line of the log"),
                            HasSubstr("train:  50%|")));
    now_ += 1s;
    bar.update(50);
    std::thread([] { LOCKSTEP_LOG(kError) << "of another thread"; }).join();
  }
  LOCKSTEP_LOG(kError) << "afterwards";
  ::dup2(standard_error, STDERR_FILENO);
  ::close(standard_error);
  EXPECT_THAT(screen(written()), ElementsAre("epoch 1: accuracy 0.87", HasSubstr("a line of the log"),
                                             HasSubstr("of another thread"), HasSubstr("train: 100%|"),
                                             HasSubstr("error: afterwards"), ""));
}

TEST_F(ProgressBarTest, WritesPlainLinesIntoALogAndNoneWhenQuiet) {
  ProgressBar bar(2, "", options(false));
  bar.write("one");
  bar.finish();
  bar.write("two");
  auto quiet = options(false);
  quiet.quiet = true;
  ProgressBar(2, "", quiet).write("three");
  EXPECT_THAT(pieces('\n'), ElementsAre("one", HasSubstr("0/2"), "two", ""));
}

TEST_F(ProgressBarTest, SurvivesAClosedDescriptorAndAnEmptyTotal) {
  auto closed = options(true);
  closed.fd = -1;
  { ProgressBar bar(2, "", closed); }
  { ProgressBar bar(0, "", options(false)); }
  EXPECT_EQ(written(), "0 images [00:00, ? images/s]\n");
  EXPECT_THROW(ProgressBar(-1), c10::ValueError);
}

}  // namespace
}  // namespace lockstep::progress_bar_test
