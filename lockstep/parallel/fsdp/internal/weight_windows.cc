#include <exception>
#include <vector>

#include <ATen/ops/empty.h>

#include <lockstep/base/failpoint.h>
#include <lockstep/base/text/counted.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/parallel/fsdp/internal/weight_windows.h>

namespace lockstep::fsdp::internal {
namespace {

void throw_failure(const std::exception_ptr& own, int failed, const char* text) {
  if (own) std::rethrow_exception(own);
  TORCH_CHECK_WITH(DistBackendError, failed == 0, "FullyShardedDataParallel: ", counted(failed, "rank"),
                   " of the group failed ", text);
}

}  // namespace

int count_ranks(const ProcessGroup& group, bool flag) {
  std::vector<at::Tensor> tensors{at::empty({1}, at::kInt).fill_(flag ? 1 : 0)};
  c10d::AllreduceOptions options;
  options.asyncOp = false;
  const CallSite site("FSDP's agreement");
  group->allreduce(tensors, options)->wait();
  return tensors[0].item<int>();
}

void run_on_all(const ProcessGroup& group, const char* what, const std::function<void()>& action) {
  std::exception_ptr error;
  try {
    action();
  } catch (...) {
    error = std::current_exception();
  }
  throw_failure(error, count_ranks(group, error != nullptr), what);
}

void WeightWindows::begin_read(std::thread::id thread) {
  std::unique_lock lock(mutex_);
  // One that reads already is waited for by the writer.
  changed_.wait(lock, [&] {
    return one_thread_ || writer_ == std::thread::id() || writer_ == thread || readers_of(thread) > 0;
  });
  machine_.begin_read();
  ++readers_[thread];
}

void WeightWindows::end_read(std::thread::id thread) {
  const std::lock_guard lock(mutex_);
  machine_.end_read();
  if (--readers_[thread] == 0) readers_.erase(thread);
  changed_.notify_all();
}

int WeightWindows::readers_of(std::thread::id thread) const {
  const auto found = readers_.find(thread);
  return found == readers_.end() ? 0 : found->second;
}

void WeightWindows::enter() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return one_thread_ || machine_.readers() == readers_of(writer_); });
  machine_.enter();
}

void WeightWindows::leave() {
  const std::lock_guard lock(mutex_);
  writer_ = {};
  changed_.notify_all();
}

int WeightWindows::meet(bool flag) {
  try {
    return count_ranks(group_, flag);
  } catch (...) {
    change([](WindowMachine& machine) { machine.fail(); });
    throw;
  }
}

void WeightWindows::write(const std::function<void()>& check, const std::function<void()>& body) {
  {
    std::unique_lock lock(mutex_);
    const auto thread = std::this_thread::get_id();
    changed_.wait(lock, [&] { return writer_ == std::thread::id() || writer_ == thread; });
    // Within a step, or after one that has failed, it throws, without a meeting: it is so on all ranks.
    if (machine_.phase() != WindowPhase::kReading) machine_.enter();
    writer_ = thread;
  }
  struct Leave {
    WeightWindows& windows;
    ~Leave() { windows.leave(); }
  } leaving{*this};

  std::exception_ptr error;
  try {
    check();
    enter();
  } catch (...) {
    error = std::current_exception();
  }
  failpoint::here("fsdp.window.entering");
  int failed = meet(error != nullptr);
  if (failed > 0) {
    change([](WindowMachine& machine) { machine.fail(); });
    throw_failure(error, failed, "before any has written; the weights are as they were");
  }
  change([](WindowMachine& machine) { machine.all_have_entered(); });
  failpoint::here("fsdp.window.writing");
  try {
    body();
  } catch (...) {
    error = std::current_exception();
  }
  change([](WindowMachine& machine) { machine.leave(); });
  failpoint::here("fsdp.window.leaving");
  failed = meet(error != nullptr);
  if (failed > 0) {
    change([](WindowMachine& machine) { machine.fail(); });
    throw_failure(
        error, failed,
        "while writing the weights, which can't be used any more; load a checkpoint into a new model");
  }
  change([](WindowMachine& machine) { machine.all_have_left(); });
  failpoint::here("fsdp.window.left");
}

}  // namespace lockstep::fsdp::internal
