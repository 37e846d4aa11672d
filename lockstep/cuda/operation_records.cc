#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

#include <ATen/core/ivalue.h>
#include <c10/util/Exception.h>

#include <lockstep/base/exception_text.h>
#include <lockstep/collectives/backend/lockstep_backend.h>
#include <lockstep/cuda/operation_records.h>

namespace lockstep {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// "all_reduce (sequence 3, SUM) failed on rank 1 of group 'default'"
std::string title_of(const flight::ObservedGroup& group, const flight::ObservedOperation& operation) {
  const auto global = [&](int rank) { return group.ranks.at(static_cast<size_t>(rank)); };
  const std::string_view kind = operation.kind;
  std::ostringstream text;
  text << kind << (operation.point_to_point ? " (number " : " (sequence ") << operation.sequence;
  if (!operation.detail.empty()) text << ", " << operation.detail;
  if (operation.peer >= 0) {
    text << (kind == "send"   ? ", to rank "
             : kind == "recv" ? ", from rank "
                              : ", root rank ")
         << global(operation.peer);
  }
  text << ") failed on rank " << global(group.rank) << " of group '" << group.name << "'";
  return text.str();
}

}  // namespace

struct OperationRecords::State {
  std::shared_ptr<const flight::ObservedGroup> group;
  OnFailure on_failure;
  std::mutex mutex;
  uint64_t collectives = 0;
  uint64_t messages = 0;
  uint64_t keys = 0;
  std::map<uint64_t, Pending> pending;  // by key
  std::optional<std::vector<Pending>> batch;

  /// Takes an operation out, if it is still there: its end is told once.
  std::optional<Pending> take(uint64_t key) {
    std::lock_guard lock(mutex);
    auto found = pending.find(key);
    if (found == pending.end()) return std::nullopt;
    Pending taken = std::move(found->second);
    pending.erase(found);
    return taken;
  }

  void complete(uint64_t key) {
    if (const auto taken = take(key)) flight::completed(taken->record);
  }

  void fail(uint64_t key, const char* reason, const std::string& why) {
    const auto taken = take(key);
    if (!taken) return;
    record_failure(*taken, why);
    tell(reason);
  }

  void record_failure(const Pending& one, const std::string& why) const {
    flight::failed(one.record, title_of(*group, one.operation) + ": " + why);
  }

  void tell(const char* reason) const {
    flight::dump(reason);
    if (on_failure) on_failure(reason);
  }
};

OperationRecords::OperationRecords(std::shared_ptr<const flight::ObservedGroup> group, bool watched,
                                   OnFailure on_failure)
    : state_(std::make_shared<State>()), watched_(watched) {
  state_->group = std::move(group);
  state_->on_failure = std::move(on_failure);
}

WorkPtr OperationRecords::run(flight::ObservedOperation operation, const std::function<WorkPtr()>& start) {
  poll();
  Pending pending;
  {
    std::lock_guard lock(state_->mutex);
    operation.sequence = ++(operation.point_to_point ? state_->messages : state_->collectives);
    pending.key = ++state_->keys;
  }
  CallSite::tell(operation);
  pending.record = flight::scheduled(state_->group, operation);
  operation.inputs = operation.outputs = nullptr;
  operation.purpose = {};
  pending.operation = std::move(operation);
  WorkPtr work;
  try {
    work = start();
  } catch (c10::Error& error) {
    const bool of_the_group = dynamic_cast<const c10::DistError*>(&error) != nullptr;
    state_->record_failure(pending, error.what_without_backtrace());
    error.add_context(title_of(*state_->group, pending.operation));
    if (of_the_group) state_->tell("failure");
    throw;
  }
  flight::started(pending.record);
  {
    std::lock_guard lock(state_->mutex);
    if (state_->batch) {
      state_->batch->push_back(std::move(pending));
      return work;
    }
  }
  std::vector<Pending> one;
  one.push_back(std::move(pending));
  watch(std::move(one), work);
  return work;
}

void OperationRecords::begin_batch() {
  std::lock_guard lock(state_->mutex);
  if (!state_->batch) state_->batch.emplace();
}

WorkPtr OperationRecords::end_batch(const std::function<WorkPtr()>& end) {
  std::vector<Pending> operations;
  {
    std::lock_guard lock(state_->mutex);
    if (state_->batch) operations = std::move(*std::exchange(state_->batch, std::nullopt));
  }
  WorkPtr work;
  try {
    work = end();
  } catch (const c10::Error& error) {
    for (const Pending& one : operations) state_->record_failure(one, error.what_without_backtrace());
    state_->tell("failure");
    throw;
  }
  watch(std::move(operations), work);
  return work;
}

void OperationRecords::watch(std::vector<Pending> operations, const WorkPtr& work) {
  if (!work) {  // its end is never told; it has been given away
    for (const Pending& one : operations) flight::completed(one.record);
    return;
  }
  c10::intrusive_ptr<c10::ivalue::Future> result;
  if (watched_) {
    try {
      result = work->getFutureResult();
    } catch (const c10::Error&) {
      // This kind of work has none.
    }
  }
  std::vector<uint64_t> keys;
  {
    std::lock_guard lock(state_->mutex);
    for (Pending& one : operations) {
      if (!result) one.work = work;
      keys.push_back(one.key);
      state_->pending.emplace(keys.back(), std::move(one));
    }
  }
  if (!result) return;
  // By the caller's watchdog, or here if it is done already. It must not throw there.
  result->addCallback(
      [state = state_, keys](c10::ivalue::Future& future) {
        c10d::WorkResult end = c10d::WorkResult::UNKNOWN;
        if (!future.hasError()) end = static_cast<c10d::WorkResult>(future.constValue().toInt());
        for (const uint64_t key : keys) {
          if (end == c10d::WorkResult::SUCCESS) {
            state->complete(key);
          } else if (end == c10d::WorkResult::TIMEOUT) {
            state->fail(key, "timeout",
                        "it was not done within its timeout; a peer is late, hangs or has ended");
          } else {
            state->fail(
                key, "failure",
                "the communicator failed; a peer has ended, or the network failed. torch's log says more");
          }
        }
      },
      /*uses_future=*/false);
}

void OperationRecords::poll() {
  std::vector<Pending> asked;
  {
    std::lock_guard lock(state_->mutex);
    for (const auto& [key, one] : state_->pending) {
      if (one.work) asked.push_back(one);
    }
  }
  for (const Pending& one : asked) {
    if (!one.work->isCompleted()) break;  // they end in order
    if (const auto error = one.work->exception()) {
      state_->fail(one.key, "failure", text_of(error));
    } else {
      state_->complete(one.key);
    }
  }
}

void OperationRecords::fail_all() {
  std::map<uint64_t, Pending> taken;
  {
    std::lock_guard lock(state_->mutex);
    taken = std::exchange(state_->pending, {});
  }
  for (const auto& [key, one] : taken) state_->record_failure(one, "the group was aborted");
}

}  // namespace lockstep
