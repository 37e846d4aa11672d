#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace lockstep {

/// torch's default random number generators of the accelerator's devices, in order; none without one.
/// Thread-safe.
std::vector<at::Generator> accelerator_generators();

/// The generator's get_state() and set_state(), under its lock. Thread-safe.
at::Tensor generator_state(at::Generator generator);
void set_generator_state(at::Generator generator, const at::Tensor& state);

/// The states of the CPU's default generator and of others, for putting them back. Used by one thread at a
/// time.
class GeneratorStates {
 public:
  GeneratorStates();
  GeneratorStates(const GeneratorStates&) = delete;
  GeneratorStates& operator=(const GeneratorStates&) = delete;
  ~GeneratorStates();

  /// Some 100 ns, one or two µs for each of `others`, which are devices' generators. What was taken before is
  /// dropped.
  void take(const std::vector<at::Generator>& others = {});
  /// Puts back what was taken. Can be repeated.
  void restore() const;

 private:
  struct CpuState;
  std::unique_ptr<CpuState> cpu_;  // null before the first take()
  std::vector<std::pair<at::Generator, at::Tensor>> others_;
};

}  // namespace lockstep
