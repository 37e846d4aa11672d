#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include <gtest/gtest.h>

#include <lockstep/base/process/bounded_queue.h>

namespace lockstep::bounded_queue_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

TEST(BoundedQueue, ItemsComeInOrderAndTakeNoMoreThanTheLimit) {
  constexpr int kItems = 1000;
  constexpr int64_t kLimit = 3;
  BoundedQueue<std::unique_ptr<int>> queue(kLimit);
  std::thread maker([&] {
    for (int i = 0; i < kItems && queue.reserve(1); ++i) queue.push(std::make_unique<int>(i));
  });
  for (int i = 0; i < kItems; ++i) {
    const auto item = queue.pop();
    ASSERT_TRUE(item.has_value());
    EXPECT_EQ(**item, i);
    EXPECT_LE(queue.in_use(), kLimit);
    queue.release(1);
  }
  maker.join();
  EXPECT_EQ(queue.in_use(), 0);
}

TEST(BoundedQueue, AnItemLargerThanTheLimitIsMadeAlone) {
  BoundedQueue<int> queue(10);
  ASSERT_TRUE(queue.reserve(100));
  queue.push(1);
  std::atomic<bool> reserved{false};
  std::thread maker([&] {
    EXPECT_TRUE(queue.reserve(1));
    reserved = true;
  });
  EXPECT_EQ(queue.pop(), 1);
  EXPECT_FALSE(reserved);  // the first one is in use
  queue.release(100);
  maker.join();
  EXPECT_EQ(queue.in_use(), 1);
}

TEST(BoundedQueue, AnItemTakesTheRoomThatItIsPushedWith) {
  BoundedQueue<int> queue(10);
  ASSERT_TRUE(queue.reserve(6));
  queue.push(1, -2);
  EXPECT_EQ(queue.in_use(), 4);
  ASSERT_TRUE(queue.reserve(6));
  queue.push(2, 5);
  EXPECT_EQ(queue.in_use(), 15);
}

TEST(BoundedQueue, StopEndsBothThreadsWaitsAndLeavesItems) {
  BoundedQueue<int> full(1);
  ASSERT_TRUE(full.reserve(1));
  full.push(1);
  BoundedQueue<int> empty(1);
  std::thread maker([&] { EXPECT_FALSE(full.reserve(1)); });
  std::thread user([&] { EXPECT_EQ(empty.pop(), std::nullopt); });
  EXPECT_FALSE(empty.stopped());
  full.stop();
  empty.stop();
  maker.join();
  user.join();
  EXPECT_TRUE(empty.stopped());
  EXPECT_EQ(full.pop(), 1);
  EXPECT_EQ(full.pop(), std::nullopt);
}

TEST(BoundedQueue, PopEndsAtItsTimeout) {
  BoundedQueue<int> queue(1);
  EXPECT_EQ(queue.pop(nanoseconds(0)), std::nullopt);
  EXPECT_EQ(queue.pop(milliseconds(1)), std::nullopt);
  EXPECT_FALSE(queue.stopped());
  ASSERT_TRUE(queue.reserve(1));
  queue.push(1);
  EXPECT_EQ(queue.pop(nanoseconds(0)), 1);
}

}  // namespace
}  // namespace lockstep::bounded_queue_test
