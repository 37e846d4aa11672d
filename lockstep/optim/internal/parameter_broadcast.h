#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/collectives/functional.h>

namespace lockstep::internal {

/// Updated parameters on their way from the ranks that own them to all others.
///
/// Small parameters travel together in *parcels*, flat copies; a large one travels alone, from its own memory
/// into that of the others. Used by one thread at a time.
class ParameterBroadcast {
 public:
  explicit ParameterBroadcast(ProcessGroup group) : group_(std::move(group)) {}

  /// Starts to send `parameters`, of one dtype, which must not be touched until finish(). `owner` is a group
  /// rank. Collective: all ranks call it with the same arguments in the same order.
  void start(int owner, const std::vector<at::Tensor>& parameters);

  /// Waits for everything that was started. Throws the first error once nothing is on its way any more: then
  /// some parameters may have their new values and others not.
  void finish();

 private:
  struct Parcel {
    at::Tensor flat;  // not defined: the only parameter travels itself
    std::vector<at::Tensor> parameters;
    int owner = 0;
    Work work;
  };
  void send(Parcel parcel);

  ProcessGroup group_;
  std::vector<Parcel> under_way_;
};

}  // namespace lockstep::internal
