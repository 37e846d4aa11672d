#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include <lockstep/base/process/per_process.h>
#include <lockstep/base/training/held_tensors.h>

namespace lockstep {
namespace {

struct HeldTensorsTellers {
  struct Teller {
    std::thread::id thread;
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
  tellers.all[this] = {std::this_thread::get_id(), std::move(tell)};
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
    if (teller.thread == std::this_thread::get_id()) teller.tell(held);
  }
  return held;
}

}  // namespace lockstep
