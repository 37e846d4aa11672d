#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// What users may set of NCCL for a group. torch.distributed.ProcessGroupNCCL.Options and its `config`; what
/// is not given is NCCL's own default, which the NCCL_* variables change.
struct NcclOptions {
  /// NCCL's stream has a high priority, so that communication is not held up behind computation.
  /// TORCH_NCCL_HIGH_PRIORITY=1 does the same for all groups.
  bool is_high_priority_stream = false;
  std::optional<bool> blocking = {};          ///< whether NCCL's calls block until they are done
  std::optional<int> cga_cluster_size = {};   ///< 0 to 8
  std::optional<int> min_ctas = {};           ///< thread blocks of a kernel, at least
  std::optional<int> max_ctas = {};           ///< … and at most
  std::optional<std::string> net_name = {};   ///< the network module: "Socket", "IB", …
  std::optional<int> traffic_class = {};      ///< of InfiniBand and RoCE
  std::optional<std::string> comm_name = {};  ///< in NCCL's own messages
};

/// A group as its NCCL communicator must know it.
struct NcclGroup {
  std::string name;
  std::string description = {};
  std::vector<int> global_ranks = {};  ///< by group rank
  std::chrono::milliseconds timeout{};
  NcclOptions options = {};
};

}  // namespace lockstep
