// The examples of docs/reference/waiting.md.
#include <chrono>
#include <exception>
#include <iostream>

#include <lockstep/lockstep.h>

#include "examples.h"

namespace reference {
namespace {

void work(int rank) {
  // [Work]
  auto tensor = torch::full({2}, 1.0 * rank);
  lockstep::Work work = lockstep::all_reduce(tensor, lockstep::ReduceOp::SUM, {}, /*async_op=*/true);
  // … compute something else; leave `tensor` alone …
  work->wait();
  TORCH_CHECK(work->isCompleted() && work->isSuccess() && work->exception() == nullptr);
  const auto result = work->getFuture()->value().toTensorVector();  // {tensor}
  const float milliseconds = work->getDuration();
  // [end]
  expect_values(result.at(0), {6, 6});
  expect(milliseconds >= 0);
}

// [Caller]
/// A function of your own, which hands on where it was called.
void sum_of_losses(const torch::Tensor& loss, const lockstep::Caller& caller = lockstep::Caller::current()) {
  lockstep::all_reduce(loss, lockstep::ReduceOp::SUM, {}, /*async_op=*/false, caller);
}
// [end]

void barrier() {
  // [barrier]
  lockstep::barrier();  // no rank goes on before all are here
  // [end]
}

void monitored_barrier() {
  // [monitored_barrier]
  try {
    lockstep::monitored_barrier(/*group=*/{}, std::chrono::seconds(60), /*wait_all_ranks=*/true);
  } catch (const lockstep::DistTimeoutError& error) {
    std::cerr << error.what_without_backtrace() << std::endl;  // names all ranks that did not come
    throw;
  }
  // [end]
}

void abort() {
  const auto group = lockstep::new_group();
  lockstep::barrier();  // all have made it
  // [abort]
  auto work = lockstep::barrier(group, /*async_op=*/true);
  lockstep::abort(group);  // from any thread, for example one that watches the time
  try {
    work->wait();
  } catch (const c10::DistBackendError&) {
    // "… aborted by rank …", unless the barrier was complete before that
  }
  // [end]
  lockstep::destroy_process_group(group);
}

}  // namespace

void waiting(int rank) {
  work(rank);
  auto loss = torch::ones({1});
  sum_of_losses(loss);
  expect_values(loss, {4});
  barrier();
  monitored_barrier();
  abort();
}

}  // namespace reference
