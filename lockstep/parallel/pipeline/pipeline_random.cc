#include <ATen/Context.h>

#include <lockstep/base/mix_bits.h>
#include <lockstep/parallel/pipeline/pipeline_random.h>

namespace lockstep {
namespace {

thread_local const PipelineRandomScope* current_random_scope = nullptr;

uint64_t mixed_with(uint64_t seed, int64_t number) {
  return mix_bits(seed ^ mix_bits(static_cast<uint64_t>(number)));
}

}  // namespace

PipelineRandomScope::PipelineRandomScope(uint64_t seed, int64_t step, int64_t micro_batch)
    : seed_(mixed_with(mixed_with(mix_bits(seed), step), micro_batch)), before_(current_random_scope) {
  current_random_scope = this;
}

PipelineRandomScope::~PipelineRandomScope() {
  current_random_scope = before_;
}

void seed_pipeline_layer(int64_t layer) {
  if (current_random_scope != nullptr) at::manual_seed(mixed_with(current_random_scope->seed_, layer));
}

}  // namespace lockstep
