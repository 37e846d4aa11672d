#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Generator.h>

namespace lockstep::data::internal {

/// A CPU generator in the state that Python's `torch.Generator().manual_seed(seed)` has.
at::Generator make_generator(uint64_t seed);

/// Python's `torch.randperm(size, generator=generator).tolist()`.
std::vector<int64_t> random_permutation(int64_t size, const at::Generator& generator);

/// Python's `torch.empty((), dtype=torch.int64).random_(generator=generator).item()`: in [0, 2^63). Without a
/// generator, from torch's default one.
int64_t draw_seed(const std::optional<at::Generator>& generator);

}  // namespace lockstep::data::internal
