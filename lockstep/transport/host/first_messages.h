#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/rendezvous/generation.h>
#include <lockstep/transport/wire/wire.h>

namespace lockstep::transport {

/// What pass_first_messages() calls.
struct FirstMessages {
  std::string own;                                // this rank, for errors: "rank 0 (pid 42 on a), by UCX …"
  std::function<std::string(int rank)> describe;  // the same of another
  /// How long those that share a lost rank's host may take to say more of it than this rank can.
  std::function<std::chrono::nanoseconds(int rank)> patience;
  std::chrono::nanoseconds silence_limit;  // for one from which nothing has come yet
  std::function<void()> look;              // again and again: throws when the joining has failed otherwise
  Generation generation = {};              // of this process
};

/// Passes a small and a full-size message both ways between this rank and each of `ranks`, which do likewise, so that what
/// is wrong with the network shows at the start, and so does a process of another generation of the job, left over at an
/// address that this one's peer has now. Throws c10::DistBackendError or DistTimeoutError that name both ends.
void pass_first_messages(wire::Wire& wire, const std::vector<int>& ranks, const Deadline& deadline,
                         const FirstMessages& with);

}  // namespace lockstep::transport
