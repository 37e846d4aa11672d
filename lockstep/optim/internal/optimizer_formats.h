#pragma once

#include <torch/optim/optimizer.h>

#include <lockstep/optim/optimizer_format.h>

namespace lockstep::internal {

/// The format of an optimizer that updates by itself (one that contains another has that one's): its own, or
/// that of LibTorch's class. Throws c10::ValueError, with what to do, for an unknown class.
const OptimizerFormat& format_of(const torch::optim::Optimizer& optimizer);

}  // namespace lockstep::internal
