#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <lockstep/parallel/fsdp/options.h>

namespace lockstep::fsdp::internal {

/// Where the weights of a unit are: a rank has its rows alone, a gather is under way, all are here, or their memory is free
/// because the gradients are complete here; another rank may still have them, so this counts as whole until others need its room.
enum class UnitPhase { kSharded, kGathering, kWhole, kFreedEarly };

/// Whose order of units is recorded.
enum class GatherPass { kForward, kBackward };

/// What is to be done with a unit, in this order.
struct GatherStep {
  enum class Kind { kStart, kFinish, kFree };
  Kind kind;
  size_t unit;
  bool operator==(const GatherStep&) const = default;
};

/// Which units of weights are gathered and freed, and when. A unit is gathered when it is used; before that the one is
/// freed whose use is longest ago, so that never more than a given number are whole or on their way, unless one operator
/// uses more of them. With prefetch the unit that came next in the pass before is gathered early, in the room that is
/// left without the one in use. Ranks that use units in the same order gather the same ones in the same order, whichever
/// gradients each of them has: a unit whose memory is free already counts as whole until others need its room. But a rank
/// where that one is used once more, by a use that is not recorded for gradients (detach()), gathers it anew, and waits
/// for the others. A value: decisions alone.
class GatherSchedule {
 public:
  using Steps = std::vector<GatherStep>;

  /// `most`: units that are whole or on their way at once, at least 2.
  GatherSchedule(size_t units, size_t most, bool forward_prefetch,
                 std::optional<BackwardPrefetch> backward_prefetch);

  /// A pass begins; a forward may begin within a backward (activation checkpoints), and ends before it. With `keeps_all`
  /// nothing is freed to make room.
  Steps begin(GatherPass pass, bool keeps_all);
  /// It ends; its order is what the next one of its kind is expected to have.
  Steps end(GatherPass pass);

  /// An operator is about to use the unit, which stays whole until release().
  Steps use(size_t unit);
  void release(size_t unit) { --units_[unit].users; }
  /// All gradients of the unit's weights are there, so backward does not need it any more; unless it may use the unit
  /// again, which then stays as others do. Perhaps not on all ranks.
  Steps gradients_are_complete(size_t unit, bool may_be_used_again);
  /// All that no operator uses.
  Steps free_all();

 private:
  struct Unit {
    UnitPhase phase = UnitPhase::kSharded;
    int users = 0;
    uint64_t last_use = 0;
  };
  /// The order of the last pass of a kind, and how far this one has followed it.
  struct Order {
    std::vector<size_t> last = {};
    std::vector<size_t> now = {};
    bool follows = true;
    bool keeps_all = false;
  };

  Order& order() { return in_forward_ ? forward_ : backward_; }
  std::optional<size_t> next_after(size_t unit);
  void prefetch(Steps& steps);
  void prefetch_after_gradients(Steps& steps);
  bool make_room(Steps& steps);
  void start(Steps& steps, size_t unit);
  void finish(Steps& steps, size_t unit);
  void free(Steps& steps, size_t unit);

  std::vector<Unit> units_;
  const size_t most_;
  const bool forward_prefetch_;
  const std::optional<BackwardPrefetch> backward_prefetch_;
  Order forward_, backward_;
  bool in_forward_ = false;
  std::optional<size_t> current_, next_;
  uint64_t uses_ = 0;
};

}  // namespace lockstep::fsdp::internal
