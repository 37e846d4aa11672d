#include <c10/util/Exception.h>

#include <lockstep/parallel/fsdp/internal/window_machine.h>

namespace lockstep::fsdp::internal {

const char* to_string(WindowPhase phase) {
  switch (phase) {
    case WindowPhase::kReading:
      return "reading";
    case WindowPhase::kEntering:
      return "entering a step";
    case WindowPhase::kWriting:
      return "writing";
    case WindowPhase::kLeaving:
      return "leaving a step";
    case WindowPhase::kBroken:
      return "broken";
  }
  return "";
}

void WindowMachine::expect(WindowPhase phase) const {
  TORCH_INTERNAL_ASSERT(phase_ == phase, "the weights' window is ", to_string(phase_), " instead of ",
                        to_string(phase));
}

void WindowMachine::check_not_broken() const {
  TORCH_CHECK(phase_ != WindowPhase::kBroken,
              "FullyShardedDataParallel: an earlier step() has failed while ranks wrote the weights, so that "
              "some are those "
              "before the step and some those after it; load a checkpoint into a new model");
}

void WindowMachine::begin_read() {
  check_not_broken();
  TORCH_CHECK(phase_ == WindowPhase::kReading,
              "FullyShardedDataParallel: the weights can't be read while step() writes them; forward, "
              "backward and state dicts belong before or after step()");
  ++readers_;
}

void WindowMachine::end_read() {
  TORCH_INTERNAL_ASSERT(readers_ > 0);
  --readers_;
}

void WindowMachine::enter() {
  check_not_broken();
  TORCH_CHECK(phase_ == WindowPhase::kReading, "FullyShardedDataParallel: step() within step()");
  TORCH_CHECK(readers_ == 0,
              "FullyShardedDataParallel: step() while a forward, backward or summon_full_params() is under "
              "way, or after a backward that has failed; the weights that it reads would change");
  phase_ = WindowPhase::kEntering;
}

void WindowMachine::all_have_entered() {
  expect(WindowPhase::kEntering);
  phase_ = WindowPhase::kWriting;
}

void WindowMachine::leave() {
  expect(WindowPhase::kWriting);
  phase_ = WindowPhase::kLeaving;
}

void WindowMachine::all_have_left() {
  expect(WindowPhase::kLeaving);
  phase_ = WindowPhase::kReading;
  ++steps_;
}

void WindowMachine::fail() {
  phase_ = phase_ == WindowPhase::kEntering || phase_ == WindowPhase::kReading ? WindowPhase::kReading
                                                                               : WindowPhase::kBroken;
}

}  // namespace lockstep::fsdp::internal
