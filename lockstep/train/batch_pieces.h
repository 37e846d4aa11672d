#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <lockstep/train/batch_access.h>

namespace lockstep::train {

/// What is computed at once: a batch, or a part of one.
template <class Batch>
struct BatchPiece {
  const Batch* batch;
  int64_t begin;   ///< its first sample in the batch
  int64_t length;  ///< its samples
  bool whole;

  /// Calls `action` with the piece as a batch of its own.
  template <class Action>
  decltype(auto) with_batch(Action&& action) const {
    if (whole) return action(*batch);
    return action(BatchAccess<Batch>::part(*batch, begin, length));
  }
};

/// The pieces of all batches in turn, of at most so many samples; 0: batches are not cut. They point to the batches.
template <class Batch>
std::vector<BatchPiece<Batch>> pieces_of(const std::vector<Batch>& batches, int64_t max_samples) {
  std::vector<BatchPiece<Batch>> pieces;
  for (const Batch& batch : batches) {
    const int64_t samples = BatchAccess<Batch>::samples(batch);
    const int64_t most = max_samples > 0 ? std::min(max_samples, samples) : samples;
    for (int64_t begin = 0; begin < samples; begin += most) {
      const int64_t length = std::min(most, samples - begin);
      pieces.push_back({&batch, begin, length, length == samples});
    }
  }
  return pieces;
}

}  // namespace lockstep::train
