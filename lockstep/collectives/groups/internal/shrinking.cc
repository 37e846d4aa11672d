#include <algorithm>
#include <string>
#include <utility>

#include <c10/util/Exception.h>

#include <lockstep/base/errors.h>
#include <lockstep/collectives/groups/internal/shrinking.h>
#include <lockstep/collectives/process_group.h>
#include <lockstep/transport/host/shrink.h>

namespace lockstep::shrinking {
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

}  // namespace

Shrunk shrink(LockstepBackend& backend, const std::vector<int>& ranks_to_exclude, int shrink_flags,
              bool with_control) {
  check_arguments(backend, ranks_to_exclude, shrink_flags);
  backend.check_not_forked();
  transport::GroupChannel& channel = backend.channel();
  TORCH_CHECK_WITH(
      DistBackendError, !channel.spans_hosts(), "shrink_group: group '", backend.name(), "' has ranks on ",
      channel.layout().hosts.size(),
      " hosts, and only groups on one host can be shrunk so far; destroy the group, and start the job "
      "again without the lost ranks");
  const Deadline deadline = Deadline::after(backend.timeout());
  if (shrink_flags == SHRINK_ABORT) backend.abort();
  backend.finish();
  try {
    auto shrunk = transport::shrink(channel.host(), ranks_to_exclude, with_control, deadline);
    return {
        .survivors = std::move(shrunk.survivors),
        .channel = transport::GroupChannel::of_host(std::move(shrunk.channel)),
        .control = shrunk.control ? transport::GroupChannel::of_host(std::move(shrunk.control)) : nullptr};
  } catch (const ChannelError& error) {
    const std::string text = "shrink_group failed on rank " +
                             std::to_string(channel.job_rank(channel.rank())) + " of group '" +
                             backend.name() + "': " + error.what();
    if (error.kind() == FailureKind::kTimeout) {
      LOCKSTEP_THROW_TIMEOUT(text +
                             "; all ranks that go on must call shrink_group; list those that live but don't "
                             "call it in ranks_to_exclude");
    }
    C10_THROW_ERROR(DistBackendError, text);
  }
}

}  // namespace lockstep::shrinking
