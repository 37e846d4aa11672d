#include <gtest/gtest.h>

#include <lockstep/launch/agent/line_forwarder.h>

namespace lockstep::launch::line_forwarder_test {
namespace {

TEST(LineForwarder, EmitsWholeLinesWithTheirPrefix) {
  LineForwarder lines({"[0] ", "[1] "});
  EXPECT_EQ(lines.feed(0, "one\ntw"), "[0] one\n");
  EXPECT_EQ(lines.feed(1, "a\nb\n\n"), "[1] a\n[1] b\n[1] \n");
  EXPECT_EQ(lines.feed(0, "o\r\nthree"), "[0] two\n") << "a carriage return before the newline belongs to it";
  EXPECT_TRUE(lines.holds_back(0));
  EXPECT_EQ(lines.finish(0), "[0] three\n");
  EXPECT_EQ(lines.finish(1), "");
}

TEST(LineForwarder, BytesMayComeInAnyPieces) {
  const std::string text = "x\r\ny\rz\nlast";
  LineForwarder at_once({"> "});
  std::string expected = at_once.feed(0, text);
  expected += at_once.finish(0);
  EXPECT_EQ(expected, "> x\n> z\n> last\n");
  LineForwarder bytewise({"> "});
  std::string out;
  for (char byte : text) out += bytewise.feed(0, {&byte, 1});
  EXPECT_EQ(out + bytewise.finish(0), expected);
}

TEST(LineForwarder, AnUnfinishedLineIsShownWhenItsSourceIsIdle) {
  LineForwarder lines({"[0] ", "[1] "});
  EXPECT_EQ(lines.feed(0, "name? "), "");
  EXPECT_EQ(lines.flush(0), "[0] name? ");
  EXPECT_FALSE(lines.holds_back(0));
  EXPECT_EQ(lines.flush(0), "");
  EXPECT_EQ(lines.feed(0, "Ada\n"), "Ada\n") << "the same row goes on";
  lines.feed(0, "par");
  EXPECT_EQ(lines.flush(0), "[0] par");
  EXPECT_EQ(lines.feed(1, "other\n"), "\n[1] other\n") << "two sources never share a row";
  EXPECT_EQ(lines.feed(0, "tial\n"), "[0] tial\n");
  lines.feed(0, "end");
  lines.flush(0);
  EXPECT_EQ(lines.finish(0), "\n");
}

TEST(LineForwarder, ElsewhereABarLeavesItsLastState) {
  LineForwarder lines({"[0] "});
  EXPECT_EQ(lines.feed(0, "\r10%\r50%"), "");
  EXPECT_FALSE(lines.holds_back(0)) << "idle bars stay out of log files";
  EXPECT_EQ(lines.feed(0, "\r100%\n"), "[0] 100%\n");
  lines.feed(0, "10%\r20%\r");
  EXPECT_EQ(lines.finish(0), "[0] 20%\n");
  lines.feed(0, "wait ");
  EXPECT_EQ(lines.flush(0), "[0] wait ");
  EXPECT_EQ(lines.feed(0, "\rdone\n"), "\n[0] done\n") << "what is written to a file can't be drawn over";
}

TEST(LineForwarder, OnATerminalABarIsDrawnInPlace) {
  LineForwarder lines({"[0] ", "[1] "}, 80);
  EXPECT_EQ(lines.feed(0, "\r10%"), "\r\x1b[K[0] 10%");
  EXPECT_EQ(lines.feed(0, "\r20%\r30%"), "\r\x1b[K[0] 30%") << "states that are never seen are left out";
  EXPECT_EQ(lines.feed(1, "hello\n"), "\r\x1b[K[1] hello\n[0] 30%") << "the line goes above the bar";
  EXPECT_EQ(lines.feed(1, "\rbar"), "\r\x1b[K\r\x1b[K[1] bar");
  EXPECT_EQ(lines.feed(0, "\r100%\n"), "\r\x1b[K[0] 100%\n[1] bar");
  EXPECT_EQ(lines.finish(1), "\r\x1b[K[1] bar\n");
  EXPECT_EQ(lines.feed(0, "40%\r"), "\r\x1b[K[0] 40%") << "bars that end with the carriage return";
}

TEST(LineForwarder, ABarIsClippedToTheTerminal) {
  LineForwarder lines({"> "}, 5);
  EXPECT_EQ(lines.feed(0, "\r123456789"), "\r\x1b[K> 123");
  EXPECT_EQ(lines.feed(0, "\r\x1b[32m\xe2\x96\x88\xe2\x96\x88\xe2\x96\x88\xe2\x96\x88\x1b[0m"),
            "\r\x1b[K> \x1b[32m\xe2\x96\x88\xe2\x96\x88\xe2\x96\x88\x1b[0m")
      << "code points are counted and colours are not";
  EXPECT_EQ(lines.feed(0, "\n"),
            "\r\x1b[K> \x1b[32m\xe2\x96\x88\xe2\x96\x88\xe2\x96\x88\xe2\x96\x88\x1b[0m\n");
}

TEST(LineForwarder, AnEndlessLineIsPassedOnInParts) {
  LineForwarder lines({"> "});
  std::string out;
  const std::string part(10000, 'x');
  for (int i = 0; i < 10; ++i) out += lines.feed(0, part);
  EXPECT_GT(out.size(), LineForwarder::kLongestLine) << "memory is bounded";
  out += lines.feed(0, "\n");
  EXPECT_EQ(out, "> " + std::string(100000, 'x') + "\n");
  std::string bar = lines.feed(0, "\r" + std::string(200000, 'y') + "\n");
  EXPECT_EQ(bar.size(), LineForwarder::kLongestLine + 3);
}

TEST(LineTail, KeepsTheLastLines) {
  LineTail tail;
  EXPECT_TRUE(tail.lines().empty());
  for (int i = 0; i < 30; ++i) tail.feed(std::to_string(i) + "\n");
  EXPECT_EQ(tail.lines().size(), LineTail::kLines);
  EXPECT_EQ(tail.lines().front(), "10");
  tail.feed("bar 1\rbar 2\r");
  tail.feed("bar 3");
  EXPECT_EQ(tail.lines().size(), LineTail::kLines);
  EXPECT_EQ(tail.lines().back(), "bar 3");
  tail.feed("\r\n" + std::string(5000, 'x') + "\n");
  EXPECT_EQ(tail.lines()[LineTail::kLines - 2], "bar 3");
  EXPECT_EQ(tail.lines().back().size(), LineTail::kLineBytes);
}

TEST(LineTail, LeavesStacksOut) {
  LineTail tail;
  tail.feed("  what():  no such data\nException raised from read at data.cc:7 (most recent call first):\n");
  for (int i = 0; i < 30; ++i) tail.feed("frame #" + std::to_string(i) + ": main + 0x85 (0x7f in train)\n");
  tail.feed("[rank 1] frame #30: main + 0x85 (0x7f in train)\n");
  tail.feed("\nAborted\n");
  EXPECT_EQ(tail.lines(), (std::vector<std::string>{"  what():  no such data", "", "Aborted"}));
}

}  // namespace
}  // namespace lockstep::launch::line_forwarder_test
