#pragma once

#include <string>
#include <vector>

#include <lockstep/parallel/ddp/options.h>

/// Making all ranks' models the same. Collective functions; thread-safe for different groups.
namespace lockstep {

/// Throws on every rank, naming rank, parameter, sizes and dtypes, unless all ranks have the same parameters
/// in the same order as the group's rank 0. torch/nn/parallel/distributed.py,
/// _verify_param_shape_across_processes.
void verify_same_model(const std::vector<NamedTensor>& parameters, const ProcessGroup& group);

/// The values of group rank `source` into every rank's tensors, many small ones in one broadcast. Leaves
/// autograd's version counters alone, so that graphs which saved a tensor stay valid.
void broadcast_coalesced(const std::vector<NamedTensor>& tensors, const ProcessGroup& group, int source = 0);

/// The bytes of group rank `source`, on every rank.
std::string broadcast_bytes(std::string bytes, const ProcessGroup& group, int source = 0);

/// The highest group rank for which `candidate` holds; the same on all ranks. −1 if there is none.
int find_common_rank(const ProcessGroup& group, bool candidate);

}  // namespace lockstep
