// The functions of process_group.h that make further groups.

#include <algorithm>
#include <map>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/hash.h>

#include <lockstep/base/log.h>
#include <lockstep/base/ranks.h>
#include <lockstep/collectives/groups/internal/backend_names.h>
#include <lockstep/collectives/groups/internal/device_backends.h>
#include <lockstep/collectives/groups/internal/group_making.h>
#include <lockstep/collectives/groups/internal/group_registry.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/device/cuda_library.h>

namespace lockstep {

using namespace collectives::internal;

namespace {

using group_making::Gather;
using group_making::GroupPlan;
using group_making::GroupRequest;
using RankLists = std::vector<std::vector<int>>;

/// A handle of its own, so that using it is an error instead of using the default group.
ProcessGroup non_member(size_t size) {
  return c10::make_intrusive<c10d::ProcessGroup>(-1, static_cast<int>(size));
}

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

/// "[0, 2, 1]"
std::string list_of(const std::vector<int>& ranks) {
  return "[" + c10::Join(", ", ranks) + "]";
}

/// "ranks 0-1023" where that says it all.
std::string describe(const std::vector<int>& ranks) {
  return std::is_sorted(ranks.begin(), ranks.end()) ? name_ranks(ranks) : "ranks " + list_of(ranks);
}

/// ", int8 between hosts" where the group compresses.
std::string compression_of(const GroupPlan& plan) {
  if (plan.between_hosts == HostCompression::kNone) return "";
  return c10::str(", ", to_string(plan.between_hosts), " between hosts");
}

std::vector<int> checked_ranks(std::vector<int> ranks, const GroupOptions& options, int world_size) {
  if (ranks.empty()) return all_ranks(world_size);
  std::vector<int> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  for (int rank : sorted) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < world_size, "new_group: rank ", rank,
                      " is out of range; the default group has ranks 0 to ", world_size - 1);
  }
  TORCH_CHECK_VALUE(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(),
                    "new_group: ranks list must not contain duplicate entries, got ", list_of(ranks));
  return options.sort_ranks ? sorted : ranks;
}

std::chrono::milliseconds checked_timeout(std::optional<std::chrono::milliseconds> timeout,
                                          const DefaultWorld& world, const char* call) {
  const auto chosen = timeout.value_or(world.timeout());
  TORCH_CHECK_VALUE(chosen > std::chrono::milliseconds(0), call, ": the timeout is ", chosen.count(),
                    " ms; it must be more than 0");
  return chosen;
}

std::string refusal_of(DefaultWorld& world, const std::string& name) {
  if (!registry::has_name(world, name)) return "";
  return "a group named '" + name + "' exists already; destroy it first, or choose another name";
}

/// Registers the group, and gives its handle out.
ProcessGroup finish(DefaultWorld& world, std::shared_ptr<RegisteredGroup> group, const GroupPlan& plan) {
  ProcessGroup handle = group->handle;
  registry::add(world, std::move(group));
  LOCKSTEP_LOG(kInfo) << "made group '" << plan.name << "' (" << plan.description << ") of "
                      << describe(plan.ranks) << ", as group rank " << handle->getRank() << ", timeout "
                      << plan.timeout.count() << " ms";
  return handle;
}

/// The second half of a meeting that agreed. Members open the group, the others stand by; so does a rank that
/// makes a group of one while others (of `largest` ranks) exchange addresses. `positions`: see
/// open_together().
ProcessGroup open_or_stand_by(DefaultWorld& world, const Gather& gather, const GroupPlan& plan,
                              const std::vector<int>& positions, size_t largest, Deadline deadline) {
  const bool member = contains(plan.ranks, world.world.rank);
  if (!member || plan.ranks.size() == 1) group_making::stand_by(gather, largest);
  if (!member) return non_member(plan.ranks.size());
  return finish(world, group_making::open_together(world, plan, gather, positions, deadline), plan);
}

/// Only the members call it. Not under world.making: threads that make groups of different ranks must not
/// wait for each other, for their order may differ by rank.
ProcessGroup make_locally(DefaultWorld& world, GroupPlan plan, const std::string& wanted_name) {
  if (backend_names::uses_nccl(plan.backend_name)) cuda_library();  // says why not
  const uint64_t meeting = registry::next_local_meeting(world, plan.ranks);
  const std::string ranks = list_of(plan.ranks);
  const std::string key = "lockstep/local/" + c10::sha1(ranks).str() + "/" + std::to_string(meeting);
  plan.name = wanted_name;
  if (plan.name.empty()) plan.name = "local " + describe(plan.ranks) + " #" + std::to_string(meeting);
  // Ranks have other numbers than before, and the flight recorder still knows the groups of then.
  if (world.times_shrunk > 0 && wanted_name.empty()) {
    plan.name += ":shrunk:" + std::to_string(world.times_shrunk);
  }
  const std::string refusal = refusal_of(world, plan.name);
  TORCH_CHECK_VALUE(refusal.empty(), "new_group: ", refusal);
  const std::string identity = "new_group(" + describe(plan.ranks) + ", name '" + plan.name + "', backend " +
                               plan.backend_name + compression_of(plan) + ")";
  try {
    auto group =
        group_making::open_through_store(world, plan, key, identity, Deadline::after(world.timeout()));
    return finish(world, std::move(group), plan);
  } catch (c10::Error& error) {
    if (world.times_shrunk > 0) {
      error.add_context(
          "use_local_synchronization needs the job's store, which may have ended with the process that held "
          "it; new_group() without it needs none");
    }
    throw;
  }
}

/// Lists that are cut out of a group of `parent_size`: none empty, no rank twice.
void check_split(const RankLists& split_ranks, int parent_size) {
  TORCH_CHECK_VALUE(!split_ranks.empty(), "split_ranks cannot be None or empty");
  std::map<int, const std::vector<int>*> split_of;
  for (const auto& split : split_ranks) {
    TORCH_CHECK_VALUE(!split.empty(), "the split group cannot be empty");
    for (int rank : split) {
      TORCH_CHECK_VALUE(rank >= 0 && rank < parent_size, "split_group: group rank ", rank, " in ",
                        list_of(split), " is out of range; the parent group has group ranks 0 to ",
                        parent_size - 1);
      const auto [other, is_new] = split_of.emplace(rank, &split);
      TORCH_CHECK_VALUE(is_new || other->second != &split,
                        "the split group cannot have duplicate ranks, got ", list_of(split));
      TORCH_CHECK_VALUE(is_new, "split_group: group rank ", rank, " is in both ", list_of(*other->second),
                        " and ", list_of(split));
    }
  }
}

size_t largest_of(const RankLists& lists) {
  size_t largest = 0;
  for (const auto& list : lists) largest = std::max(largest, list.size());
  return largest;
}

/// What split_group() is to do on this rank.
struct Split {
  GroupRequest request;
  RankLists lists;             // of all groups: group ranks within the parent
  std::vector<int> positions;  // of `plan`'s
  GroupPlan plan;              // of this process's group, or the first one if it is in none
};

Split plan_split(DefaultWorld& world, RegisteredGroup& parent, RankLists lists, GroupPlan plan) {
  const auto number = std::to_string(parent.splits.fetch_add(1));
  if (plan.description.empty()) plan.description = parent.handle->getGroupDesc() + ":split:" + number;
  for (auto& list : lists) std::sort(list.begin(), list.end());
  const int rank = parent.handle->getRank();
  auto mine =
      std::find_if(lists.begin(), lists.end(), [&](const auto& list) { return contains(list, rank); });
  const bool member = mine != lists.end();
  if (!member) mine = lists.begin();
  plan.name = parent.name + ":split:" + number + ":" + std::to_string(mine - lists.begin());
  for (int position : *mine) plan.ranks.push_back(parent.ranks[position]);
  GroupRequest request;
  for (const auto& list : lists) request.text += (request.text.empty() ? "" : ", ") + list_of(list);
  request.text = "split_group(parent '" + parent.name + "', [" + request.text + "])";
  request.identity = c10::str(request.text, plan.backend_name, ' ', number);
  if (member) request.refusal = refusal_of(world, plan.name);
  std::vector<int> positions = *mine;
  return {std::move(request), std::move(lists), std::move(positions), std::move(plan)};
}

}  // namespace

ProcessGroup new_group(std::vector<int> ranks, std::optional<std::chrono::milliseconds> timeout,
                       const GroupOptions& options) {
  const auto world = registry::require_world();
  const int rank = world->world.rank;
  const bool local = options.use_local_synchronization;
  if (local && !ranks.empty() && !contains(ranks, rank)) return non_member(ranks.size());
  GroupPlan plan;
  plan.ranks = checked_ranks(std::move(ranks), options, world->world.world_size);
  plan.timeout = checked_timeout(timeout, *world, "new_group");
  plan.backend_name = options.backend.empty() ? world->backend_name : backend_names::check(options.backend);
  plan.description = options.group_desc.empty() ? "undefined" : options.group_desc;
  plan.nccl = options.nccl;
  plan.between_hosts = checked_compression(options.between_hosts, "new_group: between_hosts");
  if (local) return make_locally(*world, std::move(plan), options.group_name);

  std::lock_guard making(world->making);
  TORCH_CHECK_VALUE(!world->ended, "new_group: the default process group was destroyed meanwhile");
  const std::string made_up = registry::next_name(*world);
  plan.name = options.group_name.empty() ? made_up : options.group_name;
  GroupRequest request;
  request.text =
      "new_group(" + describe(plan.ranks) + ", name '" + plan.name + "'" + compression_of(plan) + ")";
  request.identity =
      c10::str("new_group ", list_of(plan.ranks), plan.backend_name, ' ', plan.name, compression_of(plan));
  if (contains(plan.ranks, rank)) request.refusal = refusal_of(*world, plan.name);
  const Deadline deadline = Deadline::after(world->timeout());
  const Gather gather = group_making::over_control(*world, request.text, deadline);
  group_making::agree(gather, request, all_ranks(world->world.world_size));
  if (backend_names::uses_nccl(plan.backend_name)) {
    device_backends::agree(gather, request.text, rank, plan.backend_name, {plan.ranks});
  }
  return open_or_stand_by(*world, gather, plan, plan.ranks, plan.ranks.size(), deadline);
}

Subgroups new_subgroups(std::optional<int> group_size, const ProcessGroup& group,
                        std::optional<std::chrono::milliseconds> timeout, const GroupOptions& options) {
  if (!group_size) {
    if (const int devices = cuda_device_count(); devices > 0) group_size = devices;
  }
  TORCH_CHECK_VALUE(group_size.has_value(),
                    "Default group size only takes effect when CUDA is available. If your subgroup uses a "
                    "backend that does not depend on CUDA, please pass in 'group_size' correctly.");
  TORCH_CHECK_VALUE(*group_size > 0, "The arg 'group_size' (", *group_size, ") must be positive");
  const std::vector<int> ranks = get_process_group_ranks(group);
  const int world_size = static_cast<int>(ranks.size());
  TORCH_CHECK_VALUE(*group_size <= world_size, "The arg 'group_size' (", *group_size,
                    ") must not exceed the world size (", world_size, ")");
  TORCH_CHECK_VALUE(world_size % *group_size == 0, "The world size (", world_size,
                    ") must be divisible by 'group_size=", *group_size, "'");
  std::vector<std::vector<int>> lists;
  for (auto next = ranks.begin(); next != ranks.end(); next += *group_size) {
    lists.emplace_back(next, next + *group_size);
  }
  return new_subgroups_by_enumeration(lists, timeout, options);
}

Subgroups new_subgroups_by_enumeration(const std::vector<std::vector<int>>& ranks_per_subgroup_list,
                                       std::optional<std::chrono::milliseconds> timeout,
                                       const GroupOptions& options) {
  TORCH_CHECK_VALUE(!ranks_per_subgroup_list.empty(), "The arg 'ranks_per_subgroup_list' cannot be empty");
  std::map<int, const std::vector<int>*> subgroup_of;
  for (const auto& ranks : ranks_per_subgroup_list) {
    TORCH_CHECK_VALUE(!ranks.empty(), "new_subgroups_by_enumeration: a subgroup has no ranks");
    for (int rank : ranks) {
      const auto [other, is_new] = subgroup_of.emplace(rank, &ranks);
      TORCH_CHECK_VALUE(is_new || other->second == &ranks, "Rank ", rank, " has appeared in both subgroup ",
                        list_of(*other->second), " and ", list_of(ranks));
    }
  }
  TORCH_CHECK_VALUE(options.group_name.empty() || ranks_per_subgroup_list.size() == 1,
                    "new_subgroups: one name ('", options.group_name, "') can't be given to ",
                    ranks_per_subgroup_list.size(), " groups; use group_desc, or new_group() for each");
  Subgroups result;
  for (const auto& ranks : ranks_per_subgroup_list) {
    result.second.push_back(new_group(ranks, timeout, options));
    if (is_member(result.second.back())) result.first = result.second.back();
  }
  if (!result.first) result.first = non_member(ranks_per_subgroup_list.front().size());
  return result;
}

ProcessGroup split_group(const ProcessGroup& parent_pg, const std::vector<std::vector<int>>& split_ranks,
                         std::optional<std::chrono::milliseconds> timeout, const std::string& group_desc,
                         const std::string& backend) {
  const auto world = registry::require_world();
  const auto parent = registry::find(parent_pg);
  check_split(split_ranks, static_cast<int>(parent->ranks.size()));
  GroupPlan plan;
  plan.timeout = checked_timeout(timeout, *world, "split_group");
  plan.backend_name = backend.empty() ? parent->backend_name : backend_names::check(backend);
  plan.description = group_desc;
  plan.nccl = parent->nccl;
  plan.between_hosts = parent->backend->between_hosts();

  const bool of_default = parent->handle == default_group();
  std::lock_guard making(of_default ? world->making : parent->splitting);
  TORCH_CHECK_VALUE(!world->ended, "split_group: the default process group was destroyed meanwhile");
  const Split split = plan_split(*world, *parent, split_ranks, std::move(plan));
  const Deadline deadline = Deadline::after(world->timeout());
  const Gather gather = of_default ? group_making::over_control(*world, split.request.text, deadline)
                                   : group_making::over_group(parent);
  group_making::agree(gather, split.request, parent->ranks);
  if (backend_names::uses_nccl(split.plan.backend_name)) {
    device_backends::agree(gather, split.request.text, world->world.rank, split.plan.backend_name,
                           split.lists);
  }
  return open_or_stand_by(*world, gather, split.plan, split.positions, largest_of(split_ranks), deadline);
}

}  // namespace lockstep
