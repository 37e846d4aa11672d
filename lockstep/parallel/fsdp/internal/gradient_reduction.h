#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/parallel/fsdp/internal/reduction_schedule.h>
#include <lockstep/parallel/fsdp/internal/sharded_weights.h>
#include <lockstep/parallel/fsdp/internal/weight_windows.h>

namespace lockstep::fsdp::internal {

/// Averages gradients over the ranks while backward() runs, each rank those of its own rows.
///
/// Autograd leaves a weight's gradient in .grad of the module's parameter. When those of a group of weights are there, and
/// it is the group's turn (ReductionSchedule), they are copied into a buffer of a ring in shared memory and dropped; a
/// reduce-scatter leaves each rank the averages of its rows, which become, or are added to, the gradients of its shards when
/// backward ends. Weights that no rank has a gradient for get none.
///
/// In place of a gradient that was taken away, one without values stays (on the meta device) until autograd has another
/// one: what takes the module's parameters for those of an unsharded model, as an optimizer made of them or clipping,
/// throws then, where it would otherwise do nothing.
///
/// Used by the thread that runs forward and backward.
class GradientReduction : public std::enable_shared_from_this<GradientReduction> {
 public:
  /// `groups`: indices into weights.all(), those that require gradients. `weights` and `windows` outlive it.
  static std::shared_ptr<GradientReduction> create(ShardedWeights& weights, WeightWindows& windows,
                                                   std::vector<std::vector<size_t>> groups,
                                                   const FullyShardedDataParallelOptions& options);
  GradientReduction(const GradientReduction&) = delete;
  GradientReduction& operator=(const GradientReduction&) = delete;
  ~GradientReduction();

  /// Whether the backward to come reduces. Without, gradients add up in .grad of the module's parameters.
  void set_synchronising(bool on) { synchronising_ = on; }
  /// Before a forward. Throws c10::Error when the last backward did not end: a reduction has failed, or something else has
  /// thrown.
  void check_ended() const;

 private:
  struct Group {
    std::vector<size_t> weights;
    PieceLayout layout;
    at::ScalarType dtype;      // of the reduction
    size_t missing = 0;        // gradients of this backward
    at::Tensor averages = {};  // this rank's piece
  };
  /// A buffer of the ring.
  struct Slot {
    at::Tensor buffer;
    ReductionSchedule::Start holds = {};
    Work work = {};
  };

  GradientReduction(ShardedWeights& weights, WeightWindows& windows, std::vector<std::vector<size_t>> groups,
                    const FullyShardedDataParallelOptions& options);
  void attach();
  void before_gradient(size_t weight);
  void on_gradient(size_t weight);
  void begin();
  void start_what_can_start();
  void start(const ReductionSchedule::Start& next);
  void finish(size_t slot);
  void end();
  void agree_on_used();
  void agree_on_order();
  void give_to_shards();

  ShardedWeights& weights_;
  WeightWindows& windows_;
  const bool keep_low_precision_;
  std::vector<Group> groups_;
  std::vector<size_t> group_of_;  // by weight; of those without gradients groups_.size()
  std::vector<std::pair<at::Tensor, unsigned>> hooks_;  // on parameters, before their gradients
  std::vector<Slot> ring_;
  ReductionSchedule schedule_;
  bool synchronising_ = true;
  bool order_is_known_ = false;
  bool in_backward_ = false;
  std::vector<bool> used_;  // by weight, in this backward
  std::optional<WeightWindows::Reading> reading_;
};

}  // namespace lockstep::fsdp::internal
