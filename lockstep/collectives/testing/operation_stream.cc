#include <numeric>
#include <thread>
#include <utility>

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <lockstep/collectives/testing/operation_stream.h>

namespace lockstep::testing {
namespace {

/// A random while: mostly none, else a turn of the processor or a bit of work.
void linger(Random& random) {
  const int64_t kind = draw(random, 0, 5);
  if (kind < 3) return;
  if (kind == 3) {
    std::this_thread::yield();
    return;
  }
  static std::atomic<uint64_t> sink{0};
  for (int64_t i = draw(random, 0, 20000); i > 0; --i) sink.fetch_add(1, std::memory_order_relaxed);
}

std::string problems_of(const std::vector<GuardedTensor>& tensors,
                        std::string (GuardedTensor::*problem_of)() const) {
  std::string text;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string problem = (tensors[i].*problem_of)();
    if (!problem.empty()) text += "\n  tensor " + std::to_string(i) + " " + problem;
  }
  return text;
}

}  // namespace

std::vector<GuardedTensor> make_tensors(const Place& place, const Case& c, Random& local,
                                        c10::Device device) {
  const SharedMemory shared = place.shared_memory();
  std::vector<GuardedTensor> tensors;
  for (const Slot& slot : c.operation->slots(c, place.rank)) {
    tensors.emplace_back(slot, local, shared, device);
  }
  return tensors;
}

Started start(const Place& place, const Case& c, const std::vector<GuardedTensor>& tensors) {
  Call call{c, place, {}};
  for (const GuardedTensor& each : tensors) call.tensors.push_back(each.tensor());
  Started started = place.backend ? c.operation->call_backend(call) : c.operation->call(call);
  if (!c.asynchronous) {
    for (const Work& work : started.works) work->wait();
  }
  return started;
}

OperationStream::OperationStream(Place place, uint64_t seed, std::string title)
    : place_(std::move(place)),
      title_(std::move(title)),
      common_(seed),
      local_(seed * 1000 + static_cast<uint64_t>(place_.rank) + 1) {}

const Operation& OperationStream::next_operation() {
  if (deck_.empty()) {
    deck_.resize(operations().size());
    std::iota(deck_.begin(), deck_.end(), 0);
  }
  const auto chosen = static_cast<size_t>(draw(common_, 0, static_cast<int64_t>(deck_.size()) - 1));
  std::swap(deck_[chosen], deck_.back());
  const size_t index = deck_.back();
  deck_.pop_back();
  return operations()[index];
}

/// Drawn by each rank for itself: peers may have theirs elsewhere.
c10::Device OperationStream::next_device(const Operation& operation) {
  if (place_.devices.empty() || (operation.traits.sparse && !place_.sparse_on_devices)) return c10::kCPU;
  return place_
      .devices[static_cast<size_t>(draw(local_, 0, static_cast<int64_t>(place_.devices.size()) - 1))];
}

void OperationStream::step() {
  const int ranks = place_.backend ? place_.backend->getSize() : static_cast<int>(place_.members.size());
  Pending next{random_case(common_, next_operation(), ranks), made() + 1, {}, {}};
  const c10::Device device = next_device(*next.c.operation);
  // The call in one stream of the device; the wait, and what is done with the results, in another.
  c10::OptionalStreamGuard current;
  if (!device.is_cpu() && next.c.asynchronous && draw(local_, 0, 1) == 0) {
    current.reset_stream(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  }
  next.tensors = make_tensors(place_, next.c, local_, device);
  linger(local_);
  made_.fetch_add(1, std::memory_order_relaxed);
  try {
    next.started = start(place_, next.c, next.tensors);
  } catch (const c10::ValueError& error) {
    ADD_FAILURE() << title_ << ", operation " << next.number << ": " << next.c.describe()
                  << " was refused: " << error.what_without_backtrace();
    throw;
  } catch (const c10::DistBackendError&) {
    note_failure(next);
    throw;
  }
  current.reset();
  pending_.push_back(std::move(next));
  // When results are looked at is each rank's own business.
  while (!pending_.empty() && (pending_.size() > kInFlight || draw(local_, 0, 3) == 0)) finish_first();
}

void OperationStream::finish_first() {
  const Pending first = std::move(pending_.front());
  pending_.pop_front();
  try {
    for (const Work& work : first.started.works) work->wait();
  } catch (const c10::DistBackendError&) {
    note_failure(first);
    throw;
  }
  check(first);
}

void OperationStream::check(const Pending& pending) {
  if (pending.started.check) pending.started.check();
  if (!pending.c.operation->traits.point_to_point) ++succeeded_;
  report(pending, problems_of(pending.tensors, &GuardedTensor::problem));
}

void OperationStream::note_failure(const Pending& pending) {
  if (!pending.c.operation->traits.point_to_point) collective_failed_ = true;
  report(pending, problems_of(pending.tensors, &GuardedTensor::problem_after_failure));
}

void OperationStream::report(const Pending& pending, const std::string& problems) const {
  if (problems.empty()) return;
  ADD_FAILURE() << title_ << ", operation " << pending.number << " on rank " << place_.rank << ": "
                << pending.c.describe() << problems;
}

void OperationStream::finish() {
  while (!pending_.empty()) finish_first();
}

std::vector<std::string> OperationStream::finish_failed() {
  std::vector<std::string> errors;
  while (!pending_.empty()) {
    try {
      finish_first();
    } catch (const c10::Error& error) {
      errors.emplace_back(error.what_without_backtrace());
    }
  }
  return errors;
}

}  // namespace lockstep::testing
