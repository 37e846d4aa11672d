#pragma once

#include <utility>

#include <lockstep/collectives/process_group.h>

namespace lockstep::fsdp::internal {

/// The groups of a model whose weights lie once on each host; on one host all three are the same. Or of one whose weights are
/// gathered, of all ranks as if they were on one host.
class ShardGroups {
 public:
  /// Cuts the ranks of `parent`; collective over them. Throws c10::ValueError on all ranks where hosts have unequal numbers
  /// of them, and what split_group() throws.
  explicit ShardGroups(const ProcessGroup& parent, bool gathers = false);
  ShardGroups(const ShardGroups&) = delete;
  ShardGroups& operator=(const ShardGroups&) = delete;
  ~ShardGroups();

  /// All ranks of the parent, in its order.
  const ProcessGroup& all() const { return all_; }
  /// Those of this host, which share the weights; all where weights are gathered.
  const ProcessGroup& host() const { return host_; }
  /// Those that have the same rows as this rank, one on each host; null on one host.
  const ProcessGroup& replicas() const { return replicas_; }
  /// All ranks again, for gathering weights beside reductions, which come in an order of their own; null where none are gathered.
  const ProcessGroup& gathers() const { return gathers_; }

  /// When an operation of one of them has failed, the others fail with its cause: ranks that wait in those may not be in
  /// that one. From any thread.
  void spread_failure() const noexcept;
  /// Runs what uses the groups; when it throws, it spreads the failure.
  template <class Action>
  auto spread_failures(Action&& action) const {
    try {
      return std::forward<Action>(action)();
    } catch (...) {
      spread_failure();
      throw;
    }
  }

 private:
  void end() noexcept;

  ProcessGroup host_;
  ProcessGroup all_;
  ProcessGroup replicas_;
  ProcessGroup gathers_;
};

}  // namespace lockstep::fsdp::internal
