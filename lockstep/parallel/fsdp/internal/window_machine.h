#pragma once

#include <cstdint>

namespace lockstep::fsdp::internal {

/// Where a rank is between two steps of the optimizer.
enum class WindowPhase : uint8_t {
  kReading,   // no rank writes: forward, backward, evaluation, state dicts
  kEntering,  // this rank is in step(), and waits until all are
  kWriting,   // all ranks are in step(): each writes the rows that it owns
  kLeaving,   // this rank has written its rows, and waits until all have
  kBroken,    // a step has failed after it had begun to write: rows of several steps lie side by side
};

const char* to_string(WindowPhase phase);

/// The windows in which the one copy of the weights is read and written, as one rank sees them. Two meetings of all ranks
/// bracket each write:
///
///     kReading ── enter() ──► kEntering ── all_have_entered() ──► kWriting ── leave() ──► kLeaving ── all_have_left() ─┐
///        ▲ ▲                      │                                   │                        │                       │
///        │ └── fail(): no rank has written                            └──── fail() ────► kBroken ◄── fail()            │
///        └─────────────────────────────────────────────────────────────────────────────────────────────────────────────┘
///
/// So weights change only while every rank is within step(), and a rank may read whenever it is not, alone and for as
/// long as it wants: a read window needs no agreement. What this rests on: a meeting succeeds on all ranks or on none,
/// which is what a group's operations on one host do. window_machine_test.cc goes through all interleavings.
///
/// A value: transitions alone, no waiting. Several threads must guard it by a mutex.
class WindowMachine {
 public:
  WindowPhase phase() const { return phase_; }
  /// Steps whose rows all ranks have written.
  uint64_t steps() const { return steps_; }
  /// Forwards, backwards and other readers that are under way in this process.
  int readers() const { return readers_; }

  /// Throws c10::Error when a step writes, for the caller is a hook within step() then; and in kBroken.
  void begin_read();
  void end_read();

  /// Throws c10::Error within step(), while this process reads, and in kBroken.
  void enter();
  void all_have_entered();
  void leave();
  void all_have_left();
  /// A meeting has failed, or what writes. Nothing was written if it was the first meeting.
  void fail();

  bool operator==(const WindowMachine&) const = default;

 private:
  void expect(WindowPhase phase) const;
  void check_not_broken() const;

  WindowPhase phase_ = WindowPhase::kReading;
  int readers_ = 0;
  uint64_t steps_ = 0;
};

}  // namespace lockstep::fsdp::internal
