#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>

#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/process_group.h>

namespace lockstep::testing {

/// Normally distributed numbers: the same for the same seed, of any type.
inline at::Tensor random(at::IntArrayRef sizes, uint64_t seed = 0, at::ScalarType type = at::kDouble) {
  return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed), at::kDouble).to(type);
}

inline std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> answer;
  for (const auto& tensor : tensors) answer.push_back(tensor.detach().clone());
  return answer;
}

/// Copies on the CPU.
inline std::vector<at::Tensor> on_cpu(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> answer;
  for (const auto& tensor : tensors)
    answer.push_back(tensor.detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
  return answer;
}

/// Whether the tensors hold the same values, and are undefined where the others are.
inline bool equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.defined() == y.defined() && (!x.defined() || at::equal(x, y));
  });
}

/// The largest difference of two elements.
inline double difference(const at::Tensor& a, const at::Tensor& b) {
  return (a.detach() - b.detach()).abs().max().item<double>();
}

/// The sum of the members' ranks in the default group. Collective.
inline int64_t sum_of_ranks(const ProcessGroup& group) {
  at::Tensor tensor = at::full({1}, get_rank(), at::kLong);
  all_reduce(tensor, ReduceOp::SUM, group);
  return tensor.item<int64_t>();
}

/// Whether all ranks of the group hold the same values. Collective.
inline bool same_everywhere(const at::Tensor& tensor, const ProcessGroup& group = {}) {
  std::vector<at::Tensor> all(static_cast<size_t>(get_world_size(group)));
  for (auto& other : all) other = at::empty_like(tensor);
  all_gather(all, tensor.detach().contiguous(), group);
  return std::all_of(all.begin(), all.end(),
                     [&](const at::Tensor& other) { return at::equal(other, tensor); });
}

}  // namespace lockstep::testing
