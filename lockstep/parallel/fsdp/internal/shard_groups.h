#pragma once

#include <string>
#include <utility>

#include <c10/core/Device.h>

#include <lockstep/collectives/process_group.h>

namespace lockstep::fsdp::internal {

/// The groups of a model of which each host has all rows; on one host all three are the same. Or of one whose rows lie on all
/// ranks, as if these were on one host.
class ShardGroups {
 public:
  /// Which ranks have all rows among them.
  enum class RowsOn { kEachHost, kAllRanks };

  /// Cuts the ranks of `parent`; collective over them. With `gathers` ranks gather rows that others have. Throws c10::ValueError
  /// on all ranks where hosts have unequal numbers of them but should have the same rows, and what split_group() throws.
  /// `device`: where modules compute.
  ShardGroups(const ProcessGroup& parent, RowsOn rows_on, bool gathers, c10::Device device);
  ShardGroups(const ShardGroups&) = delete;
  ShardGroups& operator=(const ShardGroups&) = delete;
  ~ShardGroups();

  /// All ranks of the parent, in its order.
  const ProcessGroup& all() const { return all_; }
  /// Those that have all rows among them.
  const ProcessGroup& host() const { return host_; }
  /// Those that have the same rows as this rank, one on each host; null on one host.
  const ProcessGroup& replicas() const { return replicas_; }
  /// The ranks of host() again, for gathering weights beside reductions, which come in an order of their own; null where none are
  /// gathered.
  const ProcessGroup& gathers() const { return gathers_; }

  /// Has the groups' backends for a device make their connections, in one order on all ranks: a backend that makes them at the
  /// first use makes a rank wait for the others there. Collective.
  void connect() const;

  /// When an operation of one of them has failed, the others fail with its cause: ranks that wait in those may not be in
  /// that one; and what a device has still to do in them ends. From any thread.
  void spread_failure() const noexcept;
  /// Fails them all, unless one has failed: then all with its cause. Other ranks' errors name this one, and then have the text.
  void fail(const std::string& text) const noexcept;
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
  bool any_has_failed() const;
  void abort() const noexcept;

  const c10::Device device_;
  ProcessGroup host_;
  ProcessGroup all_;
  ProcessGroup replicas_;
  ProcessGroup gathers_;
};

}  // namespace lockstep::fsdp::internal
