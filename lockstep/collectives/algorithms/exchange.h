#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

#include <lockstep/collectives/algorithms/algorithms.h>

/// The operations that bring data from each rank to each other: broadcast, gather, scatter, all_gather,
/// all_to_all, and reduce_scatter, which folds what has come.
namespace lockstep::collectives::internal::algorithms {

/// What one rank gives to one other.
struct Piece {
  const void* data = nullptr;
  size_t bytes = 0;
};

/// One rank's part in an exchange.
struct Exchange {
  /// To each rank; or a single piece for all ranks that take it; or none.
  std::vector<Piece> gives;
  /// Bytes from each rank; 0: nothing.
  std::vector<size_t> takes;
  /// The ranks' sizes were not compared by the signature: compare what each gives with what the other takes
  /// before anything is moved.
  bool compare_sizes = false;
};

/// Consecutive part of what a rank gives to this one; empty when nothing (more) comes from it.
struct Window {
  const std::byte* data = nullptr;
  size_t offset = 0;
  size_t bytes = 0;
};
/// Part k of a piece of `bytes` that passes in windows of `size`; the data are the caller's to fill in.
inline Window window_of(size_t bytes, size_t size, size_t k) {
  const size_t offset = std::min(bytes, k * size);
  return {nullptr, offset, std::min(size, bytes - offset)};
}
/// Called with consecutive windows, one for each rank, until all has come. Windows of equal pieces are equal.
using Consume = std::function<void(const std::vector<Window>& windows)>;

/// Every member calls it. The way of each rank's data depends on where they lie: in the announcement, if they
/// are few; read by the peers where they lie, if that is in the arena; through the scratch otherwise, a chunk
/// at a time with a part for each peer.
void exchange(transport::GroupChannel& channel, const Terms& terms, const Signature& signature,
              const Exchange& exchange, const Consume& consume);

/// An exchange with a piece for each rank, of which each takes equal ones: their elements, of signature's type, are
/// reduced by its operation into `output`. On one host in rank order; over hosts see hosts/hosts.h. `output` may be the
/// very piece that this rank gives to itself.
void reduce_scatter(transport::GroupChannel& channel, const Terms& terms, const Signature& signature,
                    const Exchange& exchange, void* output);
/// Reduces the windows of all ranks, in rank order.
Consume fold_into(const Signature& signature, void* output);

}  // namespace lockstep::collectives::internal::algorithms
