#pragma once

#include <cstdint>
#include <span>

#include <lockstep/data/worker_info.h>

namespace lockstep::data::internal {

/// What the calling thread loads, for sample_seed(). Scopes may nest: a data set may have a loader inside.
class LoadingScope {
 public:
  /// The samples of a batch, from `position` of the epoch on; `indices` is empty where samples have none.
  LoadingScope(int64_t base_seed, int64_t position, int64_t count, std::span<const int64_t> indices);
  ~LoadingScope();
  LoadingScope(const LoadingScope&) = delete;
  LoadingScope& operator=(const LoadingScope&) = delete;

  /// Nothing outside of a scope.
  static LoadingScope* current();
  /// Says that the batch's samples from `place` on are meant, where a scope is.
  static void set_place(int64_t place) {
    if (LoadingScope* scope = current()) scope->place_ = place;
  }
  uint64_t seed(int64_t i) const;

 private:
  const int64_t base_seed_;
  const int64_t position_;
  const int64_t count_;
  const std::span<const int64_t> indices_;
  int64_t place_ = 0;
  LoadingScope* const outer_;
};

/// What get_worker_info() tells in the calling thread from now on; null: no worker.
void set_worker_info(const WorkerInfo* info);

}  // namespace lockstep::data::internal
