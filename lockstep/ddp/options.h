#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/collectives/process_group.h>

namespace lockstep {

/// A parameter or buffer with its dotted name in the module.
using NamedTensor = std::pair<std::string, at::Tensor>;

/// torch.nn.parallel.DistributedDataParallel's options, as far as they are there.
struct DistributedDataParallelOptions {
  ProcessGroup process_group = {};  ///< empty: the default group
  double bucket_cap_mb = 25;        ///< MiB of gradients a bucket
  double first_bucket_cap_mb =
      1;  ///< MiB of the bucket that is ready first, so that communication starts early
  bool broadcast_buffers = true;  ///< rank 0's buffers to all before each synchronised forward
  bool init_sync = true;          ///< verify the model and broadcast rank 0's state at construction
};

}  // namespace lockstep
