#pragma once

#include <memory>

#include <lockstep/parallel/ddp/distributed_data_parallel.h>
#include <lockstep/parallel/ddp/parity/dictionary.h>
#include <lockstep/parallel/ddp/parity/models.h>

namespace parity {

using Model = lockstep::DistributedDataParallel<Net>;

/// A job's "options", which name parameters and dtypes by text. `pairs`: this rank's group of two.
lockstep::DistributedDataParallelOptions ddp_options(const Dictionary& job, const Net& net,
                                                     const lockstep::ProcessGroup& pairs);

/// Registers the job's communication hook, buffer hook, or optimizer in backward, if it has them.
void register_hooks(Model& model, const Dictionary& job, const lockstep::ProcessGroup& pairs);

/// Each parameter once: parameters() gives shared ones twice, and an optimizer would step twice with them.
std::vector<torch::Tensor> distinct_parameters(const Net& net);

std::shared_ptr<torch::optim::Optimizer> make_optimizer(const Dictionary& job,
                                                        const std::vector<torch::Tensor>& parameters);

at::ScalarType dtype_of(const std::string& name);

}  // namespace parity
