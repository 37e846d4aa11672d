#include <atomic>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/base/process/per_process.h>

namespace lockstep::per_process_test {
namespace {

TEST(PerProcess, IsTheSameInAllThreads) {
  static PerProcess<int> number;
  std::vector<std::thread> threads;
  std::atomic<int*> first{nullptr};
  std::atomic<int> others{0};
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      int* mine = &number.get();
      int* expected = nullptr;
      if (!first.compare_exchange_strong(expected, mine) && expected != mine) ++others;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(others, 0);
}

TEST(PerProcess, AForkedChildHasItsOwn) {
  static PerProcess<int> number;
  number.get() = 7;
  const pid_t child = ::fork();
  if (child == 0) {
    const bool fresh = number.get() == 0;
    number.get() = 8;
    ::_exit(fresh && number.get() == 8 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(number.get(), 7);
}

}  // namespace
}  // namespace lockstep::per_process_test
