#pragma once

#include <string>

#include <lockstep/rendezvous/launch_environment.h>

namespace lockstep {

/// Where the flight records of a process with these variables go: LOCKSTEP_FLIGHT_DIR; else
/// lockstep-UID/flight-JOB below TMPDIR or /tmp, where JOB is what the launcher calls the job, or else the
/// program's name. All ranks of a host get the same answer, and so does their launcher.
std::string flight_directory(const Lookup& lookup);

}  // namespace lockstep
