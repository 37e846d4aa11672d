#pragma once

#include <string>
#include <vector>

#include <lockstep/collectives/process_group.h>

namespace torch::nn {
class Module;
}

namespace lockstep {

/// The names of the parameters whose gradients are sparse: the weights of Embedding and EmbeddingBag modules
/// with sparse(true).
std::vector<std::string> sparse_parameters(const torch::nn::Module& module);

/// Whether it is a BatchNorm, or a SyncBatchNorm.
bool is_batch_norm(const torch::nn::Module& module);
/// Whether a SyncBatchNorm is among its modules. (A converted BatchNorm does not show.)
bool has_sync_batch_norm(const torch::nn::Module& module);
/// The group of each SyncBatchNorm among its modules, and of each converted BatchNorm, as it was given: empty for the default
/// group.
std::vector<ProcessGroup> sync_batch_norm_groups(const torch::nn::Module& module);

}  // namespace lockstep
