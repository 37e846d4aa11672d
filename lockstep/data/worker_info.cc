#include <c10/util/Exception.h>

#include <lockstep/base/mix_bits.h>
#include <lockstep/data/internal/loading_scope.h>
#include <lockstep/data/internal/random.h>
#include <lockstep/data/worker_info.h>

namespace lockstep::data {
namespace internal {
namespace {

thread_local LoadingScope* current_scope = nullptr;
thread_local const WorkerInfo* current_worker = nullptr;

}  // namespace

LoadingScope::LoadingScope(int64_t base_seed, int64_t position, int64_t count,
                           std::span<const int64_t> indices)
    : base_seed_(base_seed), position_(position), count_(count), indices_(indices), outer_(current_scope) {
  current_scope = this;
}

LoadingScope::~LoadingScope() {
  current_scope = outer_;
}

LoadingScope* LoadingScope::current() {
  return current_scope;
}

uint64_t LoadingScope::seed(int64_t i) const {
  const int64_t place = place_ + i;
  TORCH_CHECK_INDEX(place >= 0 && place < count_, "sample_seed(", i, "): the batch in the making has ",
                    count_, " samples, 0 to ", count_ - 1);
  uint64_t seed = mix_bits(static_cast<uint64_t>(base_seed_));
  seed = mix_bits(seed ^ static_cast<uint64_t>(position_ + place));
  // Ranks that were seeded alike have different samples at the same position.
  if (!indices_.empty()) seed = mix_bits(seed ^ static_cast<uint64_t>(indices_[static_cast<size_t>(place)]));
  return seed;
}

void set_worker_info(const WorkerInfo* info) {
  current_worker = info;
}

}  // namespace internal

const WorkerInfo* get_worker_info() {
  return internal::current_worker;
}

uint64_t sample_seed(int64_t i) {
  const auto* scope = internal::LoadingScope::current();
  return scope != nullptr ? scope->seed(i) : static_cast<uint64_t>(internal::draw_seed(std::nullopt));
}

at::Generator sample_generator(int64_t i) {
  return internal::make_generator(sample_seed(i));
}

}  // namespace lockstep::data
