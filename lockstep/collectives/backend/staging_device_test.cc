#include <chrono>
#include <gmock/gmock.h>
#include <thread>

#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/base/errors.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/simulated_device/simulated_device.h>
#include <lockstep/testing/test_device.h>

// How the lockstep backend treats a device's streams and memory: gates in streams show what waits for what.
// That all operations compute what they should is in properties_device_test.cc.
namespace lockstep::staging_device_test {
namespace {

using namespace std::chrono_literals;
using testing::current_stream;
using testing::enqueue;
using testing::Gate;
using ::testing::HasSubstr;
using testing::message_of;
using testing::other_stream;
using testing::run_ranks;
using testing::run_survivors;
using testing::test_device;

constexpr int64_t kLarge = 30001;  // floats: more than fits into an announcement

at::Tensor pinned(double value, int64_t numel = kLarge) {
  test_device();  // whose memory it is to be copied to
  return at::full({numel}, value).pin_memory();
}
at::Tensor on_device(double value, int64_t numel = kLarge) {
  return at::full({numel}, value).to(test_device());
}
bool all_are(const at::Tensor& tensor, double value) {
  return at::equal(tensor.cpu(), at::full(tensor.sizes(), value, tensor.options().device(at::kCPU)));
}

TEST(StagingOnDevice, TakesTheValuesThatTheCurrentStreamWillHaveMade) {
  for (const int64_t numel : {int64_t{5}, kLarge}) {
    run_ranks(2, [&](int rank) {
      auto world = init_process_group();
      const at::Tensor source = pinned(rank + 1, numel);
      at::Tensor tensor = on_device(-100, numel);
      at::Tensor gathered = on_device(-100, 2 * numel);
      Gate gate;
      enqueue(current_stream(test_device()), [&] { gate.wait(); });
      tensor.copy_(source, /*non_blocking=*/true);  // the kernel that makes the values
      auto reduced = all_reduce(tensor, ReduceOp::SUM, {}, true);
      auto work = all_gather_into_tensor(gathered, tensor, {}, true);
      EXPECT_FALSE(reduced->isCompleted());
      EXPECT_FALSE(work->isCompleted());
      gate.open();
      reduced->wait();
      work->wait();
      EXPECT_TRUE(all_are(tensor, 3));
      // Operations of a group see the results of those before, waited for or not.
      EXPECT_TRUE(all_are(gathered, 3));
    });
  }
}

TEST(StagingOnDevice, WaitEndsOnTheHostBeforeTheResultsAreOnTheDevice) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    at::Tensor tensor = on_device(rank == 0 ? 5 : 7);
    const at::Tensor old = pinned(0);
    const at::Tensor read = pinned(0);
    const c10::Stream reader = other_stream(test_device());
    if (rank == 0) {
      broadcast(tensor, 0);
    } else {
      Gate gate;
      enqueue(current_stream(test_device()), [&] { gate.wait(); });
      old.copy_(tensor, /*non_blocking=*/true);  // still to be done when the broadcast is
      auto work = broadcast(tensor, 0, {}, true);
      {
        const c10::StreamGuard current(reader);
        work->wait();
        read.copy_(tensor, /*non_blocking=*/true);
      }
      // Everything has returned, and nothing has happened on the device.
      EXPECT_TRUE(work->isSuccess());
      EXPECT_FALSE(work->isCompleted());
      EXPECT_TRUE(all_are(read, 0));
      gate.open();
      reader.synchronize();
      EXPECT_TRUE(all_are(old, 7));
      EXPECT_TRUE(all_are(read, 5));
      EXPECT_TRUE(work->isCompleted());
    }
    barrier();
  });
}

TEST(StagingOnDevice, ReceivesAreOrderedInTheSameWay) {
  for (const int64_t numel : {int64_t{5}, kLarge}) {
    run_ranks(2, [&](int rank) {
      auto world = init_process_group();
      at::Tensor tensor = on_device(rank == 0 ? 5 : 7, numel);
      const at::Tensor read = pinned(0, numel);
      if (rank == 0) {
        const at::Tensor source = pinned(9, numel);
        Gate gate;
        enqueue(current_stream(test_device()), [&] { gate.wait(); });
        tensor.copy_(source, /*non_blocking=*/true);
        std::thread opener([&] { gate.open(); });  // a send waits until its data are there
        send(tensor, 1);
        opener.join();
        send(at::full({numel}, 11.0), 1);  // from the CPU to a device
      } else {
        Gate gate;
        enqueue(current_stream(test_device()), [&] { gate.wait(); });
        auto work = irecv(tensor, 0);
        const c10::Stream reader = other_stream(test_device());
        {
          const c10::StreamGuard current(reader);
          work->wait();
          read.copy_(tensor, /*non_blocking=*/true);
        }
        EXPECT_FALSE(work->isCompleted());
        EXPECT_TRUE(all_are(read, 0));
        gate.open();
        reader.synchronize();
        EXPECT_TRUE(all_are(read, 9));
        EXPECT_EQ(recv(tensor, 0), 0);
        EXPECT_TRUE(all_are(tensor, 11));
      }
      barrier();
    });
  }
}

TEST(StagingOnDevice, FuturesGiveValuesThatAreOrderedToo) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    at::Tensor tensor = on_device(rank == 0 ? 5 : 7);
    at::Tensor received = on_device(1);
    std::vector<at::Tensor> list{on_device(0), on_device(0)};
    const at::Tensor seen = pinned(0);
    const at::Tensor seen_received = pinned(0);
    Gate gate;
    enqueue(current_stream(test_device()), [&] { gate.wait(); });
    if (rank == 0) gate.open();
    auto work = broadcast(tensor, 0, {}, true);
    auto future = work->getFuture();
    ASSERT_EQ(future->devices(), std::vector<c10::Device>{test_device()});
    auto child = future->then(
        [&](c10::ivalue::Future& parent) {
          const at::Tensor value = parent.constValue().toTensorVector().at(0);
          seen.copy_(value, /*non_blocking=*/true);
          return c10::IValue(std::vector<at::Tensor>{value});
        },
        c10::ListType::ofTensors());
    auto message = rank == 0 ? isend(tensor, 1) : irecv(received, 0);
    auto told = message->getFuture()->then(
        [&](c10::ivalue::Future& parent) {
          if (rank == 1)
            seen_received.copy_(parent.constValue().toTensorVector().at(0), /*non_blocking=*/true);
          return parent.value();
        },
        c10::ListType::ofTensors());
    // The callbacks run when the host is done; what they start waits on the device.
    const c10::Stream reader = other_stream(test_device());
    {
      const c10::StreamGuard current(reader);
      child->wait();
      told->wait();
    }
    if (rank == 1) {
      EXPECT_TRUE(all_are(seen, 0));
      EXPECT_TRUE(all_are(seen_received, 0));
    }
    gate.open();
    testing::synchronize(test_device());
    EXPECT_TRUE(all_are(seen, 5));
    if (rank == 1) {
      EXPECT_TRUE(all_are(seen_received, 5));
    }
    // Of an operation that is done, and of one whose outputs make one tensor.
    work->getFuture()->wait();
    auto gathered = all_gather(list, tensor, {}, true)->getFuture();
    gathered->wait();
    EXPECT_TRUE(all_are(gathered->value().toTensorVector().at(0), 5));
    EXPECT_EQ(gathered->value().toTensorVector().at(0).sizes(), (std::vector<int64_t>{2, kLarge}));
  });
}

TEST(StagingOnDevice, DroppedTensorsKeepTheirMemoryUntilTheCopiesAreDone) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const c10::Stream held_up = other_stream(test_device());
    at::Tensor result = on_device(0);
    at::Tensor input = on_device(rank);
    at::Tensor sum = pinned(0);
    Gate gate;
    if (rank == 1) enqueue(held_up, [&] { gate.wait(); });
    c10::intrusive_ptr<c10d::Work> reduced;
    {
      const c10::StreamGuard current(held_up);
      auto work = broadcast(result, 0, {}, true);
      work->wait();
      result.reset();
      reduced = all_reduce(input, ReduceOp::SUM, {}, true);
    }
    // In the place of the dropped one, if that were free: nothing may be written into it.
    std::vector<at::Tensor> others;
    for (int i = 0; i < 4; ++i) others.push_back(on_device(3));
    gate.open();
    reduced->wait();
    for (const at::Tensor& other : others) EXPECT_TRUE(all_are(other, 3));
    EXPECT_TRUE(all_are(input, 1));
    // An input that is not held any more.
    auto work = all_reduce(on_device(2), ReduceOp::SUM, {}, true);
    for (int i = 0; i < 4; ++i) others.push_back(on_device(3));
    work->wait();
    EXPECT_TRUE(all_are(work->result().at(0), 4));
  });
}

TEST(StagingOnDevice, MemoryIsPageLockedOnceAndUnlocked) {
  if (!testing::test_device_is_simulated()) GTEST_SKIP() << "only the simulated device counts";
  run_ranks(2, [](int) {
    test_device();
    const auto before = testing::simulated::counters();
    {
      auto world = init_process_group();
      all_reduce(at::ones({kLarge}));
      EXPECT_EQ(testing::simulated::counters().registrations, before.registrations) << "without need";
      auto group = new_group();
      for (int i = 0; i < 3; ++i) {
        at::Tensor tensor = on_device(1);
        all_reduce(tensor);
        all_reduce(tensor, ReduceOp::SUM, group);
        EXPECT_TRUE(all_are(tensor, 4));
      }
      EXPECT_EQ(testing::simulated::counters().registrations, before.registrations + 1);
      EXPECT_EQ(testing::simulated::counters().registered_now, before.registered_now + 1);
      all_reduce(on_device(1, int64_t{20} << 20));  // 80 MiB, beyond a segment
      EXPECT_EQ(testing::simulated::counters().registered_now, before.registered_now + 2);
    }
    EXPECT_EQ(testing::simulated::counters().registered_now, before.registered_now);
    EXPECT_EQ(testing::simulated::counters().device_synchronizations, before.device_synchronizations);
  });
}

TEST(StagingOnDevice, NothingIsCopiedThatNeedNotBe) {
  if (!testing::test_device_is_simulated()) GTEST_SKIP() << "only the simulated device counts";
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    at::Tensor tensor = on_device(rank);
    at::Tensor gathered = on_device(0, 2 * kLarge);
    std::vector<at::Tensor> several{on_device(1, 10), on_device(2, 20)};
    const int64_t bytes = tensor.nbytes();
    const auto counted = [](const std::function<void()>& call) {
      testing::synchronize(test_device());
      const auto before = testing::simulated::counters();
      call();
      testing::synchronize(test_device());
      const auto after = testing::simulated::counters();
      EXPECT_EQ(after.host_synchronizations, before.host_synchronizations);
      return std::pair(after.device_to_host_bytes - before.device_to_host_bytes,
                       after.host_to_device_bytes - before.host_to_device_bytes);
    };
    EXPECT_EQ(counted([&] { all_reduce(tensor); }), std::pair(bytes, bytes));
    EXPECT_EQ(counted([&] { reduce(tensor, 1); }), std::pair(bytes, rank == 1 ? bytes : 0));
    EXPECT_EQ(counted([&] { broadcast(tensor, 1); }),
              rank == 1 ? std::pair(bytes, int64_t{0}) : std::pair(int64_t{0}, bytes));
    EXPECT_EQ(counted([&] { all_gather_into_tensor(gathered, tensor); }), std::pair(bytes, 2 * bytes));
    EXPECT_EQ(counted([&] { reduce_scatter_tensor(tensor, gathered); }), std::pair(2 * bytes, bytes));
    EXPECT_EQ(counted([&] { all_reduce_coalesced(several); }), std::pair(int64_t{120}, int64_t{120}));
  });
}

TEST(StagingOnDevice, KeepsToTheTensorsDevice) {
  LOCKSTEP_NEEDS_DEVICES(2);
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const c10::impl::VirtualGuardImpl guard(test_device().type());
    at::Tensor tensor = on_device(rank + 1).to(test_device(1));
    ASSERT_EQ(guard.getDevice(), test_device(0));
    const c10::Stream before = current_stream(test_device(1));
    Gate gate;
    enqueue(current_stream(test_device(1)), [&] { gate.wait(); });
    tensor.copy_(pinned(rank + 2), /*non_blocking=*/true);
    auto work = all_reduce(tensor, ReduceOp::SUM, {}, true);
    gate.open();
    work->wait();
    EXPECT_EQ(guard.getDevice(), test_device(0));
    EXPECT_EQ(current_stream(test_device(1)), before);
    EXPECT_TRUE(all_are(tensor, 5));
    // From a thread whose current device and streams are others.
    std::thread([&] {
      const c10::StreamGuard current(other_stream(test_device(0)));
      all_reduce(tensor);
      EXPECT_TRUE(all_are(tensor, 10));
    }).join();
  });
}

TEST(StagingOnDevice, LazyViewsAndFactorsOnTheDevice) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const at::Tensor reals = at::arange(12, at::kFloat).view({6, 2}) + rank;
    at::Tensor numbers = at::view_as_complex(reals).to(test_device());
    at::Tensor expected = at::view_as_complex(at::arange(12, at::kFloat).view({6, 2}) * 2 + 1);
    at::Tensor conjugates = numbers.conj();
    ASSERT_TRUE(conjugates.is_conj());
    all_reduce(conjugates);
    EXPECT_TRUE(at::equal(numbers.cpu(), expected));
    at::Tensor negatives = at::imag(numbers.conj());
    ASSERT_TRUE(negatives.is_neg());
    std::vector<at::Tensor> list{at::empty({6}).to(test_device()), at::empty({6}).to(test_device())};
    all_gather(list, negatives);
    EXPECT_TRUE(at::equal(list[1].cpu(), -at::imag(expected)));

    at::Tensor tensor = on_device(rank + 1, 4).view({2, 2}).t();
    all_reduce(tensor, premul_sum(torch::tensor({3.0}).to(test_device())));
    EXPECT_TRUE(all_are(tensor, 9));
    at::Tensor factor = torch::tensor({0.5});
    auto work = all_reduce(tensor, premul_sum(factor), {}, true);
    factor.fill_(100);  // the call has taken it
    work->wait();
    EXPECT_TRUE(all_are(tensor, 9));
    EXPECT_THROW(all_reduce(at::ones({2}), premul_sum(torch::tensor({3.0}).to(test_device()))),
                 c10::ValueError);
  });
}

TEST(StagingOnDevice, TensorsOfOneCallAreOnOneDevice) {
  auto world = init_process_group({.rank = 0, .world_size = 1});
  const at::Tensor here = at::ones({4}, test_device());
  const at::Tensor host = at::ones({4});
  const auto expect_both_named = [&](const std::function<void()>& call) {
    EXPECT_THAT(message_of<c10::ValueError>(call),
                ::testing::AllOf(HasSubstr("all tensors of one call must be on one device"), HasSubstr("cpu"),
                                 HasSubstr(test_device().str())));
  };
  expect_both_named([&] { all_reduce_coalesced({here, host}); });
  expect_both_named([&] { all_gather({host}, here); });
  expect_both_named([&] { all_gather_into_tensor(here, host); });
  expect_both_named([&] { all_gather_coalesced({{host}}, {here}); });
  expect_both_named([&] { all_gather_into_tensor_coalesced({here, here}, {here, host}); });
  expect_both_named([&] { gather(here, {host}, 0); });
  expect_both_named([&] { scatter(host, {here}, 0); });
  expect_both_named([&] { reduce_scatter(here, {host}); });
  expect_both_named([&] { reduce_scatter_tensor(here, host); });
  expect_both_named([&] { reduce_scatter_tensor_coalesced({here}, {host}); });
  expect_both_named([&] { all_to_all({here}, {host}); });
  expect_both_named([&] { all_to_all_single(host, here); });
  EXPECT_TRUE(all_are(here, 1));
  auto& backend = *default_group()->getBackend(at::kCPU);
  std::vector<at::Tensor> meta{at::ones({2}, at::kMeta)};
  EXPECT_THAT(message_of<c10::ValueError>([&] { backend.allreduce(meta); }),
              HasSubstr("this one is on meta"));
  EXPECT_THAT(message_of<c10::ValueError>([&] { backend.allocateTensor(4, test_device()); }),
              HasSubstr("memory for CPU tensors"));
}

TEST(StagingOnDevice, ADeviceThatIsHeldUpMeetsTheTimeout) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto group = new_group();
    group->getBackend(at::kCPU)->setTimeout(rank == 1 ? 300ms : 60s);  // so it is rank 1 that gives up
    at::Tensor tensor = on_device(rank);
    Gate gate;
    if (rank == 1) enqueue(current_stream(test_device()), [&] { gate.wait(); });
    const auto call = [&] { all_reduce(tensor, ReduceOp::SUM, group); };
    if (rank == 1) {
      EXPECT_THAT(message_of<DistTimeoutError>(call), HasSubstr(test_device().str() + " was given before"));
    } else {
      EXPECT_THAT(message_of<c10::DistBackendError>(call), HasSubstr("rank 1"));
    }
    EXPECT_THROW(all_reduce(at::ones({2}), ReduceOp::SUM, group), c10::DistBackendError);
    barrier();
    gate.open();
    EXPECT_TRUE(all_are(tensor, rank));  // no peer has written into it
  });
}

TEST(StagingOnDevice, AbortEndsWaitsForADevice) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    auto group = new_group();
    at::Tensor tensor = on_device(rank);
    Gate gate;
    enqueue(current_stream(test_device()), [&] { gate.wait(); });
    auto work = all_reduce(tensor, ReduceOp::SUM, group, true);
    auto next = all_reduce(tensor, ReduceOp::SUM, group, true);
    barrier();
    if (rank == 0) group->getBackend(at::kCPU)->abort();
    EXPECT_THROW(work->wait(), c10::DistBackendError);
    EXPECT_THROW(next->wait(), c10::DistBackendError);
    gate.open();
    destroy_process_group(group);
    EXPECT_TRUE(all_are(tensor, rank));
  });
}

TEST(StagingOnDevice, PeersEndsAreToldAsEver) {
  run_survivors(3, {1}, [](int rank) {
    auto world = init_process_group();
    at::Tensor tensor = rank == 2 ? at::ones({kLarge}) : on_device(1);
    for (int i = 0; i < 2; ++i) all_reduce(tensor);
    if (rank == 1) failpoint::configure("reduce=kill(9)");
    const auto text = message_of([&] { all_reduce(tensor); });
    EXPECT_THAT(text, HasSubstr("all_reduce (sequence 3"));
    EXPECT_THAT(text, HasSubstr("killed by signal 9"));
    EXPECT_THAT(message_of([&] { all_reduce(tensor); }), HasSubstr("signal 9"));
    if (rank == 0) {  // results of a failed operation are not brought
      EXPECT_TRUE(all_are(tensor, 9));
    }
  });
}

TEST(StagingOnDevice, ManyThreadsAndStreams) {
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    std::vector<ProcessGroup> groups;
    for (int i = 0; i < 3; ++i) groups.push_back(new_group());
    std::vector<std::jthread> threads;
    for (int i = 0; i < 3; ++i) {
      threads.emplace_back([&, i] {
        const auto device = testing::device_of_rank(i);
        const c10::StreamGuard current(other_stream(device));
        at::Tensor tensor = at::full({kLarge}, 1.0 * (rank + i)).to(device);
        std::vector<Work> works;
        for (int step = 0; step < 10; ++step) {
          works.push_back(all_reduce(tensor, ReduceOp::AVG, groups[i], true));
          works.back()->wait();
          tensor.add_(1);
        }
        EXPECT_TRUE(all_are(tensor, 0.5 + i + 10)) << i;
      });
    }
  });
}

TEST(StagingOnDevice, SparseTensors) {
  if (testing::test_device_is_simulated())
    GTEST_SKIP() << "needs a GPU: the simulated device has dense tensors only";
  run_ranks(2, [](int rank) {
    auto world = init_process_group();
    const at::Tensor host =
        torch::sparse_coo_tensor(torch::tensor({{rank, 3, rank}}), torch::tensor({1.0f, 2.0f, 4.0f}), {5});
    at::Tensor tensor = rank == 0 ? host.to(test_device()) : host.clone();
    all_reduce(tensor);
    EXPECT_TRUE(tensor.is_coalesced());
    EXPECT_TRUE(at::equal(tensor.to_dense().cpu(), torch::tensor({5.0f, 5.0f, 0.0f, 4.0f, 0.0f})));
  });
}

}  // namespace
}  // namespace lockstep::staging_device_test
