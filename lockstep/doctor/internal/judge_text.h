#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/doctor/job_probe.h>

/// What the judges of a job share. Pure functions.
namespace lockstep::doctor::internal {

/// "12.5 µs", "30 ms"
std::string duration(double seconds);
/// The first error in full, as ranks mostly report the same one, and which other ranks had one.
std::string tell_errors(const std::map<int, std::string>& errors);
/// All of them in full, where there are few: of ranks on several hosts each knows its own wires only.
std::string tell_different_errors(const std::map<int, std::string>& errors);
/// The member that all bad pairs have in common, at least two, and that is in no good one, so that it and not each pair
/// is to be named.
std::optional<int> common_member(const std::vector<Pair>& bad, const std::vector<Pair>& good);

}  // namespace lockstep::doctor::internal
