#pragma once

#include <algorithm>
#include <cstdint>

#include <ATen/core/MT19937RNGEngine.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

namespace lockstep::hooks::internal {

/// numpy.random.RandomState, as far as PowerSGD needs it: the same numbers for the same seed.
class NumpyRandomState {
 public:
  explicit NumpyRandomState(int64_t seed) : engine_(static_cast<uint64_t>(seed)) {
    TORCH_CHECK_VALUE(seed >= 0 && seed <= UINT32_MAX, "Seed must be between 0 and 2**32 - 1; it is ", seed);
  }

  /// RandomState.randint(high), for 0 < high ≤ 2^32: numpy draws 32 bits, masks them, and draws again until
  /// they are small enough (numpy/random/src/distributions/distributions.c, buffered_bounded_masked_uint32).
  uint32_t randint(uint64_t high) {
    const auto largest = static_cast<uint32_t>(high - 1);
    uint32_t mask = largest;
    for (int shift = 1; shift < 32; shift *= 2) mask |= mask >> shift;
    uint32_t value = engine_() & mask;
    while (value > largest) value = engine_() & mask;
    return value;
  }

  /// 625 numbers (int64): the key and the position of RandomState.get_state().
  at::Tensor get_state() const {
    const auto data = engine_.data();
    at::Tensor state = at::empty({kWords + 1}, at::kLong);
    auto* numbers = state.mutable_data_ptr<int64_t>();
    std::copy(data.state_.begin(), data.state_.end(), numbers);
    // at's engine makes the next words when none is left, and stands at the beginning before the first ones.
    numbers[kWords] = data.left_ == 1 ? kWords : data.next_;
    return state;
  }
  void set_state(const at::Tensor& state) {
    TORCH_CHECK_VALUE(state.numel() == kWords + 1 && state.scalar_type() == at::kLong,
                      "the state of a random number generator is ", kWords + 1, " int64; this is ",
                      state.scalar_type(), ' ', state.sizes());
    const at::Tensor numbers = state.contiguous();
    const auto* words = numbers.const_data_ptr<int64_t>();
    const int64_t position = words[kWords];
    TORCH_CHECK_VALUE(position >= 0 && position <= kWords, "the position in the state of a random number ",
                      "generator is 0 to ", kWords, "; this is ", position);
    auto data = engine_.data();
    std::transform(words, words + kWords, data.state_.begin(),
                   [](int64_t word) { return static_cast<uint32_t>(word); });
    data.next_ = static_cast<uint32_t>(position);
    data.left_ = static_cast<int>(kWords - position + 1);
    engine_.set_data(data);
  }

 private:
  static constexpr int64_t kWords = at::MERSENNE_STATE_N;
  at::mt19937 engine_;
};

}  // namespace lockstep::hooks::internal
