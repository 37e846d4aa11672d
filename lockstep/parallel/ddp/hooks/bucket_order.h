#pragma once

#include <cstdint>
#include <memory>

#include <lockstep/collectives/process_group.h>

namespace lockstep {

/// For communication hooks whose callbacks start further collectives: starts them in the same order on all
/// ranks.
///
/// Hooks are called on all ranks in the same order, so the collective that a hook starts itself needs
/// nothing. But callbacks of several buckets, and the program's own collectives, run in the order in which
/// things happen to be ready, and that differs by rank. So a hook takes a turn; its callback waits for the
/// turn, and uses the turn's group, which nothing else uses:
///
///     struct MyState { lockstep::BucketOrder order; … };
///
///     auto turn = state->order.take_turn(group);               // in the hook
///     …                                                        // in the callback of the first collective:
///     turn->wait();
///     auto next = lockstep::all_reduce(tensor, SUM, turn->group(), /*async_op=*/true);
///     turn.reset();                                            // the next bucket may start its own
///
/// A turn ends when its last handle goes, also when the first collective failed. One object for each model;
/// take_turn() is called by one thread at a time, the rest is thread-safe. Keep it in a std::shared_ptr where
/// states are copied.
class BucketOrder {
  struct Open;

 public:
  class Turn {
   public:
    Turn(ProcessGroup group, std::shared_ptr<Open> open, uint64_t number);
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    ~Turn();

    /// Returns when all turns that were taken before are over.
    void wait() const;
    /// A group of the same ranks as the hook's.
    const ProcessGroup& group() const { return group_; }

   private:
    ProcessGroup group_;
    std::shared_ptr<Open> open_;
    uint64_t number_;
  };

  BucketOrder();
  BucketOrder(const BucketOrder&) = delete;
  BucketOrder& operator=(const BucketOrder&) = delete;

  /// `group`: the hook's (empty: the default one). Collective the first time with a group: it splits off one
  /// of the same ranks, and throws what split_group() throws.
  std::shared_ptr<Turn> take_turn(const ProcessGroup& group);

 private:
  ProcessGroup parent_, own_;
  std::shared_ptr<Open> open_;
  uint64_t taken_ = 0;
};

}  // namespace lockstep
