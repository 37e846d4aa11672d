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
/// of [0, world_size) calls it once with the same key; a key serves for one exchange.
///
/// Costs a rank about six round trips to the store and then polls one key with growing pauses. It never
/// blocks inside of the store, so that threads that share a store do not wait for each other (TCPStore::wait
/// holds its client's lock).
///
/// Succeeds on all ranks or on none, as far as a store can tell. Throws DistTimeoutError that names the ranks
/// that did not come by the deadline, on every rank as soon as rank 0's has passed (rank 0 may host the
/// store). Throws c10::DistStoreError on every rank that takes part when two processes claim one rank,
/// disagree about the world size, or the store is lost. After a failure rank 0 returns only when the others
/// have read it (3 s at most). `while_waiting` is called again and again; what it throws ends this rank's
/// wait. Thread-safe.
std::vector<std::string> exchange(c10d::Store& store, const std::string& key, int rank, int world_size,
                                  const std::string& mine, Deadline deadline,
                                  const std::function<void()>& while_waiting = {});

/// For a rank 0 that is about to fail after an exchange which has succeeded: waits until the others have read
/// its results, 3 s at most, for the store may end with rank 0's process. Other ranks return at once.
void keep_store_until_seen(c10d::Store& store, const std::string& key, int rank, int world_size);

/// Deletes what an exchange that succeeded left in the store. One rank calls it, once all have returned from
/// the exchange.
void forget_exchange(c10d::Store& store, const std::string& key, int world_size);

}  // namespace lockstep
