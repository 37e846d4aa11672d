#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/collectives/process_group.h>

/// The norm of all gradients together, and clipping by it or by value. torch/nn/utils/clip_grad.py has the
/// names, the order of arguments and the defaults.
///
/// Gradients that every rank holds whole, as DistributedDataParallel leaves them, need no communication: all
/// ranks compute the same norm from the same bits. Where each rank holds other gradients, or pieces of them
/// (sharded or partitioned models), give the group that holds them all together as `sharded_over`, empty for
/// the default group. Its ranks then exchange one number, and all get the norm of the whole, with the same
/// bits. All of them must call; a rank without gradients too (with NCCL it needs set_device() or the group's device_id).
///
/// Norms: p, 1, 2, ±infinity, or 0 (the number of gradients that are not all zero; of pieces if sharded).
/// Half-precision gradients are measured in float32 (torch rounds each one's norm to half precision). A
/// sparse gradient counts as the dense one that it stands for (torch's functions refuse them). `foreach` as
/// in torch: without a value where it is there, with true an error where it is not.
///
/// No history is recorded. Thread-safe for different tensors and groups. All but error_if_nonfinite works
/// without waiting for a GPU, but on a rank of a group with NCCL that has no gradients on one.
namespace lockstep {

/// The norm of `tensors` as one vector, a tensor of one element on the first one's device; 0 for an empty
/// list. Throws c10::Error when it is infinite or NaN and error_if_nonfinite is set; with sharded_over on all
/// ranks.
at::Tensor get_total_norm(std::vector<at::Tensor> tensors, double norm_type = 2.0,
                          bool error_if_nonfinite = false, std::optional<bool> foreach = {},
                          const std::optional<ProcessGroup>& sharded_over = {});

/// Multiplies the gradients of `parameters` with min(max_norm / (total_norm + 1e-6), 1), in place. A
/// parameter that is listed twice, as LibTorch lists those with two names, counts once.
void clip_grads_with_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           const at::Tensor& total_norm, std::optional<bool> foreach = {});

/// Both: scales the gradients of `parameters` so that their norm is at most max_norm; returns the norm
/// before. Call it after backward(), and before optimizer.step().
at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0,
                           bool error_if_nonfinite = false, std::optional<bool> foreach = {},
                           const std::optional<ProcessGroup>& sharded_over = {});

/// Clamps each element of the gradients of `parameters` to [-clip_value, clip_value], in place; NaN stays.
/// Needs no communication, sharded or not. Throws c10::NotImplementedError for a sparse gradient, as torch
/// does, before it changes any.
void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value,
                      std::optional<bool> foreach = {});

}  // namespace lockstep
