#pragma once

#include <chrono>
#include <functional>
#include <iosfwd>
#include <string>

#include <lockstep/doctor/job_probe.h>
#include <lockstep/doctor/judge_job.h>

namespace lockstep::doctor {

struct JobOptions {
  bool json = false;
  bool strict = false;  ///< warnings fail too
  /// The limit of meeting, and of each test: a rank that does not answer for so long is named, and left out from
  /// then on. At least 1 s.
  std::chrono::milliseconds timeout = std::chrono::seconds(20);
  std::string program = {};  ///< a file that should be the same for all ranks; empty: none
  /// Called on rank 0 with what it is about to do, and not for each of many rounds.
  std::function<void(const std::string&)> progress = {};
};

/// Checks the job in which this process was started; every rank calls it. Rank 0 writes the report to `out`.
/// Returns exit_status() of the findings, the same on all ranks. Throws c10::ValueError when no launcher
/// started this process, or for bad options; DistTimeoutError on ranks that rank 0 does not answer, or that
/// did not answer themselves; what rendezvous() and the store throw. There must be no default group.
int examine_job(const JobOptions& options, std::ostream& out);

/// The steps of examine_job() after the meeting, with any probe: what all ranks together saw, the same on all
/// of them.
int examine_job(const World& world, JobProbe& probe, const JobOptions& options, std::ostream& out);

}  // namespace lockstep::doctor
