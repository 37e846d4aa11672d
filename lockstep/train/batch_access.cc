#include <algorithm>
#include <cstring>

#include <c10/util/Exception.h>

#include <lockstep/base/mix_bits.h>
#include <lockstep/train/batch_access.h>

namespace lockstep {
namespace {

/// Of each tensor: enough to tell batches apart, and little beside what a step does with them.
constexpr int64_t kBytes = int64_t{1} << 16;

uint64_t add(uint64_t sum, uint64_t value) {
  return mix_bits(sum ^ value);
}

}  // namespace

int64_t train::fingerprint_of(const std::vector<at::Tensor>& tensors) {
  uint64_t sum = tensors.size();
  for (const at::Tensor& tensor : tensors) {
    sum = add(sum, static_cast<uint64_t>(tensor.scalar_type()));
    for (const int64_t size : tensor.sizes()) sum = add(sum, static_cast<uint64_t>(size));
    if (tensor.numel() == 0 || tensor.layout() != at::kStrided) continue;
    at::Tensor first = tensor.detach();
    if (first.dim() > 0) {
      const auto row = static_cast<int64_t>(first.nbytes()) / first.size(0);
      first = first.narrow(0, 0, std::clamp<int64_t>(kBytes / std::max<int64_t>(row, 1), 1, first.size(0)));
    }
    first = first.cpu().contiguous();
    const auto* bytes = static_cast<const char*>(first.const_data_ptr());
    const auto length = std::min<size_t>(first.nbytes(), kBytes);
    for (size_t i = 0; i < length; i += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, bytes + i, std::min(sizeof(word), length - i));
      sum = add(sum, word);
    }
  }
  return static_cast<int64_t>(sum);
}

}  // namespace lockstep
