#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/monitor/host_report.h>

namespace lockstep::monitor {

struct JobTableOptions {
  int columns = 0;  ///< lines are cut to so many characters; 0: they are as long as they are
  int rows = 0;     ///< at most so many lines, but never less than 8, with a rank among them; 0: all
};

/// The rank that keeps another one waiting: at the end of those that wait for each other the one that is stopped, or
/// waits for none, or of which nothing is known. Where they wait in a circle, the first one that it waits for. Nothing
/// where it waits for none.
std::optional<int> held_up_by(const std::vector<HostReport>& hosts, int rank);

/// Whether there are as many as they say that there are; false where there are none.
bool has_all_ranks(const std::vector<HostReport>& hosts);

/// Leaves ranks out that are of an earlier generation than the newest: of a host that is lost, or has not heard of it yet.
void forget_former_generations(std::vector<HostReport>& hosts);

/// The generation that is to begin, where the job is between two: it has had one, of which no ranks are left, and all hosts
/// are to run none for now.
std::optional<uint64_t> restarting_generation(const std::vector<HostReport>& hosts);

/// The table of a job, from the reports of its hosts: a line of the job, one for each host and card, one for each rank.
/// Ends with a line break. No control characters, whatever names hold.
std::string draw_table(const std::vector<HostReport>& hosts, const JobTableOptions& options);

/// {"job", "program", "world_size", "samples_per_second", "hosts": [what to_json(HostReport) writes]}, indented; ranks
/// that others keep waiting have "held_up_by", too. Between two generations "restarting" is the number of the next one. Hosts
/// whose agent knows of a generation have its number, "generation", and "idles".
std::string job_json(const std::vector<HostReport>& hosts);

}  // namespace lockstep::monitor
