#pragma once

#include <nlohmann/json.hpp>

#include <lockstep/monitor/host_report.h>

namespace lockstep::monitor::internal {

/// The object that to_json() writes.
nlohmann::ordered_json json_of(const HostReport& report);

}  // namespace lockstep::monitor::internal
