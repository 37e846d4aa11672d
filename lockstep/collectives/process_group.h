#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/debug.h>

#include <lockstep/collectives/host_compression.h>
#include <lockstep/device/nccl_options.h>
#include <lockstep/rendezvous/topology.h>

/// Process groups: making them, asking about them, ending them. torch/distributed/distributed_c10d.py has the
/// names, the order of arguments, the defaults and the conditions of errors; docs/process_groups.md is the
/// guide.
///
/// In all functions: an empty `group` means the default group. A rank is a global one, within the default
/// group, unless it is called a group rank. Without a default group, with a destroyed group, or with one of
/// another world they throw c10::ValueError. Thread-safe unless said otherwise.
namespace lockstep {

/// A process group: torch's own handle, so that whatever takes one takes ours. getGroupName() and
/// getGroupDesc() say what it was named. An empty one means the default group. A group ends with
/// destroy_process_group(); its memory goes with the last handle.
using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

/// torch.distributed.init_process_group's arguments. Everything may be left out when a launcher started the
/// program.
struct InitOptions {
  /// "lockstep": tensors on the CPU and on devices, through shared memory. "nccl": CUDA tensors over NCCL,
  /// all else over "lockstep"; the same as "cpu:lockstep,cuda:nccl". Empty: "cpu:lockstep,cuda:nccl" where
  /// every rank has chosen a card of its own by set_device() and NCCL works, else "lockstep", with a warning
  /// that names the ranks where cards are shared or missing. "DEVICE:lockstep,…" serves these devices only.
  /// "gloo" is taken as "lockstep".
  std::string backend = {};
  /// env:// (default), tcp://HOST:PORT or file:///PATH; see RendezvousOptions.
  std::string init_method = {};
  /// The limit of the rendezvous, of each operation, and of the making of each further group.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  int rank = -1;
  int world_size = -1;
  c10::intrusive_ptr<c10d::Store> store = {};  ///< instead of an init_method
  std::string group_name = "default";          ///< for messages
  /// The device of this process: set_device() is called with it, and NCCL's communicator is made with the
  /// group instead of at the first operation.
  std::optional<c10::Device> device_id = {};
  NcclOptions nccl = {};  ///< pg_options in Python
  /// How large reductions of the default group travel between hosts; on all ranks the same. No effect on one host.
  HostCompression between_hosts = HostCompression::kNone;
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
/// options that make no sense, when there is a default group already, and on all ranks when "nccl" was asked
/// for and can't be used (no card, ranks that share one; which ranks, and what to do); what rendezvous()
/// throws; and c10::DistBackendError when ranks of one host can't share memory (they are of different users),
/// ranks of different hosts don't reach each other, or ranks ask for different backends. A process may
/// initialise again after destroying the group.
DefaultGroup init_process_group(const InitOptions& options = {});

/// Destroys one group, or with none given the default group and all others. Finishes what was submitted.
/// Other ranks that go on to use the group get an error. Does nothing when the default group is already gone
/// and for groups that this process is not a member of; throws c10::ValueError for a group that was destroyed
/// before.
void destroy_process_group(const ProcessGroup& group = {});

// ---- Making groups

/// What is rarely given to new_group(), by name as in Python: new_group({0, 1}, {}, {.group_desc = "rows"}).
struct GroupOptions {
  std::string backend = {};                ///< the default group's when empty
  bool use_local_synchronization = false;  ///< only the members call; see new_group()
  std::string group_desc = {};             ///< getGroupDesc(); "undefined" when empty, as in PyTorch
  bool sort_ranks = true;                  ///< group ranks in ascending order of ranks; false: as listed
  std::string group_name = {};             ///< for messages; made up ("1", "2", …) when empty
  NcclOptions nccl = {};                   ///< pg_options in Python
  HostCompression between_hosts = HostCompression::kNone;  ///< as InitOptions::between_hosts, of this group
};

/// A further group of `ranks` (empty: all). Every process of the default group must call it, members or not,
/// with the same ranks, and all groups must be made in the same order everywhere; if several threads make
/// groups, that holds for their calls together. Ranks that are not members get a handle with which
/// is_member() is false and every operation throws.
///
/// With use_local_synchronization only the members call it (others get their handle at once), and only groups
/// of equal ranks need be made in the same order; it goes through the store and is slower.
///
/// `timeout` is that of the group's operations, the default group's if not given. The making itself is
/// bounded by the default group's timeout.
///
/// Throws c10::ValueError for ranks that are out of range or given twice, a name that a living group has, and
/// an unknown backend; on all ranks c10::DistBackendError when they asked for different groups (naming which
/// ranks asked for what; nothing is broken then) or one of them ended, and DistTimeoutError when one did not
/// come. After the latter two no further group can be made by all ranks together.
ProcessGroup new_group(std::vector<int> ranks = {}, std::optional<std::chrono::milliseconds> timeout = {},
                       const GroupOptions& options = {});

/// This process's group, or a handle with which is_member() is false, and all of them in order.
using Subgroups = std::pair<ProcessGroup, std::vector<ProcessGroup>>;

/// Cuts `group` into groups of `group_size` ranks that follow each other. All processes of the default group
/// call it, with the same `group`. Without a group_size it is the number of CUDA devices that this process
/// sees. Throws c10::ValueError when the group's size is not a multiple, and when group_size is left out and
/// there is no CUDA device.
Subgroups new_subgroups(std::optional<int> group_size = {}, const ProcessGroup& group = {},
                        std::optional<std::chrono::milliseconds> timeout = {},
                        const GroupOptions& options = {});

/// A group for each list of ranks. All processes of the default group call it, with the same lists; no rank
/// may be in two of them (c10::ValueError, before any group is made).
Subgroups new_subgroups_by_enumeration(const std::vector<std::vector<int>>& ranks_per_subgroup_list,
                                       std::optional<std::chrono::milliseconds> timeout = {},
                                       const GroupOptions& options = {});

/// Cuts `parent_pg` into groups; the members of `parent_pg` and no other ranks call it, with the same
/// arguments. `split_ranks`: lists of *group* ranks of the parent, no rank in two of them. Members of none
/// get a handle with which is_member() is false. It is an operation of the parent in the order of the others,
/// and bounded by its timeout, except that for the default group it stands in the order of new_group().
/// `group_desc`: "PARENT'S:split:N" when empty, as in PyTorch. Throws as new_group() does.
ProcessGroup split_group(const ProcessGroup& parent_pg, const std::vector<std::vector<int>>& split_ranks,
                         std::optional<std::chrono::milliseconds> timeout = {},
                         const std::string& group_desc = {}, const std::string& backend = {});

// ---- Going on without some ranks

/// torch.distributed's SHRINK_DEFAULT and SHRINK_ABORT: whether shrink_group() finishes what the group was
/// given before, or lets it fail on all ranks.
enum ShrinkFlags { SHRINK_DEFAULT = 0x00, SHRINK_ABORT = 0x01 };

/// What may be set for the group that shrink_group() makes.
struct ShrinkOptions {
  std::optional<std::chrono::milliseconds> timeout = {};  ///< of its operations; the old group's if not given
};

/// The group of those members of `group` that are not in `ranks_to_exclude` (group ranks) and live; they
/// alone call it, in the same processes, with the same arguments. Unlike PyTorch's it takes an empty list,
/// and finds those that have ended or left by itself; they need not be in a list that is given, either.
/// `group` may have failed in any way, and is destroyed. Shrinking the default group makes the new group the
/// default one: ranks are numbered anew, in the old order, and all other groups are destroyed; messages go on
/// to call ranks as the job did at its start.
///
/// It keeps the ranks' memory: tensors from empty_shared() go on to be shared. All callers get the group or
/// none, also when another rank dies meanwhile (then it is left out, too), except that a rank that dies at the
/// very end is found by the group's first operation. May be called again after an error, and for the group
/// that it has made.
///
/// On one host it needs no store. Over hosts the ranks meet in the job's store: those that don't reach it, because its
/// host is lost or they are cut off from it, can't go on. Of two sides that both reach it but not each other, the one
/// with the group's first host goes on, unless it comes 5 s later than the other. What the old group's operations have
/// done may differ by host: see DistributedDataParallel::update_process_group().
///
/// Throws c10::ValueError for flags, ranks or a timeout that make no sense and for a group of one rank;
/// c10::Error when this rank is in `ranks_to_exclude`; DistTimeoutError when a rank lives, but does not call
/// it within the group's timeout (list it to go on without it); c10::DistBackendError when the others have
/// gone on without this rank, or another's call ended by an error of its own; c10::DistStoreError on a rank
/// that does not reach the store. torch.distributed.shrink_group.
ProcessGroup shrink_group(const std::vector<int>& ranks_to_exclude = {}, const ProcessGroup& group = {},
                          int shrink_flags = SHRINK_DEFAULT, const ShrinkOptions& pg_options = {});

// ---- Asking

/// Whether process groups are part of this build; always true. torch.distributed.is_available.
bool is_available();
/// Whether the default group exists.
bool is_initialized();
/// Whether this build has the backend: "lockstep" (or "gloo"), "nccl", "cpu:lockstep,cuda:nccl". Throws
/// c10::ValueError for a malformed list of DEVICE:BACKEND pairs.
bool is_backend_available(const std::string& backend);
/// Whether this build has NCCL, with or without a card: torch is a CUDA build and the component
/// Lockstep::cuda is there. Loads nothing. torch.distributed.is_nccl_available.
bool is_nccl_available();
/// Whether torchrun, `lockstep run`, or another agent that sets TORCHELASTIC_RUN_ID started this process.
bool is_torchelastic_launched();

/// The default group. Throws, with the call that is missing, if there is none.
ProcessGroup default_group();
/// Whether this process is in the group; see new_group().
bool is_member(const ProcessGroup& group);

/// This process's rank in the group; -1 if it is not a member.
int get_rank(const ProcessGroup& group = {});
/// The group's size; -1 if this process is not a member.
int get_world_size(const ProcessGroup& group = {});
/// This process's rank among those on this host, as its launcher says (LOCAL_RANK and others), else its place
/// among the default group's ranks there, else `fallback_rank`; throws c10::Error if there is none of these.
int get_node_local_rank(std::optional<int> fallback_rank = {});

/// The group rank of a global rank, and the other way round. Throw c10::ValueError if there is no such
/// member.
int get_group_rank(const ProcessGroup& group, int global_rank);
int get_global_rank(const ProcessGroup& group, int group_rank);
/// The global ranks of all members, by group rank.
std::vector<int> get_process_group_ranks(const ProcessGroup& group = {});

/// Which members of the group share a host, by group rank.
Topology get_topology(const ProcessGroup& group = {});

/// What was asked for when the group was made, or what was chosen: "lockstep", "cpu:lockstep,cuda:nccl".
std::string get_backend(const ProcessGroup& group = {});
/// Which backend serves which device: "cpu:lockstep,cuda:lockstep".
std::string get_backend_config(const ProcessGroup& group = {});
/// "lockstep" for the CPU, "nccl" for CUDA if this build has it, else "lockstep"; throws c10::ValueError for
/// devices without one. Needs no default group.
std::string get_default_backend_for_device(const at::Device& device);

/// How many groups this world has named so far: the default one and one for each new_group() that all ranks
/// called, whether this process is in it or not, and whether it still lives (PyTorch counts so too).
int get_pg_count();

/// TORCH_DISTRIBUTED_DEBUG, or what c10d::setDebugLevel() said since. Throws c10::ValueError when the variable is
/// not OFF, INFO or DETAIL, and for a LOCKSTEP_LOG with another word than it takes.
c10d::DebugLevel get_debug_level();

// ---- Changing

/// The timeout of the group's later operations (torch.distributed's _set_pg_timeout); the default group's
/// also bounds the making of groups. Throws c10::ValueError unless it is more than 0.
void set_group_timeout(std::chrono::milliseconds timeout, const ProcessGroup& group = {});

// ---- Memory

/// An uninitialised tensor in memory that all ranks on this host see: collectives on it move no byte twice.
/// Any CPU dtype. May be freed at any time outside an operation; outlives its group.
at::Tensor empty_shared(at::IntArrayRef sizes, at::TensorOptions options = {},
                        const ProcessGroup& group = {});

}  // namespace lockstep
