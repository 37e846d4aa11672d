#pragma once

#include <string>

#include <lockstep/rendezvous/topology.h>
#include <lockstep/transport/host/host_transport.h>

namespace lockstep::collectives::internal {

/// For the ranks of a job on these hosts, with what the environment says about the memory that ranks share, slow ranks
/// and the network. `meeting_host`: see World. Throws c10::ValueError for a bad value.
transport::HostTransport::Options transport_options(const Topology& topology,
                                                    const std::string& meeting_host);

}  // namespace lockstep::collectives::internal
