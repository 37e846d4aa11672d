#include <chrono>
#include <cstdlib>
#include <optional>
#include <string>

#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/log.h>
#include <lockstep/collectives/groups/internal/transport_options.h>
#include <lockstep/rendezvous/generation.h>
#include <lockstep/rendezvous/network/network_interface.h>
#include <lockstep/rendezvous/network/port_range.h>
#include <lockstep/transport/wire/ucx_engine.h>

namespace lockstep::collectives::internal {
namespace {

/// The interface that the user wants for Lockstep is wanted for NCCL, too. Without a wish NCCL chooses itself,
/// perhaps several. As setenv(3) is not safe beside threads that read the environment, this comes before those
/// of the job; it is with UCX's variables, which are set next.
void tell_nccl(const NetworkInterface& interface) {
  if (!environment::text("LOCKSTEP_SOCKET_IFNAME") || environment::text("NCCL_SOCKET_IFNAME")) return;
  ::setenv("NCCL_SOCKET_IFNAME", ("=" + interface.name).c_str(), /*overwrite=*/1);
}

}  // namespace

transport::HostTransport::Options transport_options(const Topology& topology,
                                                    const std::string& meeting_host) {
  const auto objection = objection_to_old_generation();
  TORCH_CHECK_WITH(DistBackendError, !objection, *objection);
  transport::HostTransport::Options options;
  if (auto mebibytes = environment::integer("LOCKSTEP_SEGMENT_MB", 1, 1 << 20)) {
    options.segment_bytes = static_cast<size_t>(*mebibytes) << 20;
  }
  options.names_stragglers = environment::integer("LOCKSTEP_STRAGGLERS", 0, 1).value_or(1) != 0;
  if (const auto seconds = environment::integer("LOCKSTEP_HEARTBEAT_TIMEOUT_SEC", 1, 86400)) {
    options.heartbeat_timeout = std::chrono::seconds(*seconds);
  }
  if (!topology.spans_hosts()) return options;
  options.host_of = topology.host_of;
  for (const auto& host : topology.hosts) options.host_names.push_back(host.name);
  options.make_engine = [meeting_host](int rank) {
    const auto ports = port_range();
    const auto interface = interface_between_hosts(meeting_host);
    tell_nccl(interface);
    const std::string range = ports ? ports->to_string() : "";
    std::optional<PortTurn> turn;
    if (environment::text("UCX_TCP_PORT_RANGE").value_or(range) == range) turn.emplace(interface.address);
    auto engine = transport::wire::make_ucx_engine(rank, {.interface = interface.name, .port_range = range});
    turn.reset();
    LOCKSTEP_LOG(kInfo) << "messages between hosts pass by " << engine->describe() << ", from "
                        << interface.address;
    return engine;
  };
  return options;
}

}  // namespace lockstep::collectives::internal
