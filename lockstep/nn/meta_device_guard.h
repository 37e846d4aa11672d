#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

namespace lockstep {

/// While it lives, tensors that this thread makes without naming a device lie on the meta device: they have sizes and dtypes,
/// but no memory and no values, and filling them takes no random numbers. So a module is built without its values:
///
///     std::shared_ptr<Net> net;
///     {
///       const lockstep::MetaDeviceGuard guard;
///       net = std::make_shared<Net>();
///     }
///
/// Works for LibTorch's modules and those made of them. Tensors from lists of numbers (torch::tensor({1, 2})), from_blob(), and
/// what names a device stay where they are. Guards nest; other threads are not affected. Python's
/// torch.device("meta") as a context.
class MetaDeviceGuard {
 public:
  MetaDeviceGuard();
  MetaDeviceGuard(const MetaDeviceGuard&) = delete;
  MetaDeviceGuard& operator=(const MetaDeviceGuard&) = delete;
  ~MetaDeviceGuard() = default;

 private:
  c10::impl::IncludeDispatchKeyGuard include_;
};

}  // namespace lockstep
