#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/base/training/held_tensors.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/host_compression.h>
#include <lockstep/device/streams.h>
#include <lockstep/parallel/fsdp/internal/reduction_schedule.h>
#include <lockstep/parallel/fsdp/internal/sharded_weights.h>
#include <lockstep/parallel/fsdp/internal/weight_windows.h>
#include <lockstep/parallel/fsdp/options.h>

namespace lockstep::fsdp::internal {

/// How many reductions have started, since the model was made: the n-th is the same on all ranks.
struct ReductionProgress {
  int64_t own = 0;  ///< here
  /// On each rank, as far as this one knows. Where ranks wait for each other in gathers too, it is told, and a rank waits no
  /// longer than 0.1 s in a backward for others. Otherwise none: then a rank may wait for a reduction that others have not
  /// started, for they come to it, unless another model's reductions may keep them.
  std::optional<int64_t> all = {};
};

/// Averages gradients over the ranks while backward() runs, each rank those of its own rows.
///
/// Autograd leaves a weight's gradient in .grad of the module's parameter. When those of a group of weights are there,
/// and it is the group's turn (ReductionSchedule), they are copied into buffers of a ring in shared memory, part by part,
/// and dropped; reduce-scatters leave each rank the averages of its rows, which become, or are added to, the gradients of
/// its shards when backward ends. Over several hosts this is done on each; after it an all_reduce makes averages of the
/// hosts' ones, while backward goes on. Weights that no rank has a gradient for get none.
///
/// A backward may reach several models, in an order that is another one on each rank: after it their reductions end in the
/// order in which the models were made.
///
/// In place of a gradient that was taken away, one without values stays (on the meta device) until autograd has another
/// one: what takes the module's parameters for those of an unsharded model, as an optimizer made of them or clipping,
/// throws then, where it would otherwise do nothing.
///
/// Used by the thread that runs forward and backward; on a device autograd's thread runs backward.
class GradientReduction : public std::enable_shared_from_this<GradientReduction> {
 public:
  /// Allocates its buffers. `groups`: indices into weights.all(), of those that require gradients; within a group they are
  /// reduced in the same dtype. `weights` and `windows` outlive it.
  GradientReduction(ShardedWeights& weights, WeightWindows& windows, std::vector<std::vector<size_t>> groups,
                    const FullyShardedDataParallelOptions& options);
  GradientReduction(const GradientReduction&) = delete;
  GradientReduction& operator=(const GradientReduction&) = delete;
  ~GradientReduction();
  /// From now on gradients are taken. When a shared_ptr has it, and the weights' values are in their place.
  void attach();

  /// Whether backwards that begin from now on reduce. Without, gradients add up in .grad of the module's parameters.
  void set_synchronising(bool on) { synchronising_ = on; }
  /// Called in a backward that reduces: when all gradients of a weight's group are there, and when all are reduced.
  void set_listeners(std::function<void(size_t weight)> when_complete, std::function<void()> when_reduced) {
    when_complete_ = std::move(when_complete);
    when_reduced_ = std::move(when_reduced);
  }
  ReductionProgress& progress() { return progress_; }
  /// How many backwards have reduced.
  int64_t reduced() const { return reduced_; }
  /// Drops what has added up for this weight.
  void drop_sum(size_t weight);
  /// Before a forward, by any thread. Throws c10::Error when the last backward did not end, of this thread, or on a
  /// device of any: a reduction has failed, or something else has thrown, of which the other ranks have heard.
  void check_ended() const;
  /// Adds its buffers.
  void tell(HeldTensors& held) const {
    for (const Slot& slot : ring_) held.gradients.push_back(slot.buffer);
  }

 private:
  struct Group {
    std::vector<size_t> weights;
    PieceLayout layout;
    at::ScalarType dtype;                    // of the reduction
    size_t missing = 0;                      // gradients of this backward
    std::vector<at::Tensor> gradients = {};  // flat, by weight; from the first part's start to the last one's
    at::Tensor averages = {};                // this rank's piece
    Work between_hosts = {};
    std::shared_ptr<ErrorFeedback> feedback = std::make_shared<ErrorFeedback>();
  };
  /// A buffer of the ring.
  struct Slot {
    at::Tensor buffer;
    size_t group = 0;
    bool is_last_part = false;  // of the group
    Work work = {};
    Work started_everywhere =
        {};  // on a device, whose host does not see by `work` whether all ranks have started it
  };

  class EndsOfBackward;

  void before_gradient(size_t weight);
  void on_gradient(size_t weight);
  void begin();
  void start_what_can_start();
  bool all_have_started_oldest() const;
  bool comes_to_an_end(size_t oldest);
  void reduce_the_rest();
  void take_gradients(Group& group);
  void start(const ReductionSchedule::Start& next);
  void finish(size_t slot);
  void end();
  void agree_on_used();
  void agree_on_order();
  void give_to_shards();

  static std::atomic<int64_t> made_;      // of this process, so far; in the same order on all ranks
  static std::atomic<int64_t> attached_;  // of this process, now

  const int64_t number_ = made_++;
  ShardedWeights& weights_;
  WeightWindows& windows_;
  const bool keep_low_precision_;
  const std::optional<HostCompression> between_hosts_;
  std::vector<Group> groups_;
  std::vector<size_t> group_of_;  // by weight; of those without gradients groups_.size()
  std::vector<std::pair<at::Tensor, unsigned>> hooks_;  // on parameters, before their gradients
  std::vector<Slot> ring_;
  WritingStreams streams_;  // that gradients and buffers were last used on
  ReductionSchedule schedule_;
  ReductionProgress progress_;
  bool gave_up_ = false;  // waiting in this backward for what ranks have perhaps not started
  std::function<void(size_t)> when_complete_;
  std::function<void()> when_reduced_;
  bool synchronising_ = true;
  bool order_is_known_ = false;
  int64_t reduced_ = 0;
  std::atomic<std::thread::id> backward_ = std::thread::id();  // the thread that runs one
  std::vector<bool> used_;                                     // by weight, in this backward
  std::optional<WeightWindows::Reading> reading_;
};

}  // namespace lockstep::fsdp::internal
