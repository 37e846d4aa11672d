#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/collectives/groups/internal/group_registry.h>

namespace c10d {
class Store;
}

/// How the members of a new group find each other's memory, and make sure that they mean the same group.
///
/// A *meeting* is the ranks that take part: those of the default group, of a parent group, or the members
/// alone. It agrees() on the request; then the members open their channels with each other's addresses. Ranks
/// that are no members take part in both steps, so that no rank waits for one that had nothing to do.
namespace lockstep::collectives::internal::group_making {

/// The context that an error of the job's first meeting carries.
inline constexpr const char* kMeetingAdvice = "docs/troubleshooting.md#meeting says what to do";

/// Gives every rank of a meeting all ranks' bytes, by rank; `mine` has one size everywhere. Collective.
using Gather = std::function<std::vector<std::string>(const std::string& mine)>;

/// All ranks of the default group, over its hidden channel; the caller holds world.making. `call` begins the
/// messages: c10::DistBackendError when a rank has ended, DistTimeoutError when one is late.
Gather over_control(DefaultWorld& world, std::string call, Deadline deadline);
/// The members of a group, by operations of that group; the caller holds parent->splitting.
Gather over_group(std::shared_ptr<RegisteredGroup> parent);

/// What one rank asks for.
struct GroupRequest {
  std::string text;      // for people: "new_group(ranks 0 and 2, name '1')"
  std::string identity;  // all that must be the same everywhere
  std::string refusal;   // why this rank can't take part; empty: it can
};

/// Returns when all ranks of the meeting have the same identity and none refuses. Otherwise throws on all of
/// them, naming which ranks asked for what: c10::DistBackendError, or c10::ValueError when one refused.
/// `ranks`: the meeting's global ranks. Collective.
void agree(const Gather& gather, const GroupRequest& request, const std::vector<int>& ranks);

/// What a group will be.
struct GroupPlan {
  std::string name;
  std::string description;
  std::string backend_name;
  std::vector<int> ranks;  // global, by group rank; this process's among them
  std::chrono::milliseconds timeout{};
  NcclOptions nccl = {};
  HostCompression between_hosts = HostCompression::kNone;
  std::optional<c10::Device> device_id = {};  // whose communicator is made with the group
};

/// Opens the group, unregistered. Collective over the meeting: its members call this, `positions` being where
/// the group's ranks stand in the meeting; all others call stand_by(). Throws c10::DistBackendError when a
/// member ended or had no memory for the group, DistTimeoutError when one is late.
std::shared_ptr<RegisteredGroup> open_together(const DefaultWorld& world, const GroupPlan& plan,
                                               const Gather& gather, const std::vector<int>& positions,
                                               Deadline deadline);
/// A group around a channel that is open, unregistered. Collective over the members where it has backends for
/// devices.
std::shared_ptr<RegisteredGroup> group_of(const DefaultWorld& world, const GroupPlan& plan,
                                          std::shared_ptr<transport::GroupChannel> channel);
/// The part of the ranks of a meeting that the group of `size` ranks does without.
void stand_by(const Gather& gather, size_t size);

/// Opens the group, unregistered. The members alone call it, and meet in the world's store under `key`, which
/// must be new; nothing stays there. `identity` must be the same on all (c10::DistBackendError with both
/// otherwise). Throws as rendezvous' store_all_gather() does, too.
std::shared_ptr<RegisteredGroup> open_through_store(const DefaultWorld& world, const GroupPlan& plan,
                                                    const std::string& key, const std::string& identity,
                                                    Deadline deadline);

/// The channel over which all ranks of a new world make their groups; through the store. Throws
/// c10::DistBackendError where ranks differ in `between_hosts`, which is what their default group shall have.
std::shared_ptr<transport::GroupChannel> open_control(const DefaultWorld& world,
                                                      HostCompression between_hosts, Deadline deadline);

/// Rank 0's cost model, on all ranks of a meeting. `own` counts on rank 0 alone. Collective.
hosts::CostModel agree_on_wire_model(const Gather& gather, const hosts::CostModel& own);

/// The words of all members (ranks of the transport, by group rank), which meet in the store under `key`,
/// which must be new. Throws c10::DistBackendError, which begins with `call`, when one has ended, or which
/// names all identities when they differ, and as rendezvous' store_all_gather() does, whose `met_at` it takes.
transport::GroupMembers::AddressExchange exchange_through_store(
    const c10::intrusive_ptr<c10d::Store>& store, std::shared_ptr<transport::HostTransport> transport,
    std::vector<int> members, std::string key, std::string call, std::string identity, Deadline deadline,
    std::string met_at = "");

/// What a member of exchange_through_store() writes into the store, taken apart: its address, a space, and
/// the identity. Throws c10::DistStoreError that names the rank when no member wrote it.
std::pair<uint64_t, std::string> parse_store_value(const std::string& value, int rank);

}  // namespace lockstep::collectives::internal::group_making
