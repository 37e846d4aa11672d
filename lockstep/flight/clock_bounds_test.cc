#include <gmock/gmock.h>
#include <map>
#include <random>
#include <string>

#include <gtest/gtest.h>

#include <lockstep/flight/clock_bounds.h>

namespace lockstep::flight::clock_bounds_test {
namespace {

TEST(ClockBounds, LiesBetweenWhatBothDirectionsAllow) {
  ClockBounds bounds;
  bounds.add("a", 1000, "b", 1500);  // b is ahead by at most 500
  bounds.add("a", 2000, "b", 2400);  // by at most 400
  bounds.add("b", 3300, "a", 3000);  // by at least 300
  const auto offsets = bounds.offsets("a");
  EXPECT_EQ(offsets.at("b").ns, 350);
  EXPECT_EQ(offsets.at("b").error_ns, 50);
  EXPECT_EQ(offsets.at("a").ns, 0);
  EXPECT_EQ(bounds.offsets("b").at("a").ns, -350);
}

TEST(ClockBounds, KnowsClocksOverOthersAndNoStrangers) {
  ClockBounds bounds;
  bounds.add("a", 0, "b", 110);
  bounds.add("b", 90, "a", 0);
  bounds.add("b", 0, "c", 15);
  bounds.add("c", 5, "b", 0);
  bounds.add("c", 0, "one side only", 1);
  const auto offsets = bounds.offsets("a");
  EXPECT_EQ(offsets.at("b").ns, 100);
  EXPECT_EQ(offsets.at("c").ns, 110);
  EXPECT_EQ(offsets.at("c").error_ns, 15);
  EXPECT_FALSE(offsets.contains("one side only"));
}

TEST(ClockBounds, ContradictionsAreMetInTheMiddle) {
  ClockBounds bounds;
  bounds.add("a", 0, "b", 100);
  bounds.add("b", 200, "a", 0);
  const auto offsets = bounds.offsets("a");
  EXPECT_EQ(offsets.at("b").ns, 150);
  EXPECT_EQ(offsets.at("b").error_ns, 50);
}

/// Random clocks and messages between them: by the offsets none arrives before it was sent, and the error is one.
TEST(ClockBounds, NoEffectIsBeforeItsCause) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937_64 random(seed);
    const auto below = [&](int64_t most) {
      return static_cast<int64_t>(random() % static_cast<uint64_t>(most));
    };
    const int64_t clocks = 2 + below(5);
    std::map<std::string, int64_t> ahead;
    for (int64_t i = 0; i < clocks; ++i)
      ahead[std::to_string(i)] = i == 0 ? 0 : below(2'000'000'000) - 1'000'000'000;
    struct Message {
      std::string from, to;
      int64_t sent, received;
    };
    std::vector<Message> messages;
    ClockBounds bounds;
    for (int i = 0; i < 200; ++i) {
      const std::string from = std::to_string(below(clocks)), to = std::to_string(below(clocks));
      const int64_t at = below(1'000'000'000'000);
      messages.push_back({from, to, at + ahead[from], at + 1 + below(100'000) + ahead[to]});
      bounds.add(from, messages.back().sent, to, messages.back().received);
    }
    const auto offsets = bounds.offsets("0");
    for (const auto& [clock, offset] : offsets) {
      EXPECT_LE(std::abs(offset.ns - ahead[clock]), offset.error_ns) << "seed " << seed;
    }
    for (const Message& message : messages) {
      if (!offsets.contains(message.from) || !offsets.contains(message.to)) continue;
      EXPECT_LE(message.sent - offsets.at(message.from).ns, message.received - offsets.at(message.to).ns)
          << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace lockstep::flight::clock_bounds_test
