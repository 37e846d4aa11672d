#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/errors.h>
#include <lockstep/base/failpoint.h>
#include <lockstep/collectives/groups/internal/group_making.h>
#include <lockstep/collectives/groups/internal/shrinking.h>
#include <lockstep/collectives/groups/internal/store_membership.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/rendezvous/bounded_store.h>
#include <lockstep/transport/host/groups/shrink.h>

namespace lockstep::collectives::internal::shrinking {
namespace {

using transport::ChannelError;
using transport::FailureKind;

void check_arguments(const LockstepBackend& backend, const std::vector<int>& ranks_to_exclude,
                     int shrink_flags) {
  TORCH_CHECK_VALUE(
      shrink_flags == SHRINK_DEFAULT || shrink_flags == SHRINK_ABORT,
      "Invalid shrink_flags value: ", shrink_flags,
      ". Must be one of: SHRINK_DEFAULT (0), SHRINK_ABORT (1). Use SHRINK_ABORT to abort ongoing "
      "operations before shrinking.");
  const int size = backend.getSize();
  TORCH_CHECK_VALUE(size > 1, "Cannot shrink a process group with size ", size,
                    ". Group must have at least 2 ranks to support shrinking.");
  for (size_t i = 0; i < ranks_to_exclude.size(); ++i) {
    const int rank = ranks_to_exclude[i];
    TORCH_CHECK_VALUE(rank >= 0 && rank < size, "Rank ", rank, " at index ", i,
                      " is out of bounds for group size ", size, ". Valid ranks are in range [0, ", size - 1,
                      "].");
    const auto before = ranks_to_exclude.begin() + static_cast<std::ptrdiff_t>(i);
    TORCH_CHECK_VALUE(std::find(ranks_to_exclude.begin(), before, rank) == before, "Duplicate rank ", rank,
                      " found in ranks_to_exclude at index ", i, ". Each rank can only be excluded once.");
  }
  TORCH_CHECK_VALUE(static_cast<int>(ranks_to_exclude.size()) < size, "Cannot exclude all ", size,
                    " ranks from process group. At least one rank must remain. Excluding ",
                    ranks_to_exclude.size(), " ranks.");
  const bool excluded = std::find(ranks_to_exclude.begin(), ranks_to_exclude.end(), backend.getRank()) !=
                        ranks_to_exclude.end();
  TORCH_CHECK(!excluded, "Current rank ", backend.getRank(),
              " is in the exclusion list and should not call shrink_group(). Only non-excluded ranks should "
              "participate in the shrinking operation. Excluded ranks should terminate their processes "
              "instead.");
}

/// What a call of the store may take. As long as a peer may be silent, so that a short cut of the wire heals.
constexpr auto kStorePatience = std::chrono::seconds(10);

Shrunk shrink_on_host(transport::GroupChannel& old, const std::vector<int>& ranks_to_exclude,
                      bool with_control, const Deadline& deadline) {
  auto shrunk = transport::shrink(old.host(), ranks_to_exclude, with_control, deadline);
  return {.survivors = std::move(shrunk.survivors),
          .channel = transport::GroupChannel::of_host(std::move(shrunk.channel)),
          .control = shrunk.control ? transport::GroupChannel::of_host(std::move(shrunk.control)) : nullptr};
}

/// What one round has agreed on.
Shrunk make_over_hosts(transport::GroupChannel& old, const c10::intrusive_ptr<c10d::Store>& store,
                       const std::string& key, std::vector<int> survivors, bool with_control,
                       const Deadline& deadline) {
  std::vector<int> members;
  for (const int rank : survivors) members.push_back(old.members()[rank]);
  const auto transport = old.host().members().shared_transport();
  const auto open = [&](const char* which) {
    const auto exchange = group_making::exchange_through_store(store, transport, members, key + which,
                                                               "shrink_group", "shrink_group", deadline);
    return transport::GroupChannel::open(transport, members, exchange, deadline);
  };
  Shrunk made{.survivors = std::move(survivors), .channel = open("channel"), .control = nullptr};
  if (with_control) made.control = open("control");
  return made;
}

/// It ends: a round ends at a rank's deadline at the latest, and another one follows only when a member has ended.
Shrunk shrink_over_hosts(transport::GroupChannel& old, const c10::intrusive_ptr<BoundedStore>& store,
                         const std::vector<int>& ranks_to_exclude, bool with_control,
                         const Deadline& deadline) {
  StoreMembership membership(*store, old, ranks_to_exclude, deadline);
  while (true) {
    failpoint::here("shrink");
    auto survivors = membership.agree();
    std::optional<Shrunk> made;
    try {
      failpoint::here("shrink_agreed");
      made = make_over_hosts(old, store, membership.key(), std::move(survivors), with_control, deadline);
      failpoint::here("shrink_joined");
    } catch (...) {
      membership.give_up(std::current_exception());
      continue;
    }
    if (!membership.conclude(*made->channel)) continue;
    failpoint::here("shrink_made");
    return *std::move(made);
  }
}

/// Runs `action`, with c10's errors for those of channels.
template <class Action>
Shrunk explaining(const std::string& failed, Action&& action) {
  try {
    return action();
  } catch (const ChannelError& error) {
    std::string text = failed + error.what();
    switch (error.kind()) {
      case FailureKind::kTimeout:
        LOCKSTEP_THROW_TIMEOUT(
            text +
            "; all ranks that go on must call shrink_group; list those that live but don't "
            "call it in ranks_to_exclude");
      case FailureKind::kLeftBehind:
        text += "; it has no part in the group any more: if it is the default group, end this process";
        break;
      case FailureKind::kAborted:
        text += "; once that is mended, all ranks that go on can call shrink_group again";
        break;
      default:
        break;
    }
    C10_THROW_ERROR(DistBackendError, text);
  }
}

}  // namespace

Shrunk shrink(LockstepBackend& backend, const std::vector<int>& ranks_to_exclude, int shrink_flags,
              bool with_control) {
  check_arguments(backend, ranks_to_exclude, shrink_flags);
  backend.check_not_forked();
  transport::GroupChannel& channel = backend.channel();
  const Deadline deadline = Deadline::after(backend.timeout());
  if (shrink_flags == SHRINK_ABORT) backend.abort();
  backend.finish();
  const std::string failed = "shrink_group failed on rank " +
                             std::to_string(channel.job_rank(channel.rank())) + " of group '" +
                             backend.name() + "': ";
  if (!channel.spans_hosts())
    return explaining(failed,
                      [&] { return shrink_on_host(channel, ranks_to_exclude, with_control, deadline); });
  TORCH_INTERNAL_ASSERT(backend.store(), "a group over hosts has no store");
  TORCH_CHECK_WITH(DistStoreError, !channel.has_left(channel.rank()), failed,
                   "this rank has left the group, for it did not reach the job's store; end this process");
  const auto store = c10::make_intrusive<BoundedStore>(backend.store(), kStorePatience);
  try {
    return explaining(
        failed, [&] { return shrink_over_hosts(channel, store, ranks_to_exclude, with_control, deadline); });
  } catch (const c10::Error&) {
    const auto lost = store->lost();
    if (!lost) throw;
    // By the wire: the others would wait for this rank as long as its process lives.
    channel.leave();
    C10_THROW_ERROR(
        DistStoreError,
        failed + "the job's store can't be reached: " + *lost +
            "; only ranks that reach it can go on, for its host is lost, or this one is cut off "
            "from it. End this process, and start the job again from a checkpoint if none goes on");
  }
}

}  // namespace lockstep::collectives::internal::shrinking
