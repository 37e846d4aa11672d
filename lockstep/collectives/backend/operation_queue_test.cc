#include <gmock/gmock.h>
#include <thread>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/base/process/thread_cache.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/testing/memory_bound.h>
#include <lockstep/testing/multi_rank.h>

// Futures: their callbacks may wait for further operations, as torch's PowerSGD hook does.
namespace lockstep::operation_queue_test {
namespace {

using testing::run_ranks;

class Futures : public ::testing::Test {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "libtorch, which is not instrumented, frees the tensors: that looks like a race";
#endif
  }
};

c10::intrusive_ptr<c10::ivalue::Future> reduce(at::Tensor tensor) {
  return all_reduce(tensor, ReduceOp::SUM, {}, /*async_op=*/true)->getFuture();
}

/// Reduces in a callback, and in that reduction's callback, and so on.
void reduce_in_callbacks(int depth, std::vector<at::Tensor>& results) {
  at::Tensor tensor = at::full({10}, depth, at::kFloat);
  auto future = reduce(tensor);
  auto nested = future->then(
      [depth, &results](c10::ivalue::Future&) {
        if (depth > 0) reduce_in_callbacks(depth - 1, results);
        return c10::IValue();
      },
      c10::NoneType::get());
  nested->waitAndThrow();
  results.push_back(tensor);
}

TEST_F(Futures, CallbacksMayWaitForFurtherOperations) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    std::vector<at::Tensor> results;
    reduce_in_callbacks(5, results);
    ASSERT_EQ(results.size(), 6u);
    for (int depth = 0; depth < 6; ++depth) EXPECT_EQ(results[depth][0].item<float>(), 2 * depth);
  });
}

TEST_F(Futures, CallbacksMayWaitForOperationsThatStandInTheQueueAlready) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    at::Tensor a = at::ones({10}), b = at::ones({100'000});
    auto first = reduce(a);
    auto second = reduce(b);
    auto both = first->then(
        [second](c10::ivalue::Future&) {
          second->waitAndThrow();
          return c10::IValue();
        },
        c10::NoneType::get());
    both->waitAndThrow();
    EXPECT_EQ(b.sum().item<float>(), 200'000);
  });
}

TEST_F(Futures, CallbacksMayWaitForMessages) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const int peer = 1 - rank;
    // Small ones are often done in one go, and then one thread has the callbacks of all.
    for (int round = 0; round < 200; ++round) {
      const int64_t size = round % 2 == 0 ? 10 : 20'000;
      std::vector<at::Tensor> in;
      std::vector<c10::intrusive_ptr<c10::ivalue::Future>> received, sent;
      for (int tag = 0; tag < 3; ++tag) in.push_back(at::empty({size}));
      for (int tag = 0; tag < 3; ++tag) received.push_back(irecv(in[tag], peer, {}, tag)->getFuture());
      auto all = received[0]->then(
          [=](c10::ivalue::Future&) {
            for (int tag = 1; tag < 3; ++tag) received[tag]->waitAndThrow();
            return c10::IValue();
          },
          c10::NoneType::get());
      for (int tag = 0; tag < 3; ++tag) {
        sent.push_back(isend(at::full({size}, 10 * rank + tag, at::kFloat), peer, {}, tag)->getFuture());
      }
      all->waitAndThrow();
      for (auto& one : sent) one->waitAndThrow();
      for (int tag = 0; tag < 3; ++tag) ASSERT_EQ(in[tag][0].item<float>(), 10 * peer + tag);
    }
  });
}

TEST_F(Futures, CallbacksMayWaitForLargeMessages) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const int peer = 1 - rank;
    at::Tensor out = at::full({100'000}, rank, at::kFloat), in = at::empty({100'000});
    at::Tensor later_out = at::full({50'000}, 10 + rank, at::kFloat), later_in = at::empty({50'000});
    auto sent = isend(out, peer)->getFuture();
    auto received = irecv(in, peer)->getFuture();
    auto later_sent = isend(later_out, peer, {}, 1)->getFuture();
    auto later_received = irecv(later_in, peer, {}, 1)->getFuture();
    auto all = received->then(
        [=](c10::ivalue::Future&) {
          later_received->waitAndThrow();
          later_sent->waitAndThrow();
          return c10::IValue();
        },
        c10::NoneType::get());
    all->waitAndThrow();
    sent->waitAndThrow();
    EXPECT_EQ(in[0].item<float>(), peer);
    EXPECT_EQ(later_in[0].item<float>(), 10 + peer);
  });
}

TEST_F(Futures, AreCompletedAlsoWhereTheSystemGivesNoThread) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    while (background_thread_count() > 0) std::this_thread::yield();  // an idle one would serve
    failpoint::configure("start_thread=errno(11)");
    at::Tensor a = at::ones({10}), b = at::ones({100'000});
    const auto first = reduce(a);
    const auto second = reduce(b);
    int told = 0;
    const auto count = [&](c10::ivalue::Future&) { return c10::IValue(++told); };
    first->then(count, c10::IntType::get())->waitAndThrow();
    second->then(count, c10::IntType::get())->waitAndThrow();
    EXPECT_EQ(told, 2);
    EXPECT_EQ(a.sum().item<float>(), 20);
    EXPECT_EQ(b.sum().item<float>(), 200'000);
    // Nothing is left in the queue that would run after an error.
    EXPECT_TRUE(all_reduce(a, ReduceOp::SUM, {}, /*async_op=*/true)->isCompleted());
    at::Tensor in = at::empty({100'000});
    const auto received = irecv(in, 1 - rank);
    const auto sent = isend(b, 1 - rank);
    received->wait();
    sent->wait();
    EXPECT_TRUE(at::equal(in, b));
    failpoint::configure("");
  });
}

TEST_F(Futures, AGroupIsNotGoneBeforeItsCallbacksHaveRun) {
  run_ranks(2, [](int) {
    auto world = init_process_group();
    std::atomic<int> told{0};
    for (int round = 0; round < 20; ++round) {
      auto group = new_group();
      at::Tensor tensor = at::ones({10});
      auto future = all_reduce(tensor, ReduceOp::SUM, group, /*async_op=*/true)->getFuture();
      future->addCallback([&](c10::ivalue::Future&) { ++told; });
      destroy_process_group(group);
      EXPECT_EQ(told, round + 1);
    }
  });
}

TEST_F(Futures, AnAllGathersValueIsOneTensorOfAll) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    std::vector<at::Tensor> outputs{at::empty({2}), at::empty({2})};
    auto future = all_gather(outputs, at::full({2}, rank, at::kFloat), {}, /*async_op=*/true)->getFuture();
    future->waitAndThrow();
    const auto gathered = future->value().toTensorVector();
    ASSERT_EQ(gathered.size(), 1u);
    EXPECT_TRUE(at::equal(gathered[0], at::tensor({0.F, 0.F, 1.F, 1.F}).view({2, 2})));
  });
}

TEST_F(Futures, AValueForWhichThereIsNoMemoryIsAnErrorOfTheFuture) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "sanitizers have their address space without a bound";
#endif
  run_ranks(2, [](int) {
    auto world = init_process_group();
    const at::Tensor own = at::ones({128 << 20}, at::kByte);
    std::vector<at::Tensor> outputs{at::zeros_like(own), at::zeros_like(own)};
    all_gather(outputs, own);  // what it takes besides is there
    barrier();
    {
      const testing::MemoryBound bound(128 << 20);
      const auto work = all_gather(outputs, own, {}, /*async_op=*/true);
      EXPECT_ANY_THROW(work->getFuture()->waitAndThrow());
      work->wait();  // the operation has succeeded
    }
    barrier();
  });
}

}  // namespace
}  // namespace lockstep::operation_queue_test
