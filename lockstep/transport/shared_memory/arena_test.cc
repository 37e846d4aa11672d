#include <cstring>
#include <random>
#include <vector>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/base/memory.h>
#include <lockstep/transport/shared_memory/arena.h>

namespace lockstep::transport::arena_test {
namespace {

constexpr size_t kSegment = size_t{1} << 20;

TEST(Arena, HandsOutDistinctAlignedMemoryAndTakesItBack) {
  Arena arena(kSegment, 64);
  const size_t before = arena.bytes_in_use();
  std::mt19937 random(7);
  struct Block {
    std::byte* memory;
    size_t bytes;
    unsigned char mark;
  };
  std::vector<Block> blocks;
  for (int step = 0; step < 3000; ++step) {
    if (blocks.size() < 40 && random() % 3 != 0) {
      const size_t bytes = random() % 4 == 0 ? random() % 60000 : random() % 300;
      std::byte* memory = arena.allocate(bytes);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % (bytes >= 4096 ? 4096 : 64), 0u);
      const auto mark = static_cast<unsigned char>(random());
      std::memset(memory, mark, bytes);
      blocks.push_back({memory, bytes, mark});
    } else if (!blocks.empty()) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      const Block block = blocks.back();
      blocks.pop_back();
      // Nobody else wrote into it.
      for (size_t i = 0; i < block.bytes; ++i) {
        ASSERT_EQ(block.memory[i], static_cast<std::byte>(block.mark));
      }
      arena.deallocate(block.memory);
    }
  }
  for (const Block& block : blocks) arena.deallocate(block.memory);
  EXPECT_EQ(arena.bytes_in_use(), before);
  // Holes were joined: the whole first segment but the header fits again.
  std::byte* all = arena.allocate(kSegment - 8192);
  EXPECT_EQ(arena.find(all, 1)->segment, 0u);
}

TEST(Arena, GrowsBySegmentsAndFindsWhatLiesInThem) {
  Arena arena(kSegment, 64);
  std::vector<uint32_t> announced;
  arena.set_listener([&](uint32_t index, const std::shared_ptr<Segment>& segment) {
    announced.push_back(index);
    EXPECT_GE(segment->size(), 3 * kSegment);
  });
  std::byte* large = arena.allocate(3 * kSegment);
  EXPECT_EQ(announced, std::vector<uint32_t>{1});
  const auto reference = arena.find(large + 100, 10);
  ASSERT_TRUE(reference);
  EXPECT_EQ(reference->segment, 1u);
  EXPECT_EQ(arena.segment(1)->data() + reference->offset, large + 100);
  EXPECT_FALSE(arena.find(large + 3 * kSegment - 4, 8)) << "reaches beyond the segment";
  int elsewhere = 0;
  EXPECT_FALSE(arena.find(&elsewhere, sizeof elsewhere));
}

TEST(Arena, RefusesWhatTheMachineDoesNotHave) {
  Arena arena(kSegment, 64);
  const auto limits = read_memory_limits();
  const auto room = static_cast<size_t>(std::min(limits.available, limits.cgroup_left));
  try {
    arena.allocate(room + (size_t{1} << 30));
    FAIL() << "more than there is";
  } catch (const c10::OutOfMemoryError& error) {
    EXPECT_NE(std::string(error.what()).find("shared memory"), std::string::npos);
  }
  EXPECT_NE(arena.allocate(100), nullptr) << "still usable";
}

}  // namespace
}  // namespace lockstep::transport::arena_test
