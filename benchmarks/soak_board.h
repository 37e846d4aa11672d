#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>

/// What the processes of one round tell each other, in memory that all of them map.
namespace lockstep::benchmarks {

constexpr int kMostRanks = 5;
constexpr int kMostLanes = 2;

enum class State : int { kRunning, kFailed, kPassed, kCompared };
constexpr std::array kStateNames = {"running", "failed", "passed", "compared"};

constexpr const char* kSucceeded = "succeeded";

/// A rank's report on one lane. Everything else is written before the state.
struct Report {
  std::atomic<State> state{State::kRunning};
  int64_t error_at = 0;   // nanoseconds, when the call had thrown
  int64_t watched = 0;    // bytes of user tensors
  int64_t changed = 0;    // of these, when they were looked at again
  char error[6000] = {};  // empty: it went without one
  char again[6000] = {};  // of a further call after the error, or kSucceeded; empty: none was made
  char call[100] = {};    // which call it was
};

/// How a survivor has gone on in a group of those that are left.
struct Sequel {
  std::atomic<bool> done{false};  // written last
  int size = 0;                   // of that group
  uint64_t bits = 0;              // of what it has trained there: a hash
  char error[6000] = {};          // empty: it went without one
};

struct Board {
  std::array<std::array<Report, kMostLanes>, kMostRanks> reports;
  std::array<std::atomic<int64_t>, kMostLanes> made{};       // calls of the victim
  std::array<std::atomic<int64_t>, kMostLanes> failed_at{};  // nanoseconds; 0: not yet
  std::array<std::atomic<bool>, kMostRanks> ready{};
  std::atomic<int> store_port{0};       // of a store that is no rank's; 0: not yet, or none
  std::atomic<bool> may_strike{false};  // for what the victim does: the wire is whole again
  std::atomic<bool> compare{false};     // all have their errors, and a while has passed
  std::array<Sequel, kMostRanks> sequels;
};

template <size_t N>
void write_text(char (&place)[N], const std::string& text) {
  std::strncpy(place, text.c_str(), N - 1);
}

}  // namespace lockstep::benchmarks
