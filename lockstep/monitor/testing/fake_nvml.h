#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace lockstep::monitor::testing {

/// A process on the fake's cards, as often as it stands there.
struct FakeProcess {
  unsigned int pid = 0;
  unsigned long long memory = 0;
};

/// What testing/fake_nvml.cc answers, a library with the name and the functions of NVIDIA's; `fake_nvml` in it is the one
/// object of this type. Used by one thread.
struct FakeNvml {
  unsigned int cards = 2;
  unsigned long long memory = 80ULL << 30;
  std::vector<FakeProcess> processes = {};  // of card 0
  /// By function and card (-1: of none), what it returns instead of doing its work.
  std::map<std::pair<std::string, int>, int> errors = {};
  std::map<std::string, int> calls = {};
};

}  // namespace lockstep::monitor::testing
