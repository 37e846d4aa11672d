#include <csignal>
#include <functional>
#include <gmock/gmock.h>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include <lockstep/transport/host/memory/forked_memory.h>
#include <lockstep/transport/host/memory/segment.h>

namespace lockstep::transport::forked_memory_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr size_t kBytes = size_t{1} << 20;

struct Ended {
  int status;
  std::string said;  // on stderr
};

/// What becomes of a forked child that does it, and then ends with status 0.
Ended in_child(const std::function<void()>& action) {
  int pipe[2];
  EXPECT_EQ(::pipe(pipe), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(pipe[1], STDERR_FILENO);
    action();
    ::_exit(0);
  }
  ::close(pipe[1]);
  Ended ended;
  char buffer[512];
  for (ssize_t got = 0; (got = ::read(pipe[0], buffer, sizeof buffer)) > 0;) ended.said.append(buffer, got);
  ::close(pipe[0]);
  ::waitpid(child, &ended.status, 0);
  return ended;
}

void read_at(const std::byte* address) {
  [[maybe_unused]] const auto value = *reinterpret_cast<const volatile std::byte*>(address);
}

TEST(ForkedMemory, AChildThatTouchesItEndsWithAMessage) {
  const auto segment = Segment::create(kBytes);
  segment->data()[0] = std::byte{42};
  for (const size_t offset : {size_t{0}, kBytes / 2, kBytes - 1}) {
    const Ended ended = in_child([&] { read_at(segment->data() + offset); });
    EXPECT_TRUE(WIFEXITED(ended.status)) << ended.status;
    EXPECT_EQ(WEXITSTATUS(ended.status), 1);
    EXPECT_THAT(ended.said, HasSubstr("touched shared memory of its parent"));
  }
  EXPECT_EQ(segment->data()[0], std::byte{42});
}

TEST(ForkedMemory, AChildThatDoesNotTouchItGoesOn) {
  const auto segment = Segment::create(kBytes);
  const Ended ended = in_child([&] {
    if (!is_forked_memory(segment->data() + kBytes - 1) || is_forked_memory(segment->data() + kBytes))
      ::_exit(2);
    const auto own = Segment::create(kBytes);  // of the child itself
    own->data()[1] = std::byte{1};
    if (is_forked_memory(own->data())) ::_exit(3);
  });
  EXPECT_EQ(ended.status, 0);
  EXPECT_THAT(ended.said, IsEmpty());
  EXPECT_FALSE(is_forked_memory(segment->data()));
}

TEST(ForkedMemory, GrandchildrenAreToldToo) {
  const auto segment = Segment::create(kBytes);
  const Ended ended = in_child([&] {
    const Ended grandchild = in_child([&] { read_at(segment->data()); });
    ::_exit(WIFEXITED(grandchild.status) && WEXITSTATUS(grandchild.status) == 1 && !grandchild.said.empty()
                ? 0
                : 1);
  });
  EXPECT_EQ(ended.status, 0);
}

TEST(ForkedMemory, OtherFaultsAreTheProgramsAffair) {
  const auto segment = Segment::create(kBytes);
  void* forbidden = ::mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const Ended killed = in_child([&] { read_at(static_cast<std::byte*>(forbidden)); });
  EXPECT_NE(killed.status, 0);  // by a signal; sanitizers exit with 1, as our handler does
  EXPECT_THAT(killed.said, ::testing::Not(HasSubstr("touched shared memory of its parent")));
  const Ended handled = in_child([&] {
    std::signal(SIGSEGV, [](int) { ::_exit(5); });
    install_forked_memory_handler();
    read_at(static_cast<std::byte*>(forbidden));
  });
  EXPECT_EQ(WEXITSTATUS(handled.status), 5);
  const Ended ours = in_child([&] {
    std::signal(SIGSEGV, [](int) { ::_exit(5); });
    install_forked_memory_handler();
    install_forked_memory_handler();
    read_at(segment->data());
  });
  EXPECT_EQ(WEXITSTATUS(ours.status), 1);
  ::munmap(forbidden, 4096);
}

TEST(ForkedMemory, MemoryThatIsGoneIsNotKept) {
  std::byte* address = nullptr;
  {
    const auto segment = Segment::create(kBytes);
    address = segment->data();
  }
  const Ended ended = in_child([&] {
    if (is_forked_memory(address)) ::_exit(2);
  });
  EXPECT_EQ(ended.status, 0);
}

}  // namespace
}  // namespace lockstep::transport::forked_memory_test
