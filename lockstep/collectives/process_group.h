#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace lockstep {

/// A process group: torch's own handle, so that whatever takes one takes ours. An empty one means the default
/// group.
using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

/// torch.distributed.init_process_group's arguments. Everything may be left out when a launcher started the
/// program.
struct InitOptions {
  /// "lockstep": CPU tensors through shared memory. "nccl" and "cpu:lockstep,cuda:nccl" are known names,
  /// refused until the GPU part is there.
  std::string backend = "lockstep";
  /// env:// (default), tcp://HOST:PORT or file:///PATH; see RendezvousOptions.
  std::string init_method = {};
  std::chrono::milliseconds timeout = std::chrono::minutes(30);  ///< of the rendezvous and of each operation
  int rank = -1;
  int world_size = -1;
  c10::intrusive_ptr<c10d::Store> store = {};  ///< instead of an init_method
  std::string group_name = "default";          ///< for messages
};

/// Owns the default group: destroys it at the end of its scope. When an exception is on its way, operations
/// in progress are aborted on all ranks; otherwise they are finished first.
class [[nodiscard]] DefaultGroup {
 public:
  DefaultGroup(DefaultGroup&& other) noexcept : owned_(std::exchange(other.owned_, false)) {}
  DefaultGroup& operator=(DefaultGroup&&) = delete;
  ~DefaultGroup();

  int rank() const;
  int size() const;

 private:
  friend DefaultGroup init_process_group(const InitOptions& options);
  DefaultGroup() = default;
  bool owned_ = true;
};

/// Joins the job's processes to the default group; all of them must call it. Throws c10::ValueError for
/// options that make no sense, what rendezvous() throws, c10::DistBackendError when the ranks can't share
/// memory (different hosts, containers or users), and an error when there is a default group already. A
/// process may initialise again after destroying the group. torch/distributed/distributed_c10d.py,
/// init_process_group.
DefaultGroup init_process_group(const InitOptions& options = {});

/// Destroys one group, or with none given the default group and all others. Finishes what was submitted.
/// Other ranks that go on to use the group get an error. Does nothing when the default group is already gone.
void destroy_process_group(const ProcessGroup& group = {});

/// Whether the default group exists.
bool is_initialized();

/// Whether this process is in the group; see new_group().
bool is_member(const ProcessGroup& group);

/// This process's rank in the group; -1 if it is not a member. Throws if there is no default group.
int get_rank(const ProcessGroup& group = {});
/// The group's size; -1 if this process is not a member.
int get_world_size(const ProcessGroup& group = {});
/// The rank on this host (LOCAL_RANK); throws when no launcher said it.
int get_node_local_rank();
/// The default group. Throws, with the call that is missing, if there is none.
ProcessGroup default_group();

/// A further group of `ranks` (global ranks, in group order; empty: all). Every process of the default group
/// must call it, in the same order, members or not; those who are not get a handle with which is_member() is
/// false and every operation throws. distributed_c10d.py, new_group.
ProcessGroup new_group(std::vector<int> ranks = {}, std::optional<std::chrono::milliseconds> timeout = {},
                       std::string group_name = "");

/// The rank within `group` of a global rank; throws if it isn't a member.
int get_group_rank(const ProcessGroup& group, int global_rank);

/// An uninitialised tensor in memory that all ranks on this host see: collectives on it move no byte twice.
/// Any CPU dtype. May be freed at any time outside an operation; outlives its group.
at::Tensor empty_shared(at::IntArrayRef sizes, at::TensorOptions options = {},
                        const ProcessGroup& group = {});

}  // namespace lockstep
