#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <lockstep/serialization/state_dict.h>

namespace lockstep::data::internal {

/// A CPU generator in the state that Python's `torch.Generator().manual_seed(seed)` has.
at::Generator make_generator(uint64_t seed);

/// Python's `torch.randperm(size, generator=generator).tolist()`; without a generator, from the default one.
std::vector<int64_t> random_permutation(int64_t size, const std::optional<at::Generator>& generator);

/// Python's `torch.empty((), dtype=torch.int64).random_(generator=generator).item()`: in [0, 2^63). Without a
/// generator, from torch's default one.
int64_t draw_seed(const std::optional<at::Generator>& generator);

/// The numbers of a one-dimensional int64 tensor.
std::vector<int64_t> to_vector(const at::Tensor& numbers);

/// Where a sampler's random numbers come from: a generator that was given, or the default one. Remembers the
/// state from which the latest order was drawn, so that it can be drawn again. Not thread-safe.
class RandomSource {
 public:
  explicit RandomSource(std::optional<at::Generator> given) : given_(std::move(given)) {}

  /// The generator for a new order.
  at::Generator begin();

  /// {"generator": state} of the latest begin(); before the first, of a given generator as it is, and nothing
  /// for the default one, which is the program's to save.
  StateDict state_dict() const;
  /// Lets the next begin() return to a saved state.
  void load_state_dict(const StateDict& state, const std::string& owner);

 private:
  std::optional<at::Generator> given_;
  at::Tensor before_;  // the generator's state at the latest begin(), or loaded
  bool loaded_ = false;
};

}  // namespace lockstep::data::internal
