#pragma once

#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>

#include <lockstep/profiler/trace_analysis.h>

namespace lockstep::profiler::testing {

/// Each within 2 % of itself, or of the step where there is nothing of it.
inline void expect_shares(const TracePhaseTimes& times, const TracePhaseTimes& expected) {
  const auto expect = [&](const char* name, double TracePhaseTimes::*part) {
    const double share = expected.*part;
    EXPECT_NEAR(times.*part, share, 0.02 * (share > 0 ? share : expected.total())) << name;
  };
  EXPECT_NEAR(times.total(), expected.total(), 0.001);
  expect("data", &TracePhaseTimes::data);
  expect("forward", &TracePhaseTimes::forward);
  expect("backward", &TracePhaseTimes::backward);
  expect("communication", &TracePhaseTimes::communication);
  expect("optimizer", &TracePhaseTimes::optimizer);
  expect("idle", &TracePhaseTimes::idle);
  expect("hidden communication", &TracePhaseTimes::hidden_communication);
  expect("waiting", &TracePhaseTimes::waiting);
}

}  // namespace lockstep::profiler::testing
