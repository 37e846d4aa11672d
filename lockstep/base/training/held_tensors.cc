#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include <ATen/record_function.h>

#include <lockstep/base/process/per_process.h>
#include <lockstep/base/training/held_tensors.h>

namespace lockstep {
namespace {

struct HeldTensorsTellers {
  struct Teller {
    uint64_t
        thread;  // at::RecordFunction::currentThreadId(), which no later thread has, unlike std::thread::id
    TellingHeldTensors::Tell tell;
  };
  std::mutex mutex;
  std::map<const TellingHeldTensors*, Teller> all;  // guarded by mutex
};
PerProcess<HeldTensorsTellers> held_tensors_tellers;

}  // namespace

TellingHeldTensors::TellingHeldTensors(Tell tell) {
  HeldTensorsTellers& tellers = held_tensors_tellers.get();
  const std::lock_guard lock(tellers.mutex);
  tellers.all[this] = {at::RecordFunction::currentThreadId(), std::move(tell)};
}

TellingHeldTensors::~TellingHeldTensors() {
  HeldTensorsTellers& tellers = held_tensors_tellers.get();
  const std::lock_guard lock(tellers.mutex);
  tellers.all.erase(this);
}

HeldTensors held_tensors() {
  HeldTensors held;
  HeldTensorsTellers& tellers = held_tensors_tellers.get();
  const std::lock_guard lock(tellers.mutex);  // what tells is not destroyed meanwhile
  for (const auto& [unused, teller] : tellers.all) {
    if (teller.thread == at::RecordFunction::currentThreadId()) teller.tell(held);
  }
  return held;
}

}  // namespace lockstep
