#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>

#include <lockstep/parallel/ddp/reducer/fingerprint.h>

namespace lockstep {
namespace {

constexpr uint64_t kPrime = 0x9e3779b97f4a7c15u;

bool has_elements(const at::Tensor& tensor) {
  return tensor.numel() > 0 && tensor.is_non_overlapping_and_dense();
}

/// Of the versions, and of three elements of each CPU tensor.
uint64_t hash_of(const std::vector<at::Tensor>& tensors) {
  uint64_t hash = 0;
  for (const at::Tensor& tensor : tensors) {
    // The version counts too: a step that a gradient scaler skips changes no value, yet it is done.
    if (!tensor.is_inference()) hash = (hash ^ static_cast<uint64_t>(tensor._version())) * kPrime;
    if (!tensor.is_cpu() || !has_elements(tensor)) continue;
    const auto* bytes = static_cast<const std::byte*>(tensor.const_data_ptr());
    const size_t element = tensor.element_size();
    const auto numel = static_cast<size_t>(tensor.numel());
    for (const size_t index : {size_t{0}, numel / 2, numel - 1}) {
      uint64_t value = 0;
      std::memcpy(&value, bytes + index * element, std::min(element, sizeof(value)));
      hash = (hash ^ value) * kPrime;
      hash ^= hash >> 29;
    }
  }
  return hash;
}

using Parts = std::map<std::pair<int, at::ScalarType>, std::vector<at::Tensor>>;

/// A run of elements from the middle of each tensor on a device: whole runs are gathered by few kernels.
Parts parts_of(const std::vector<at::Tensor>& tensors) {
  constexpr int64_t kElements = 16;
  Parts parts;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.is_cpu() || !has_elements(tensor)) continue;
    const int64_t length = std::min(kElements, tensor.numel());
    const int64_t begin = tensor.storage_offset() + (tensor.numel() - length) / 2;
    parts[{tensor.device().index(), tensor.scalar_type()}].push_back(
        tensor.detach().as_strided({length}, {1}, begin));
  }
  return parts;
}

/// at::equal() of the numbers would find a NaN unlike itself.
bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a.view(at::kByte), b.view(at::kByte));
}

}  // namespace

/// New views where a parameter's memory or type is another than before: to make them in every step would take
/// milliseconds.
void Fingerprint::follow(const std::vector<at::Tensor>& tensors) {
  std::vector<Source> sources;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.is_cpu() || !has_elements(tensor)) continue;
    sources.emplace_back(tensor.const_data_ptr(), tensor.scalar_type(), tensor.numel());
  }
  if (sources == sources_) return;
  samples_.clear();
  for (auto& [place, parts] : parts_of(tensors)) samples_[place].parts = std::move(parts);
  sources_ = std::move(sources);
}

void Fingerprint::take(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  hash_ = hash_of(tensors);
  follow(tensors);
  for (auto& [place, samples] : samples_) {
    at::Tensor& values = samples.values;  // the same memory in every step
    try {
      if (!values.defined()) values = at::empty({0}, samples.parts.front().options());
      at::cat_out(values, samples.parts);
    } catch (const c10::OutOfMemoryError&) {  // the round succeeded all the same
      values.reset();
    }
  }
}

bool Fingerprint::differs(const std::vector<at::Tensor>& tensors) const {
  const at::NoGradGuard no_grad;
  if (hash_of(tensors) != hash_) return true;
  for (const auto& [place, parts] : parts_of(tensors)) {
    const auto samples = samples_.find(place);
    if (samples == samples_.end()) return true;
    const at::Tensor& before = samples->second.values;
    if (before.defined() && !same_bytes(before, at::cat(parts))) return true;
  }
  return false;
}

}  // namespace lockstep
