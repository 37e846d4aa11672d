#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/sequential.h>

/// Where to cut a Sequential for Pipe. torchgpipe/balance of torchgpipe, later
/// torch.distributed.pipeline.sync._balance.
namespace lockstep {

/// Cuts a row of layers into blocks of neighbours, none empty, so that the largest sum of costs in a block is
/// the smallest that there is; among such cuts it takes one with the smallest sum of squares, so that what is
/// left is even, too. Returns how many layers each block has. A pure function: the same for the same costs.
/// Time grows with partitions * layers². Throws c10::ValueError for fewer layers than partitions, and for
/// costs that are negative or not finite.
std::vector<int64_t> balance_cost(const std::vector<double>& costs, int64_t partitions);

struct BalanceByTimeOptions {
  /// How long layers are timed, all together; each at least twice.
  std::chrono::milliseconds timeout = std::chrono::seconds(1);
};

/// A balance for Pipe by the times that the layers' forward and backward take on `sample`, a micro-batch that
/// goes into the first layer: the shortest of each layer, so what else runs on the machine counts little.
/// Times differ from run to run, and so may the balance. The layers compute where they are, all on one
/// device, with gradients; afterwards their buffers, their parameters' gradients and torch's random
/// generators are as they were. Throws c10::ValueError for fewer layers than partitions.
std::vector<int64_t> balance_by_time(int64_t partitions, const torch::nn::Sequential& module,
                                     const at::Tensor& sample, const BalanceByTimeOptions& options = {});

struct BalanceBySizeOptions {
  /// Into how many micro-batches Pipe will split a batch such as the sample.
  int64_t chunks = 1;
  /// How many times its size a parameter takes: 1 for itself, 1 for its gradient, and its share of the
  /// optimizer's state: 2 for plain SGD, 3 with momentum, 4 for Adam.
  double param_scale = 2.0;
};

/// A balance for Pipe by bytes: those of a layer's parameters times param_scale, and of its output for one
/// micro-batch of `sample`, a batch. What a layer keeps inside for backward is not counted. Runs the layers
/// once, without gradients; afterwards all is as it was. Throws as balance_by_time() does.
std::vector<int64_t> balance_by_size(int64_t partitions, const torch::nn::Sequential& module,
                                     const at::Tensor& sample, const BalanceBySizeOptions& options = {});

}  // namespace lockstep
