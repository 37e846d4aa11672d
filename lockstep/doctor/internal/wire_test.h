#pragma once

#include <cstdint>
#include <functional>

#include <lockstep/collectives/process_group.h>
#include <lockstep/doctor/job_probe.h>

namespace lockstep::doctor::internal {

/// TCP's counters of this network namespace, since it was made. Zero where /proc does not tell.
struct TcpSegments {
  int64_t sent = 0;
  int64_t resent = 0;
};
TcpSegments read_tcp_segments();

/// Times the messages between this rank and `peer`, which makes the same call, in a group of which both are members:
/// answers first, then a stream from the lower rank to the higher, then one back. `begin_step` comes before
/// each message and may throw. Throws what send() and recv() throw.
WireMeasurement measure_wire(const ProcessGroup& group, int rank, int peer,
                             const std::function<void()>& begin_step);

}  // namespace lockstep::doctor::internal
