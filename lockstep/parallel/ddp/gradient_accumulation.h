#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// How many micro-batches make one optimizer step, and how many there are. Give `micro_batches`, or `samples`
/// and `batch_size`, or nothing when there is no end.
struct GradientAccumulationOptions {
  int64_t steps = 1;  ///< micro-batches in a group; the last group may have fewer
  /// This rank's micro-batches in an epoch (loader.size()). Each counts the same in its group.
  std::optional<int64_t> micro_batches = {};
  /// This rank's samples in an epoch, which come in micro-batches of `batch_size`, the last one perhaps
  /// smaller. Each sample counts the same in its group.
  std::optional<int64_t> samples = {};
  std::optional<int64_t> batch_size = {};
};

/// Several micro-batches make one optimizer step: with `steps` = k and batches of B the gradients are those
/// of one batch of k·B. Under DistributedDataParallel they add up locally and are reduced once, with the last
/// micro-batch of a group.
///
///     lockstep::GradientAccumulation accumulation(model, {.steps = 4, .micro_batches = loader.size()});
///     for (auto& batch : loader) {
///       // Under no_sync() unless it is the last of its group:
///       auto micro = accumulation.next();
///       // Scaled by this one's share:
///       micro.backward(loss_of(model(batch.data), batch.target));
///       if (micro.is_last()) {
///         optimizer.step();
///         optimizer.zero_grad();
///       }
///     }
///     // Before the next epoch:
///     accumulation.reset();
///
/// `loss` is a mean over the micro-batch. A group that ends early because the epoch does is a group of its
/// own size; with `samples`, a last micro-batch of fewer samples counts for less. next(samples, of) is for
/// counts that only the data tell, such as tokens.
///
/// The model is anything with no_sync() and is kept by reference, or any other module, for which only the
/// scaling is done. All ranks must have equally many micro-batches. Used by one thread, which also computes
/// the losses. docs/gradient_accumulation_and_uneven_inputs.md is the guide; the semantics are those of
/// no_sync() in torch/nn/parallel/distributed.py.
class GradientAccumulation {
 public:
  class MicroBatch;

  /// Throws c10::ValueError for numbers that make no sense.
  template <class Model>
  explicit GradientAccumulation(Model& model, GradientAccumulationOptions options)
      : GradientAccumulation(options) {
    if constexpr (requires { model.no_sync(); }) {
      make_no_sync_ = [&model]() -> std::shared_ptr<void> {
        return std::make_shared<Held<decltype(model.no_sync())>>(model);
      };
    }
  }
  GradientAccumulation(const GradientAccumulation&) = delete;
  GradientAccumulation& operator=(const GradientAccumulation&) = delete;

  /// The next micro-batch. Forward and backward belong between this call and the end of the answer's life.
  /// Throws c10::Error when the epoch is over, when the one before still lives, and when that one had no
  /// backward(): its gradients are missing, so zero_grad() and reset().
  [[nodiscard]] MicroBatch next();
  /// The same with this micro-batch's weight, samples / of, in place of the options': `samples` are its own
  /// (or its tokens, or what else its loss is a mean over), `of` those of all micro-batches of the group. If
  /// ranks have different numbers, let `of` be the mean over the ranks: then the result is the mean over all
  /// samples of all ranks.
  [[nodiscard]] MicroBatch next(double samples, double of);

  /// The next micro-batch begins an epoch, and a group. Throws c10::Error while a micro-batch lives.
  void reset();

  /// Optimizer steps in an epoch; empty without an end.
  std::optional<int64_t> groups() const;

 private:
  /// A guard, on the heap; so it need be neither copyable nor movable.
  template <class Guard>
  struct Held {
    template <class Model>
    explicit Held(Model& model) : guard(model.no_sync()) {}
    Guard guard;
  };

  enum class Phase : uint8_t {
    kReady,       // for the next micro-batch
    kWithin,      // one: it is alive
    kIncomplete,  // the last one ended without backward()
  };

  explicit GradientAccumulation(GradientAccumulationOptions options);
  int64_t group_size() const;
  double share() const;
  MicroBatch begin(double share);

  GradientAccumulationOptions options_;
  std::function<std::shared_ptr<void>()> make_no_sync_;  // empty for a model without
  int64_t done_ = 0;                                     // micro-batches of this epoch that began
  Phase phase_ = Phase::kReady;
};

/// One micro-batch, in the scope of its forward and backward. While it lives, and is not the last of its
/// group, the model does not synchronise. Its end, also by an exception, restores what was before.
class GradientAccumulation::MicroBatch {
 public:
  MicroBatch(const MicroBatch&) = delete;
  MicroBatch& operator=(const MicroBatch&) = delete;
  ~MicroBatch();

  /// backward() of the loss times this micro-batch's share of its group. Once; add up several losses first.
  /// Throws c10::Error for a loss that was computed before next(): its forward was not under no_sync().
  void backward(const at::Tensor& loss);
  /// The scaled loss, for programs that call backward() themselves, as with a gradient scaler:
  /// scaler.scale(micro.scale(loss)).backward(). In place of backward(), and throws as it does.
  [[nodiscard]] at::Tensor scale(const at::Tensor& loss);

  /// Whether its backward() completes the group: then it is time for the optimizer.
  bool is_last() const { return index_ + 1 == group_size_; }
  int64_t index() const { return index_; }  ///< in its group, from 0
  int64_t group_size() const { return group_size_; }
  double share() const { return share_; }  ///< what the loss is multiplied with

 private:
  friend class GradientAccumulation;
  MicroBatch(GradientAccumulation& owner, int64_t index, int64_t group_size, double share);

  GradientAccumulation& owner_;
  int64_t index_;
  int64_t group_size_;
  double share_;
  uint64_t first_sequence_;  // of autograd's nodes that are younger
  bool scaled_ = false;
  std::shared_ptr<void> no_sync_;
};

}  // namespace lockstep
