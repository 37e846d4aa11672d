#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace lockstep::fsdp::internal {

/// In which order the gradients of groups are reduced, and in which buffers of a ring.
///
/// All ranks start the same reductions in the same order, whatever order their gradients come in: a group that comes early
/// waits until its turn, with its gradients where autograd has put them. The order is the reverse one of definition in the
/// first step, and then the one in which rank 0's gradients came. A value: decisions alone.
class ReductionSchedule {
 public:
  /// A reduction that is to start now.
  struct Start {
    size_t group;
    size_t part;  // of the group
    size_t slot;  // of the ring
    bool operator==(const Start&) const = default;
  };

  /// `parts`: of each group, at least one.
  ReductionSchedule(std::vector<size_t> parts, size_t slots);

  /// A backward begins. The one before is done.
  void begin();
  /// All gradients of a group are there, for the first time in this backward; others are gradients of a second pass.
  void arrived(size_t group);
  /// No further gradients come in this backward: groups without count as arrived, in the order.
  void end();

  /// The reduction that can start now; none if the next group's gradients are not there, no buffer is free, or all have
  /// started. The caller starts it: it counts as started.
  std::optional<Start> next();
  /// Whether the next reduction could start if a buffer was free.
  bool waits_for_a_slot() const { return in_progress_.size() == slots_ && next_is_here(); }
  /// The reduction in this buffer is done; the buffer is free.
  void finished(size_t slot);
  /// The buffer of the reduction that started first of those that are not done: the one to wait for when none is free.
  std::optional<size_t> oldest() const;
  /// All groups of this backward are reduced.
  bool is_done() const { return in_progress_.empty() && started_ == order_.size(); }

  /// The groups in the order in which their gradients came in this backward. Those without stand at the end.
  std::vector<size_t> order_of_arrival() const;
  /// What rank 0 tells all: from the next backward on. A permutation of all groups.
  void set_order(std::vector<size_t> order);

 private:
  bool next_is_here() const { return started_ < order_.size() && (ended_ || here_[order_[started_]]); }

  std::vector<size_t> parts_;  // by group
  std::vector<size_t> order_;
  size_t slots_;
  bool ended_ = true;
  size_t started_;                   // groups of order_, with all their parts
  size_t started_parts_ = 0;         // of the next one
  std::vector<bool> here_;           // by group
  std::vector<size_t> arrivals_;     // groups, in order
  std::vector<size_t> in_progress_;  // slots, the oldest first
};

}  // namespace lockstep::fsdp::internal
