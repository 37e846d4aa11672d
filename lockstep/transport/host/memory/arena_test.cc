#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <random>
#include <string>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/base/process/memory.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/device/host_memory.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/temporary_folder.h>
#include <lockstep/transport/host/memory/arena.h>
#include <lockstep/transport/host/memory/segment.h>

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
      EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % (bytes >= page_bytes() ? page_bytes() : 64), 0u);
      const auto mark = static_cast<unsigned char>(random());
      std::memset(memory, mark, bytes);
      blocks.push_back({memory, bytes, mark});
    } else if (!blocks.empty()) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      const Block block = blocks.back();
      blocks.pop_back();
      // No other rank wrote into it.
      for (size_t i = 0; i < block.bytes; ++i) {
        ASSERT_EQ(block.memory[i], static_cast<std::byte>(block.mark));
      }
      arena.deallocate(block.memory);
    }
  }
  for (const Block& block : blocks) arena.deallocate(block.memory);
  EXPECT_EQ(arena.bytes_in_use(), before);
  // Holes were joined: the whole first segment but the header fits again.
  std::byte* all = arena.allocate(kSegment - page_bytes());
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

// ---- memory that peers may write no more

const size_t kPage = page_bytes();

TEST(Arena, OnlyMemoryWithPagesOfItsOwnIsWritable) {
  Arena arena(kSegment, 64);
  std::byte* block = arena.allocate(3 * kPage + 100);
  EXPECT_TRUE(arena.find_writable(block, 3 * kPage + 100)) << "the rest of the last page belongs to no block";
  EXPECT_TRUE(arena.find_writable(block, 2 * kPage));
  EXPECT_TRUE(arena.find_writable(block + kPage, kPage));
  EXPECT_FALSE(arena.find_writable(block, kPage + 64)) << "ends in the midst of a page";
  EXPECT_FALSE(arena.find_writable(block + 64, 2 * kPage)) << "begins in the midst of a page";
  EXPECT_TRUE(arena.find(block + 64, 2 * kPage));
  std::byte* small = arena.allocate(kPage - 1);
  EXPECT_FALSE(arena.find_writable(small, kPage - 1));
}

TEST(Arena, DetachedMemoryKeepsItsContentAndNoPeerReachesIt) {
  Arena arena(kSegment, 64);
  const size_t before = arena.bytes_in_use();
  const auto own = arena.segment(0);
  const auto peer = Segment::map(UniqueFd(::dup(own->fd())), own->size());
  const auto at_peer = [&](const std::byte* memory) { return peer->data() + (memory - own->data()); };
  for (int round = 0; round < 3; ++round) {
    std::byte* block = arena.allocate(8 * kPage);
    std::memset(block, 1, 8 * kPage);
    arena.detach(block + 2 * kPage, 3 * kPage);
    EXPECT_FALSE(arena.find(block, 8 * kPage));
    EXPECT_FALSE(arena.find(block + 4 * kPage + 5, 1));
    EXPECT_TRUE(arena.find(block, 2 * kPage));
    EXPECT_TRUE(arena.find(block + 5 * kPage, 3 * kPage));
    std::memset(at_peer(block), 7, 8 * kPage);
    EXPECT_EQ(block[2 * kPage - 1], std::byte{7}) << "not detached";
    for (size_t i = 2 * kPage; i < 5 * kPage; ++i) ASSERT_EQ(block[i], std::byte{1});
    EXPECT_EQ(block[5 * kPage], std::byte{7}) << "not detached";
    // Used again only once the owner has given it back and no peer writes any more, in either order.
    if (round == 1) {
      arena.reattach(block + 2 * kPage);
      EXPECT_FALSE(arena.find(block + 2 * kPage, 1)) << "it stays away from the peers while it is in use";
      arena.deallocate(block);
    } else {
      arena.deallocate(block);
      std::byte* other = arena.allocate(8 * kPage);
      EXPECT_NE(other, block);
      arena.deallocate(other);
      arena.reattach(block + 2 * kPage);
    }
    EXPECT_EQ(arena.bytes_in_use(), before);
    std::byte* again = arena.allocate(8 * kPage);
    ASSERT_EQ(again, block);
    EXPECT_TRUE(arena.find(again, 8 * kPage));
    std::memset(again, 9, 8 * kPage);
    EXPECT_EQ(at_peer(again)[3 * kPage], std::byte{9}) << "shared again";
    arena.deallocate(again);
  }
}

TEST(Arena, MemoryThatCouldBeDetachedOnlyInPartIsNotOfferedToPeers) {
  Arena arena(kSegment, 64);
  constexpr size_t kBytes = size_t{20} << 20;  // more than one piece, as Segment::make_private() takes them
  std::byte* block = arena.allocate(kBytes);
  std::memset(block, 1, kBytes);
  const auto reference = arena.find(block, kBytes);
  ASSERT_TRUE(reference);
  failpoint::configure("make_piece_private=errno(" + std::to_string(ENOMEM) + ")@2");
  EXPECT_THAT(testing::message_of<c10::OutOfMemoryError>([&] { arena.detach(block, kBytes); }),
              ::testing::HasSubstr("could not be taken away from the peers"));
  failpoint::configure("");
  EXPECT_TRUE(std::all_of(block, block + kBytes, [](std::byte each) { return each == std::byte{1}; }));
  EXPECT_FALSE(arena.find(block, kBytes)) << "peers would read zeros";
  // Whole again once it has been given back, and no peer writes any more.
  arena.deallocate(block);
  arena.reattach(block);
  std::byte* again = arena.allocate(kBytes);
  ASSERT_EQ(again, block);
  EXPECT_TRUE(arena.find(again, kBytes));
  const auto own = arena.segment(reference->segment);
  const auto peer = Segment::map(UniqueFd(::dup(own->fd())), own->size());
  std::memset(again, 9, kBytes);
  EXPECT_EQ(peer->data()[reference->offset], std::byte{9});
  EXPECT_EQ(peer->data()[reference->offset + kBytes - 1], std::byte{9});
}

TEST(Segment, IsNoFileThatItsPeerCouldShrink) {
  constexpr size_t kBytes = 4096;
  const auto error_of = [](UniqueFd fd) {
    EXPECT_EQ(::ftruncate(fd.get(), kBytes), 0);
    return testing::message_of<c10::DistBackendError>([&] { Segment::map(std::move(fd), kBytes); });
  };
  EXPECT_THAT(error_of(UniqueFd(::memfd_create("lockstep", MFD_CLOEXEC | MFD_ALLOW_SEALING))),
              ::testing::HasSubstr("is not sealed"));
  const testing::TemporaryFolder folder;  // of a file system whose files have no seals at all
  EXPECT_THAT(error_of(UniqueFd(::open(folder.path("file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600))),
              ::testing::HasSubstr("is not sealed"));
}

TEST(Segment, SaysThatFilesMayNotBeSoLarge) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit limit = before;
  limit.rlim_cur = 4096;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const auto text = testing::message_of<c10::DistBackendError>([] { Segment::create(8192); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_THAT(text, ::testing::HasSubstr("a shared-memory segment of 8.0 KiB can't be made"));
  EXPECT_THAT(text, ::testing::HasSubstr("ulimit -f"));
}

TEST(Segment, SaysThatNoDescriptorIsLeftForIt) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit limit = before;
  limit.rlim_cur = 3;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  const auto text = testing::message_of<c10::DistBackendError>([] { Segment::create(4096); });
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_THAT(text, ::testing::HasSubstr("no file descriptor left (ulimit -n is 3"));
}

TEST(Arena, GivesBackWholePages) {
  struct Registrar final : HostMemoryRegistrar {
    bool lock(void*, size_t) noexcept override { return true; }
    void unlock(void*) noexcept override {}
  } registrar;
  constexpr size_t kPages = 10;
  Arena arena(kSegment, 64);
  std::byte* memory = arena.allocate(kPages * kPage);
  const auto pages_given_back = [&](size_t from, size_t bytes) {
    std::memset(memory, 1, kPages * kPage);
    arena.give_back_pages(memory + from, bytes);
    std::vector<size_t> given_back;
    for (size_t page = 0; page < kPages; ++page) {
      const std::byte* begin = memory + page * kPage;
      const auto zeros = static_cast<size_t>(std::count(begin, begin + kPage, std::byte{0}));
      EXPECT_TRUE(zeros == 0 || zeros == kPage) << "page " << page;
      if (zeros == kPage) given_back.push_back(page);
    }
    return given_back;
  };
  using Pages = std::vector<size_t>;
  EXPECT_EQ(pages_given_back(kPage, 2 * kPage), (Pages{1, 2}));
  EXPECT_EQ(pages_given_back(100, 3 * kPage), (Pages{1, 2})) << "it ends within page 3";
  EXPECT_EQ(pages_given_back(100, 100), Pages{});
  EXPECT_EQ(pages_given_back(kPage - 100, 200), Pages{});
  std::vector<std::byte> elsewhere(3 * kPage, std::byte{1});
  arena.give_back_pages(elsewhere.data(), elsewhere.size());
  EXPECT_EQ(std::count(elsewhere.begin(), elsewhere.end(), std::byte{0}), 0);

  // A device copies from and to the pages that it has locked.
  set_host_memory_registrar(c10::DeviceType::PrivateUse1, &registrar);
  arena.page_lock(memory, c10::DeviceType::PrivateUse1);
  set_host_memory_registrar(c10::DeviceType::PrivateUse1, nullptr);
  EXPECT_EQ(pages_given_back(kPage, 2 * kPage), Pages{});
}

}  // namespace
}  // namespace lockstep::transport::arena_test
