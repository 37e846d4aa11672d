#pragma once

#include <cstdint>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// What some parameters looked like, to tell whether an optimizer has stepped since: LibTorch's optimizers
/// change them through data(), which counts no versions, so some elements of each are looked at too. Used by
/// one thread at a time.
class Fingerprint {
 public:
  /// Some 10 ns for each tensor. What lies on a device is copied there, in the order of its current stream,
  /// without waiting. The memory of a parameter on a device is held until the next take().
  void take(const std::vector<at::Tensor>& tensors);
  /// Whether they look otherwise now. Waits for devices. Where a device had no memory left for the copy,
  /// versions alone tell.
  bool differs(const std::vector<at::Tensor>& tensors) const;

 private:
  struct Samples {
    std::vector<at::Tensor> parts;  // views of the parameters
    at::Tensor values;              // what they held; undefined, that is unknown, if there was no memory
  };
  using Source = std::tuple<const void*, at::ScalarType, int64_t>;  // address, dtype, number of elements
  void follow(const std::vector<at::Tensor>& tensors);

  uint64_t hash_ = 0;
  std::vector<Source> sources_;  // of the parameters on devices, as `parts` are views of them
  std::map<std::pair<int, at::ScalarType>, Samples> samples_;  // by device number and dtype
};

}  // namespace lockstep
