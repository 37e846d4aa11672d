#include <future>
#include <latch>
#include <memory>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include <gtest/gtest.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/base/process/thread_cache.h>

namespace lockstep::thread_cache_test {
namespace {

TEST(ThreadCache, TasksThatWaitForEachOtherAllRun) {
  constexpr int kTasks = 20;
  std::latch together(kTasks);
  std::latch done(kTasks);
  for (int i = 0; i < kTasks; ++i) {
    run_in_background([&] {
      together.arrive_and_wait();  // returns only when all tasks run at once
      done.count_down();
    });
  }
  done.wait();
  EXPECT_GE(background_thread_count(), kTasks);
}

TEST(ThreadCache, ThreadsAreUsedAgainAndEndWhenIdle) {
  for (int i = 0; i < 200; ++i) {
    std::promise<std::thread::id> ran;
    run_in_background([&] { ran.set_value(std::this_thread::get_id()); });
    EXPECT_NE(ran.get_future().get(), std::this_thread::get_id());
  }
  EXPECT_LE(background_thread_count(), 40);
  while (background_thread_count() > 0) std::this_thread::yield();  // the test's own time limit bounds it
}

TEST(ThreadCache, WhatATaskHoldsGoesWhenItHasRunAlsoIfItsThreadIsUsedFurther) {
  std::thread::id first;
  std::thread::id next;
  bool held_on = true;
  do {  // until one thread has run both: it may end between them
    auto held = std::make_shared<int>(1);
    std::weak_ptr<int> watched = held;
    std::promise<std::thread::id> ran;
    run_in_background([held = std::move(held), &ran] { ran.set_value(std::this_thread::get_id()); });
    first = ran.get_future().get();
    std::promise<std::thread::id> ran_next;
    run_in_background([&] {
      held_on = !watched.expired();
      ran_next.set_value(std::this_thread::get_id());
    });
    next = ran_next.get_future().get();
  } while (next != first);
  EXPECT_FALSE(held_on);
}

TEST(ThreadCache, SaysWhereTheSystemGivesNoThread) {
  while (background_thread_count() > 0) std::this_thread::yield();  // an idle one would take the task
  failpoint::configure("start_thread=errno(11)");
  EXPECT_FALSE(run_in_background([] { ADD_FAILURE() << "the task runs"; }));
  EXPECT_EQ(background_thread_count(), 0);
  failpoint::configure("");
  std::promise<void> ran;
  EXPECT_TRUE(run_in_background([&] { ran.set_value(); }));
  ran.get_future().get();
}

TEST(ThreadCache, AForkedChildHasThreadsOfItsOwn) {
  std::promise<void> ran;
  run_in_background([&] { ran.set_value(); });
  ran.get_future().get();
  const pid_t child = ::fork();
  if (child == 0) {
    std::promise<void> here;
    run_in_background([&] { here.set_value(); });
    here.get_future().get();
    ::_exit(7);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7);
}

}  // namespace
}  // namespace lockstep::thread_cache_test
