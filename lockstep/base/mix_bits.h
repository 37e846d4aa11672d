#pragma once

#include <cstdint>

namespace lockstep {

/// SplitMix64's step (Steele, Lea, Flood 2014): a bijection of which every bit of the result depends on every
/// bit of `value`, so that neighbouring numbers become unrelated ones. Checkpoints and orders of samples
/// stand on these numbers: they never change.
constexpr uint64_t mix_bits(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

}  // namespace lockstep
