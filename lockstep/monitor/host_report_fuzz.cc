// What agents of other hosts tell of their ranks: any text is a report, which can be written and read again, or nothing.
#include <cstdlib>
#include <string>
#include <vector>

#include <lockstep/monitor/host_report.h>
#include <lockstep/monitor/job_table.h>
#include <lockstep/testing/fuzz_driver.h>

namespace lockstep::monitor::host_report_fuzz {
namespace {

std::vector<std::string> seeds() {
  HostReport report;
  report.job = "a";
  report.host = "host-a";
  report.cores = 2;
  report.cpu_percent = 12.5;
  report.received_per_second = 1e6;
  report.cards = {{.index = 1,
                   .name = "H100",
                   .used_percent = 97,
                   .others = {{.pid = 7, .name = "x", .user = "bob", .memory = 3}}}};
  report.ranks = {{.rank = 1,
                   .world_size = 2,
                   .pid = 9,
                   .step = 4,
                   .loss = 0.5,
                   .phase = "waiting",
                   .waits_for = {0},
                   .cards = {1}}};
  report.generation = 2;
  return {to_json(report), to_json({})};
}

}  // namespace

LOCKSTEP_FUZZ_TARGET(host_report, seeds) {
  const auto report = parse_host_report({reinterpret_cast<const char*>(data), size});
  if (!report) return 0;
  const std::string written = to_json(*report);
  const auto again = parse_host_report(written);
  if (!again || to_json(*again) != written) std::abort();
  draw_table({*report}, {.columns = 80});
  return 0;
}

}  // namespace lockstep::monitor::host_report_fuzz
