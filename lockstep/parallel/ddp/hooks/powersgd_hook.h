#pragma once

#include <lockstep/parallel/ddp/grad_bucket.h>
#include <lockstep/parallel/ddp/hooks/powersgd_state.h>

/// PowerSGD: gradients as products of two thin matrices, found by one step of the power method, with what is
/// lost added to the next gradients. Vogels et al. 2019 (https://arxiv.org/abs/1905.13727).
///
///     lockstep::PowerSGDState state(nullptr, {.matrix_approximation_rank = 2, .start_powerSGD_iter = 100});
///     model.register_comm_hook(state, lockstep::powerSGD_hook);
///
/// Both reduce into the bucket's buffer, which is their future's value, and throw what all_reduce throws. The
/// first compressed iteration makes a further group of the same ranks (see BucketOrder). Given the same seed
/// and gradients the numbers are those of torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py, up to
/// rounding.
namespace lockstep {

/// Compresses each gradient of two or more dimensions, seen as a matrix of its first dimension times the
/// others, where that is worth it (min_compression_rate). The others are averaged as they are.
HookFuture powerSGD_hook(const PowerSGDState& state, GradBucket& bucket);

/// Compresses the whole bucket as one square matrix, filled up with zeros: faster, but the structure that a
/// low rank needs is lost, so accuracy suffers. Try powerSGD_hook first. Unlike PyTorch it adds
/// orthogonalization_epsilon, too.
HookFuture batched_powerSGD_hook(const PowerSGDState& state, GradBucket& bucket);

}  // namespace lockstep
