#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <lockstep/rendezvous/launch_environment.h>

namespace lockstep {

/// Which start of a job's workers a process belongs to. `lockstep run` counts them from 1, the same on all hosts. A value.
struct Generation {
  uint64_t number = 0;  // 0: not known, for no `lockstep run` has started this process
  uint64_t run = 0;     // tells those of one job from those of others

  /// As the launcher's variables say: TORCHELASTIC_RESTART_COUNT, where LOCKSTEP_AGENT_STORE shows that they are of
  /// `lockstep run`. Pure.
  static Generation read(const Lookup& lookup);

  /// Whether both are of one job, and of different starts of it.
  bool differs_from(const Generation& other) const {
    return number != 0 && other.number != 0 && run == other.run && number != other.number;
  }
};

/// What to tell where two of a job meet that differ: "rank 1 (pid 7 on b) is of generation 1 …", with the remedy.
std::string describe_difference(const std::string& own_name, const Generation& own,
                                const std::string& other_name, const Generation& other);

/// Why this process must not act for its job any more, with the remedy: its launcher runs a newer generation, or can't know
/// whether the other hosts do. Nothing for a process of the present generation, and for one that no launcher has started
/// that counts them.
std::optional<std::string> objection_to_old_generation();

}  // namespace lockstep
