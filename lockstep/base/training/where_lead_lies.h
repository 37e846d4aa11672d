#pragma once

#include <string>

namespace lockstep {

/// The words before the phase in which a slow rank takes most more than the others, which is `in_phase` of its `lead` over them
/// in all phases: a slow host is slow in all of them, and then none explains it. Thread-safe.
inline std::string where_lead_lies(double in_phase, double lead) {
  return in_phase >= lead / 2 ? "; most of it in " : "; in all phases, most in ";
}

}  // namespace lockstep
