#pragma once
#include <lockstep/base/environment.h>

namespace lockstep::testing {

/// Whether long tests are asked for: LOCKSTEP_TEST_ALL, which scripts/test --all sets. A test that samples many cases or
/// moments takes a part of them otherwise.
inline bool long_run() {
  return environment::text("LOCKSTEP_TEST_ALL").has_value();
}

}  // namespace lockstep::testing
