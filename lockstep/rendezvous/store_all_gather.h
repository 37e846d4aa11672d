#pragma once

#include <functional>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>

namespace c10d {
class Store;
}

namespace lockstep {

/// Publishes `mine` (any bytes) under `key` and returns what all ranks published, in rank order. Every rank
/// of [0, world_size) calls it once with the same key; a key serves for one all-gather.
///
/// Costs a rank about ten round trips to the store and then polls one key with growing pauses. It never
/// blocks inside of the store, so that threads that share a store do not wait for each other (TCPStore::wait
/// holds its client's lock).
///
/// Succeeds on all ranks or on none, as far as a store can tell. Throws DistTimeoutError that names the ranks
/// that did not come by the deadline, on every rank as soon as rank 0's has passed (rank 0 may host the
/// store) or, with `met_at`, any rank's. Throws c10::DistBackendError that names a rank whose process has
/// ended, on every rank, within a fraction of a second where the ranks share a host; a rank is known from the
/// moment at which it has come, or has come to `met_at`, an earlier all-gather of the same ranks that
/// succeeded. Throws c10::DistStoreError on every rank that takes part when two processes claim one rank,
/// disagree about the world size, run builds of two kProtocolVersions, or the store is lost. After a failure
/// rank 0 returns only when the others have read it (3 s at most). `while_waiting` is called again and again, in
/// place of the watch over the ranks' processes; when it throws c10::Error, all ranks throw c10::DistBackendError with its text.
/// Thread-safe.
std::vector<std::string> store_all_gather(c10d::Store& store, const std::string& key, int rank,
                                          int world_size, const std::string& mine, Deadline deadline,
                                          const std::function<void()>& while_waiting = {},
                                          const std::string& met_at = {});

/// For a rank that can't come to an all-gather: all ranks' calls of store_all_gather() throw `text`, as
/// c10::DistBackendError or, with `late`, as DistTimeoutError. So does this one, unless the all-gather had
/// failed before: then it throws what the others do. Where the store is lost it throws `text`.
[[noreturn]] void fail_store_all_gather(c10d::Store& store, const std::string& key, int rank, int world_size,
                                        const std::string& text, bool late, const std::string& met_at);

/// Whether an all-gather has succeeded or failed already, for a rank that is on its way to it. One round
/// trip.
bool store_all_gather_is_decided(c10d::Store& store, const std::string& key, int rank, int world_size);

/// For a rank 0 that is about to fail after an all-gather which has succeeded: waits until the others have
/// read its results, 3 s at most, for the store may end with rank 0's process. Other ranks return at once.
void keep_store_until_seen(c10d::Store& store, const std::string& key, int rank, int world_size);

/// Deletes what an all-gather that succeeded left in the store. One rank calls it, once all have returned
/// from the all-gather.
void forget_store_all_gather(c10d::Store& store, const std::string& key, int world_size);

}  // namespace lockstep
