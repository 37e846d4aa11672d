#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

/// Numbers whose sums each rank can compute alone. All are small whole numbers: float32 holds them, and the
/// sums over up to 100,000 ranks, exactly.
namespace lockstep::doctor::internal {

/// Element i of what a rank contributes.
inline float contribution(int rank, int64_t i) {
  return static_cast<float>((rank % 8 + 1) * (i % 13 + 1));
}

/// Fills a contiguous float32 tensor with a rank's contribution.
void fill_contribution(const at::Tensor& tensor, int rank);

/// What is wrong with a tensor that should hold the sum of these ranks' contributions (of one rank: its
/// contribution): empty if nothing, else "element 5 is 3 instead of 4 (17 of 1024 are wrong)".
std::string difference_from_sum(const at::Tensor& tensor, const std::vector<int>& ranks);

}  // namespace lockstep::doctor::internal
