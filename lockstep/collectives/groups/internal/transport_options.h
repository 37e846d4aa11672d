#pragma once

#include <lockstep/base/environment.h>
#include <lockstep/transport/host/host_transport.h>

namespace lockstep {

/// What the environment says about the memory that ranks share. Throws c10::ValueError for a bad value.
inline transport::HostTransport::Options transport_options() {
  transport::HostTransport::Options options;
  if (auto mebibytes = environment::integer("LOCKSTEP_SEGMENT_MB", 1, 1 << 20)) {
    options.segment_bytes = static_cast<size_t>(*mebibytes) << 20;
  }
  return options;
}

}  // namespace lockstep
