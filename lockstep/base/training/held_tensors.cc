#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include <lockstep/base/process/per_process.h>
#include <lockstep/base/training/held_tensors.h>

namespace lockstep {
namespace {

/// Unlike std::thread::id, no other thread ever has it.
uint64_t this_thread_number() {
  static std::atomic<uint64_t> next{0};
  thread_local const uint64_t number = ++next;
  return number;
}

struct HeldTensorsTellers {
  struct Teller {
    uint64_t thread;
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
  tellers.all[this] = {this_thread_number(), std::move(tell)};
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
    if (teller.thread == this_thread_number()) teller.tell(held);
  }
  return held;
}

}  // namespace lockstep
