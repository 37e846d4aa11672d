#pragma once

#include <ATen/core/Tensor.h>

#include <lockstep/collectives/process_group.h>

namespace lockstep {

/// Batch normalisation with the statistics of all ranks' batches together, as if one process held them.
///
/// `input`: (N, C) or (N, C, …), floating point, on the CPU or a GPU; N may differ by rank and may be 0. C is
/// the same everywhere. `weight` and `bias`: C elements each, or undefined. `running_mean` and `running_var`:
/// updated in place with the group's mean and unbiased variance, on all ranks alike, or undefined; momentum 0
/// leaves them as they are. Answers a tensor of the input's sizes, dtype and memory format.
///
/// Collective: forward gathers mean, variance and count of each rank, 2C + 1 numbers; backward sums 2C
/// numbers if the input needs a gradient. All ranks run both, those with an empty input too. The gradients of
/// weight and bias are those of this rank's part; DistributedDataParallel averages them. Statistics are
/// float32, of float64 inputs float64; they are combined in float64 and in rank order, so all ranks use the
/// same bits. Differentiable any number of times, if all ranks differentiate (torch's is so once).
///
/// Throws c10::ValueError for inputs of fewer than two dimensions, without channels, or with one value per
/// channel in all ranks together (on every rank then), and when this rank is not in the group; and what
/// all_gather throws. A group of one rank computes plain batch normalisation. On a GPU it waits for the
/// counts, as torch's does. Thread-safe for different groups.
///
/// torch/nn/modules/_functions.py, SyncBatchNorm; the combination of variances is that of Chan, Golub and
/// LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
at::Tensor sync_batch_norm(const at::Tensor& input, const at::Tensor& weight = {},
                           const at::Tensor& bias = {}, const at::Tensor& running_mean = {},
                           const at::Tensor& running_var = {}, double eps = 1e-5, double momentum = 0.1,
                           const ProcessGroup& process_group = {});

/// Where a layer in training mode synchronises: `process_group`, or the default group for an empty one.
/// Answers an empty handle when there is nothing to synchronise: no default group, or one rank. Throws
/// c10::ValueError when this rank is not in the group (torch goes on with this rank's statistics alone).
ProcessGroup sync_batch_norm_group(const ProcessGroup& process_group);

}  // namespace lockstep
