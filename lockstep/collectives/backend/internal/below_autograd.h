#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

namespace lockstep::collectives::internal {

/// Collectives write into tensors behind autograd's back, as PyTorch's do.
struct BelowAutograd {
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
};

}  // namespace lockstep::collectives::internal
