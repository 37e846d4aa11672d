#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fcntl.h>
#include <iostream>
#include <map>
#include <optional>
#include <string_view>
#include <system_error>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/environment.h>
#include <lockstep/base/text/counted.h>
#include <lockstep/base/text/formatted.h>
#include <lockstep/base/unique_fd.h>
#include <lockstep/bench/internal/output_file.h>
#include <lockstep/bench/internal/scaling_report.h>
#include <lockstep/bench/scaling.h>
#include <lockstep/launch/agent/agent.h>
#include <lockstep/launch/agent/remote_hosts.h>

namespace lockstep::bench {

using namespace internal;

namespace {

void say_scaling(const std::string& text) {
  std::cerr << "lockstep scaling: " + text + "\n" << std::flush;
}

bool was_interrupted(int status) {
  return status > 128;  // see launch::run()
}

/// p50 of the report that `lockstep bench barrier --json -` wrote; nothing where it is none.
std::optional<double> barrier_latency(const std::string& report) {
  const auto json = nlohmann::json::parse(report, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("results")) return std::nullopt;
  for (const auto& result : json["results"]) {
    for (const char* placement : {"out_of_place", "in_place"}) {
      if (result.contains(placement) && result[placement].is_object())
        return result[placement].value("p50_us", 0.0);
    }
  }
  return std::nullopt;
}

class ScalingMeasurement {
 public:
  explicit ScalingMeasurement(const ScalingOptions& options) : options_(options) {}

  int run() {
    if (const int status = measure_barriers(); status != 0) return status;
    if (options_.before_program) options_.before_program();
    int status = 0;
    for (size_t i = 0; i < options_.ranks.size() && status == 0; ++i) status = run_program(options_.ranks[i]);
    if (!all_.empty()) show();
    return status;
  }

 private:
  /// Not 0: a signal ended it. A number of ranks whose barrier can't be measured has none in the table.
  int measure_barriers() {
    if (options_.lockstep.empty()) return 0;
    const UniqueFd nothing(::open("/dev/null", O_RDWR | O_CLOEXEC));
    for (const int ranks : options_.ranks) {
      if (ranks == 1) continue;
      std::string report;
      const int status = options_.run_job(
          {.nprocs = ranks,
           .command = {options_.lockstep, "bench", "barrier", "--iters", "200", "--json", "-"},
           .prefix = false,
           .grace_period = options_.grace_period,
           .output = {nothing.get(), nothing.get()},
           .observe_output = [&](int rank, int stream, std::string_view bytes) {
             if (rank == 0 && stream == STDOUT_FILENO) report += bytes;
           }});
      if (was_interrupted(status)) return status;
      if (const auto latency = barrier_latency(report); status == 0 && latency) barrier_us_[ranks] = *latency;
    }
    return 0;
  }

  /// With that many ranks, as often as it is asked for. Returns the exit status.
  int run_program(int ranks) {
    ScalingRuns runs{.ranks = ranks, .hosts = hosts_of(ranks)};
    if (const auto found = barrier_us_.find(ranks); found != barrier_us_.end())
      runs.barrier_us = found->second;
    for (int repeat = 0; repeat < options_.repeats; ++repeat) {
      ThroughputLog log;
      const auto begin = std::chrono::steady_clock::now();
      const int status =
          options_.run_job({.nprocs = ranks,
                            .command = options_.command,
                            .grace_period = options_.grace_period,
                            .output = {STDERR_FILENO, STDERR_FILENO},
                            .observe_output = [&](int rank, int stream, std::string_view bytes) {
                              log.feed(rank, stream, bytes);
                            }});
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      log.finish();
      if (was_interrupted(status)) return status;
      if (status != 0) {
        say_scaling("error: the program failed with " + counted(ranks, "rank"));
        return 1;
      }
      runs.runs.push_back({.seconds = took.count(), .marked = log.marked(), .trainer = log.trainer()});
      say_scaling(counted(ranks, "rank") + formatted(": %.2f s", took.count()));
    }
    all_.push_back(std::move(runs));
    return 0;
  }

  int hosts_of(int ranks) const {
    if (options_.hosts.empty()) return 1;
    return static_cast<int>(launch::parse_remote_hosts(options_.hosts, ranks).size());
  }

  void show() const {
    const BenchMachine machine = describe_machine();
    ScalingReport report = make_scaling_report(all_, options_.scaling);
    report.hosts = options_.hosts;
    const bool taken = options_.json == "-" || options_.plot == "-";
    (taken ? std::cerr : std::cout) << format_scaling(report, machine, options_.command) << std::flush;
    write_output(options_.json, scaling_json(report, machine, options_.command));
    write_output(options_.plot, scaling_svg(report, options_.command));
  }

  const ScalingOptions& options_;
  std::map<int, double> barrier_us_;  // by ranks
  std::vector<ScalingRuns> all_;
};

}  // namespace

std::vector<int> parse_rank_list(const std::string& text) {
  std::vector<int> ranks;
  const char* const end = text.data() + text.size();
  for (const char* next = text.data();; ++next) {
    int number = 0;
    const auto [stop, error] = std::from_chars(next, end, number);
    TORCH_CHECK_VALUE(error == std::errc() && number > 0 && (stop == end || *stop == ','), "--ranks is '",
                      text, "'; it takes numbers from 1 up with commas between them, such as 1,2,4");
    ranks.push_back(number);
    next = stop;
    if (stop == end) break;
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

std::vector<int> powers_of_two(int most) {
  std::vector<int> ranks;
  for (int64_t power = 1; power < most; power *= 2) ranks.push_back(static_cast<int>(power));
  ranks.push_back(most);
  return ranks;
}

int scale(const ScalingOptions& options) {
  TORCH_CHECK_VALUE(!options.command.empty(), "no program to start was given");
  TORCH_CHECK_VALUE(!options.ranks.empty(), "no number of ranks was given");
  TORCH_CHECK_VALUE(options.repeats >= 1, "--repeats is ", options.repeats, "; it takes a number from 1 up");
  TORCH_CHECK_VALUE(options.plot != "-" || options.json != "-",
                    "--json and --plot can't both be standard output");
  if (!options.hosts.empty())
    launch::parse_remote_hosts(options.hosts, options.ranks.back());  // not only at the last run
  check_output_path("--json", options.json);
  check_output_path("--plot", options.plot);
  if (!environment::text("OMP_NUM_THREADS")) {
    // A launcher sets it for several processes; alone a program would have all cores, and nothing to gain.
    ::setenv("OMP_NUM_THREADS", "1", 1);
    say_scaling("OMP_NUM_THREADS is not set; each rank gets OMP_NUM_THREADS=1, with one rank, too");
  }
  return ScalingMeasurement(options).run();
}

}  // namespace lockstep::bench
