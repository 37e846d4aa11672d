#pragma once

#include <torch/optim/optimizer.h>

namespace lockstep::internal {

/// Where an optimizer's options keep what schedulers cycle as momentum.
enum class MomentumKind {
  kNone,
  kMomentum,  ///< SGD, RMSprop
  kBeta1,     ///< the first of Adam's and AdamW's betas
};

/// LibTorch's options have get_lr() and set_lr(), but nothing of the kind for momentum: these two functions
/// know its option types. An optimizer of your own whose options derive from one of them is known, too.
MomentumKind momentum_kind(const torch::optim::OptimizerOptions& options);
/// `options` are of a kind but kNone.
void set_momentum(torch::optim::OptimizerOptions& options, double momentum);

}  // namespace lockstep::internal
