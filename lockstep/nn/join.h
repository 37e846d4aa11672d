#pragma once

#include <memory>
#include <vector>

#include <c10/core/Device.h>

#include <lockstep/collectives/functional.h>

/// Training on uneven inputs: ranks that run out of batches early stand in for themselves in the collectives
/// of those that still train. torch/distributed/algorithms/join.py.
///
///     {
///       Join join({&model, &optimizer});
///       for (auto& batch : batches) { … model(batch) … backward() … optimizer.step() … }
///     }                                   // waits here, and takes part in the others' collectives meanwhile
///
/// In each iteration the first joinable counts the ranks that still train, by an all-reduce of ones; a rank
/// that has joined adds a zero to it, and, as long as the sum is not 0, calls the main hook of every
/// joinable, which must call the same collectives as one iteration does. When all have joined, all ranks
/// call the post hooks.
namespace lockstep {

class Join;

/// What a rank that has joined does on behalf of one joinable. torch.distributed.algorithms.JoinHook.
class JoinHook {
 public:
  JoinHook() = default;
  JoinHook(const JoinHook&) = delete;
  JoinHook& operator=(const JoinHook&) = delete;
  virtual ~JoinHook() = default;

  /// Called once for each iteration of the ranks that still train: calls the collectives of one iteration
  /// (forward, backward, step), with values that leave the result right.
  virtual void main_hook() {}
  /// Called once when all ranks have joined. `is_last_joiner`: this rank was among the last, so that its
  /// state is the most recent.
  virtual void post_hook(bool is_last_joiner) { (void)is_last_joiner; }
};

/// The arguments of a Join. Join hooks read those that concern them.
struct JoinOptions {
  /// false: the Join does nothing, for inputs that are known to be even.
  bool enable = true;
  /// All ranks throw as soon as one of them runs out of inputs.
  bool throw_on_early_termination = false;
  /// DistributedDataParallel's: gradients are divided by the group's size, not by the number of ranks that
  /// still train.
  bool divide_by_initial_world_size = true;
};

/// What a joinable knows of the Join it takes part in. torch's _JoinConfig.
struct JoinConfig {
  bool enable = false;
  bool throw_on_early_termination = false;
  bool is_first_joinable = false;  ///< it notifies the others, on behalf of all joinables
};

/// Something with collectives in every iteration, that can be shadowed. Calls
/// Join::notify_join_context(*this) before the first of them. torch.distributed.algorithms.Joinable.
class Joinable {
 public:
  Joinable() = default;
  virtual ~Joinable() = default;

  virtual std::unique_ptr<JoinHook> join_hook(const JoinOptions& options) = 0;
  /// Where the Join's own collectives take their tensors.
  virtual at::Device join_device() const = 0;
  /// The group of the Join's own collectives, the same for all joinables of a Join; empty: the default group.
  virtual ProcessGroup join_process_group() const = 0;

  /// Disabled outside of a Join. While this rank shadows, `enable` is still true.
  const JoinConfig& join_config() const { return join_config_; }

 protected:
  // Only the object as a whole may be copied, and the copy is in no Join.
  Joinable(const Joinable&) {}
  Joinable& operator=(const Joinable&) { return *this; }

 private:
  friend class Join;
  JoinConfig join_config_;
  Join* join_ = nullptr;  // that it is in, on this rank
};

/// The guard around a training loop. torch.distributed.algorithms.Join, a context manager there.
///
/// Its scope ends when all ranks have joined, so the destructor communicates, and throws what finish()
/// throws; call finish() at the end of the loop if you like errors in a plain statement. When an exception
/// leaves the scope nothing is shadowed: the others' collectives fail once this rank's group is destroyed or
/// its process ends. The joinables must outlive the guard. Used by one thread.
class [[nodiscard]] Join {
 public:
  /// The joinables' hooks run in this order; all members of the group pass the same. Throws c10::ValueError
  /// without joinables and for joinables of several groups, and c10::Error for one that is in a Join already.
  explicit Join(std::vector<Joinable*> joinables, const JoinOptions& options = {});
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;
  ~Join() noexcept(false);

  /// This rank has no more inputs: shadows the others until all have joined, then runs the post hooks. Throws
  /// c10::Error when throw_on_early_termination is set and others still train, and what the collectives and
  /// the hooks throw. Does nothing the second time.
  void finish();

  /// Tells the ranks that have joined that this rank has not. Called by a joinable once per iteration, before
  /// its collectives. Returns the all-reduce of the number of ranks that still train (in result()[0], a float
  /// tensor of one element) if `joinable` is the first of an enabled Join, else nothing: then the call does
  /// nothing, also where this rank has joined and a hook makes the call. Throws c10::Error on all ranks when
  /// one has run out of inputs and throw_on_early_termination is set.
  static Work notify_join_context(const Joinable& joinable);

  /// How many ranks still train in this iteration, for joinables that divide by it: what this rank's last
  /// notification counted, which it awaits, or what it counted before the iteration that it shadows. Throws
  /// c10::Error for a joinable that is in no Join.
  static int64_t training_ranks(const Joinable& joinable);

 private:
  void shadow();
  void leave();
  int64_t count_nonjoined() const;

  std::vector<Joinable*> joinables_;
  std::vector<std::unique_ptr<JoinHook>> hooks_;
  JoinOptions options_;
  ProcessGroup group_;
  Work counting_;  // the last notification's all-reduce, until it is awaited
  int64_t training_ranks_ = 0;
  const int exceptions_before_;
  bool finished_ = false;
};

}  // namespace lockstep
