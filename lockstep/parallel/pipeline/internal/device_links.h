#pragma once

#include <set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/process_group.h>

namespace lockstep::pipeline::internal {

/// Tensors from a rank's device to another rank's, as the group's backend for such devices sends them: NCCL, or through the
/// host's memory.
///
/// NCCL has no tags: it pairs the sends and the receives of two ranks in their order, and those that go both ways between
/// them would wait for each other. So there are two groups: in one, ranks send to higher ranks, in the other to lower ones. A
/// receiver starts its receives from a rank in the order of that rank's sends. Used by one thread.
class DeviceLinks {
 public:
  /// `device` is this rank's. Collective over `group`.
  DeviceLinks(const ProcessGroup& group, c10::Device device);
  DeviceLinks(const DeviceLinks&) = delete;
  DeviceLinks& operator=(const DeviceLinks&) = delete;
  ~DeviceLinks();

  /// Passes a number from the first to the second rank of each pair, in one order on all ranks: NCCL connects two ranks
  /// when both have come there, for which a first send would wait. Collective.
  void connect(const std::set<std::pair<int, int>>& pairs) const;

  c10::Device device() const { return device_; }
  /// Whether it takes this tensor; undefined ones and those without elements need no link.
  bool takes(const at::Tensor& tensor) const;
  /// Tensors must have no gaps in memory; `to` and `from` are group ranks. Neither call waits.
  Work send(const at::Tensor& tensor, int to) const;
  Work receive(const at::Tensor& tensor, int from) const;
  /// Fails both groups.
  void abort() const noexcept;
  std::vector<ProcessGroup> groups() const { return {up_, down_}; }

 private:
  const ProcessGroup& group_to(int from, int to) const { return from < to ? up_ : down_; }

  const c10::Device device_;
  const int rank_;
  ProcessGroup up_, down_;
};

}  // namespace lockstep::pipeline::internal
