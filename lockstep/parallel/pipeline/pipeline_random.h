#pragma once

#include <cstdint>

/// Random numbers within a model, of dropout say, that don't depend on how its layers are shared out over stages, on the
/// schedule, or on what was drawn before: by seed, step, micro-batch and layer.
///
///     at::Tensor forward(const at::Tensor& x) {
///       lockstep::seed_pipeline_layer(7);  // its number in the whole model
///       return torch::dropout(layer(x), 0.1, is_training());
///     }
///
/// Stages of pipeline_stages() do that for each of their layers.
namespace lockstep {

/// Seeds the default generators, of the CPU and of devices, for one layer of the micro-batch that this thread computes; outside
/// of a PipelineRandomScope it does nothing. They are left so. On devices, call it before a function
/// under activation_checkpoint(), not inside: backward runs that function again in a thread of autograd's.
void seed_pipeline_layer(int64_t layer);

/// What PipelineRunner does around a stage's forward with PipelineOptions::seed; for programs that compute the same in one
/// process. In one thread; may be nested.
class PipelineRandomScope {
 public:
  PipelineRandomScope(uint64_t seed, int64_t step, int64_t micro_batch);
  PipelineRandomScope(const PipelineRandomScope&) = delete;
  PipelineRandomScope& operator=(const PipelineRandomScope&) = delete;
  ~PipelineRandomScope();

 private:
  friend void seed_pipeline_layer(int64_t layer);

  uint64_t seed_;
  const PipelineRandomScope* before_;
};

}  // namespace lockstep
