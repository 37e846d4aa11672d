#include <csignal>
#include <cstring>
#include <memory>
#include <unistd.h>

#include <gtest/gtest.h>

#include <lockstep/transport/host/memory/arena.h>
#include <lockstep/transport/host/memory/read_only_view.h>
#include <lockstep/transport/host/memory/segment.h>

namespace lockstep::transport::read_only_view_test {
namespace {

constexpr size_t kPage = 4096;

void write_at(std::byte* address) {
  *reinterpret_cast<volatile std::byte*>(address) = std::byte{1};
}

TEST(ReadOnlyView, SeesWhatIsWrittenThroughTheFirstMapping) {
  const auto segment = Segment::create(4 * kPage);
  const ReadOnlyView view(segment->data() + kPage, 2 * kPage, {});
  EXPECT_NE(view.data(), segment->data() + kPage);
  std::memset(segment->data(), 7, 4 * kPage);
  EXPECT_EQ(std::memcmp(view.data(), segment->data(), view.size()), 0);
  segment->data()[3 * kPage - 1] = std::byte{9};
  EXPECT_EQ(view.data()[2 * kPage - 1], std::byte{9});
}

TEST(ReadOnlyView, OutlivesTheFirstMapping) {
  auto segment = Segment::create(kPage);
  segment->data()[0] = std::byte{5};
  const ReadOnlyView view(segment->data(), kPage, {});
  segment.reset();
  EXPECT_EQ(view.data()[0], std::byte{5});
}

TEST(ReadOnlyViewDeathTest, AWriteEndsTheProcessAndNamesWhatLiesThere) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto segment = Segment::create(2 * kPage);
  const ReadOnlyView other(segment->data(), kPage, {{0, kPage, "something else"}});
  const ReadOnlyView view(
      segment->data(), 2 * kPage,
      {{0, kPage, "parameter 'first.weight'"}, {kPage, kPage, "parameter 'last.weight'"}});
  EXPECT_DEATH(write_at(view.data() + kPage + 10), "has written to parameter 'last.weight', which all ranks");
  EXPECT_DEATH(write_at(view.data()), "has written to parameter 'first.weight'");
}

TEST(ReadOnlyViewDeathTest, AHandlerOfTheProgramRunsAfterTheNote) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        ::signal(SIGSEGV, [](int) { ::_exit(17); });
        const auto segment = Segment::create(kPage);
        const ReadOnlyView view(segment->data(), kPage, {{0, kPage, "parameter 'x'"}});
        write_at(view.data());
      },
      ::testing::ExitedWithCode(17), "parameter 'x'");
}

TEST(ReadOnlyView, OfAnArenasPages) {
  const auto arena = std::make_shared<Arena>(size_t{1} << 20, 0);
  auto* const memory = arena->allocate(3 * kPage);
  ASSERT_EQ(reinterpret_cast<uintptr_t>(memory) % kPage, 0U);
  const ReadOnlyView view(memory, 3 * kPage, {});
  memory[0] = std::byte{3};
  EXPECT_EQ(view.data()[0], std::byte{3});
  arena->deallocate(memory);
}

}  // namespace
}  // namespace lockstep::transport::read_only_view_test
