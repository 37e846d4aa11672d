#include <array>
#include <cstdlib>
#include <fcntl.h>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/base/deadline.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/exception_text.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/base/files/write_all.h>
#include <lockstep/base/process/memory.h>
#include <lockstep/base/text/hex.h>
#include <lockstep/base/unique_fd.h>

namespace lockstep::base_test {
namespace {

using namespace std::chrono_literals;

TEST(Deadline, PassesAndNeverPasses) {
  EXPECT_TRUE(Deadline::after(0ms).expired());
  EXPECT_FALSE(Deadline::after(1h).expired());
  EXPECT_FALSE(Deadline::never().expired());
  EXPECT_EQ(Deadline::never().remaining(7ms), 7ms);
  EXPECT_EQ(Deadline::after(-1ms).remaining(), 0ns);
  EXPECT_EQ(Deadline::after(1h).poll_milliseconds(50ms), 50);
}

TEST(ExceptionText, HasNoStackAlsoOfAnErrorThatTheMessageQuotes) {
  const c10::SourceLocation here{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
  const std::string quoted = std::string(
      "no answer\nException raised from recv at a.hpp:787 (most recent call "
      "first):\nframe #0: recv + 0x9d\n<omitting python frames>\nframe #28: main\n");
  EXPECT_EQ(text_of(c10::DistNetworkError(here, "can't connect: " + quoted)), "can't connect: no answer");
  EXPECT_EQ(text_of(c10::Error(here, "one\n\ntwo\n")), "one\n\ntwo\n");
  EXPECT_EQ(text_of(std::runtime_error(quoted)), quoted);
  const std::string of_a_video = "can't decode:\nframe #12 is damaged\nException raised from a camera\n";
  EXPECT_EQ(text_of(c10::Error(here, of_a_video)), of_a_video.substr(0, of_a_video.size() - 1));
}

TEST(Memory, PagesAreThoseOfTheSystem) {
  EXPECT_EQ(page_bytes(), static_cast<size_t>(::sysconf(_SC_PAGESIZE)));
}

TEST(Hex, WritesAndReadsBytes) {
  using namespace std::string_view_literals;
  const auto bytes = "\x00\x7f\x80\xff a"sv;
  EXPECT_EQ(to_hex(bytes), "007f80ff2061");
  EXPECT_EQ(from_hex("007F80ff2061"), bytes);
  EXPECT_EQ(from_hex(""), "");
  for (const auto* bad : {"0", "0g", "-1", "+1", "0x", " 1", "1 "})
    EXPECT_EQ(from_hex(bad), std::nullopt) << bad;
}

TEST(WriteAll, WaitsForAReaderWhereTheDescriptorDoesNotBlock) {
  std::array<int, 2> ends = {-1, -1};
  ASSERT_EQ(::pipe2(ends.data(), O_CLOEXEC), 0);
  const UniqueFd reads(ends[0]);
  UniqueFd writes(ends[1]);
  ASSERT_EQ(::fcntl(writes.get(), F_SETFL, O_NONBLOCK), 0);
  const std::string text(1 << 20, 'x');
  const ssize_t filled = ::write(writes.get(), text.data(), text.size());
  ASSERT_GT(filled, 0);
  size_t seen = 0;
  std::thread reader([&] {
    std::array<char, 4096> buffer{};
    for (ssize_t got = 0; (got = ::read(reads.get(), buffer.data(), buffer.size())) > 0;)
      seen += static_cast<size_t>(got);
  });
  EXPECT_EQ(write_all(writes.get(), text), text.size());
  writes.reset();
  reader.join();
  EXPECT_EQ(seen, static_cast<size_t>(filled) + text.size());
}

TEST(Environment, ReadsTypedValuesAndNamesWhatIsWrong) {
  ::setenv("LOCKSTEP_TEST_VARIABLE", "12", 1);
  EXPECT_EQ(environment::integer("LOCKSTEP_TEST_VARIABLE"), 12);
  try {
    environment::integer("LOCKSTEP_TEST_VARIABLE", 0, 11);
    FAIL() << "12 is outside 0 to 11";
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find("LOCKSTEP_TEST_VARIABLE is 12"), std::string::npos);
  }
  ::setenv("LOCKSTEP_TEST_VARIABLE", "12x", 1);
  EXPECT_THROW(environment::integer("LOCKSTEP_TEST_VARIABLE"), c10::ValueError);
  EXPECT_THROW(environment::flag("LOCKSTEP_TEST_VARIABLE"), c10::ValueError);
  ::setenv("LOCKSTEP_TEST_VARIABLE", "", 1);
  EXPECT_EQ(environment::integer("LOCKSTEP_TEST_VARIABLE"), std::nullopt);
  ::setenv("LOCKSTEP_TEST_VARIABLE", "On", 1);
  EXPECT_TRUE(environment::flag("LOCKSTEP_TEST_VARIABLE"));
  ::unsetenv("LOCKSTEP_TEST_VARIABLE");
  EXPECT_FALSE(environment::flag("LOCKSTEP_TEST_VARIABLE"));
}

TEST(Failpoint, StrikesAtTheCountedPass) {
  failpoint::configure("a=error(broken)@2;b=delay(0)");
  EXPECT_NO_THROW(failpoint::here("a"));
  EXPECT_THROW(failpoint::here("a"), c10::Error);
  EXPECT_NO_THROW(failpoint::here("a"));
  EXPECT_NO_THROW(failpoint::here("b"));
  EXPECT_NO_THROW(failpoint::here("elsewhere"));
  failpoint::configure("read=errno(5)@2");
  EXPECT_EQ(failpoint::fails_with("read"), 0);
  EXPECT_EQ(failpoint::fails_with("read"), 5);
  EXPECT_EQ(failpoint::fails_with("read"), 0);
  EXPECT_THROW(failpoint::configure("a"), c10::ValueError);
  EXPECT_THROW(failpoint::configure("a=explode(1)"), c10::ValueError);
  EXPECT_THROW(failpoint::configure("a=exit(x)"), c10::ValueError);
  failpoint::configure("");
}

}  // namespace
}  // namespace lockstep::base_test
