#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <lockstep/base/tensor_tree.h>

namespace lockstep::data {

/// The value with its tensors on `device`: at::Tensor, Example, and pairs, tuples, arrays, optionals, vectors
/// and maps of such, and types with a visit_tensors() (lockstep/base/tensor_tree.h). `non_blocking`: copies
/// from pinned memory are only enqueued on the device's current stream, and the program goes on. Thread-safe.
template <class T>
T to_device(T value, c10::Device device, bool non_blocking = false) {
  static_assert(can_replace_tensors<T>,
                "no tensors can be found in this type of batch; give it a visit_tensors() (see "
                "lockstep/base/tensor_tree.h)");
  for_each_owned_tensor(value, [&](auto& tensor) {
    // Does not compile for a tensor that is const: it would stay where it is.
    static_cast<at::Tensor&>(tensor) = tensor.to(tensor.options().device(device), non_blocking);
  });
  return value;
}

}  // namespace lockstep::data
