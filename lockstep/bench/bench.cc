#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/process/memory.h>
#include <lockstep/bench/bench.h>
#include <lockstep/bench/internal/cases.h>
#include <lockstep/bench/internal/measure.h>
#include <lockstep/bench/internal/output_file.h>
#include <lockstep/bench/internal/plan.h>
#include <lockstep/bench/internal/report.h>
#include <lockstep/bench/internal/status_line.h>
#include <lockstep/collectives/functional.h>
#include <lockstep/collectives/objects.h>
#include <lockstep/launch/agent/agent.h>
#include <lockstep/launch/spawn_processes.h>
#include <lockstep/rendezvous/host_identity.h>
#include <lockstep/rendezvous/launch_environment.h>

namespace lockstep::bench {

using namespace internal;

namespace {

constexpr int kWrongStatus = 1;
constexpr int kUsageStatus = 2;
constexpr const char* kDefaultRanks = "2";

void say(const std::string& text) {
  std::cerr << "lockstep bench: " + text + "\n" << std::flush;
}

/// The check that all ranks make on the same numbers, rank 0's, so that all go on or none.
std::optional<std::string> agree_on_memory(const Plan& plan) {
  const MemoryLimits limits = read_memory_limits();
  const at::Tensor numbers = at::empty({2}, at::kLong);
  auto* values = numbers.mutable_data_ptr<int64_t>();
  values[0] = limits.available;
  values[1] = limits.cgroup_left;
  broadcast(numbers, 0);
  return memory_objection(plan, {.available = values[0], .cgroup_left = values[1]});
}

/// On which hosts the ranks are, the same on all of them.
Topology gather_topology(int rank) {
  std::vector<HostIdentity> identities;
  for (const std::string& host : all_gather_values(this_host().to_string())) {
    identities.push_back(HostIdentity::parse(host));
  }
  return Topology::make(identities, rank);
}

/// One rank's part in measuring everything; prints on rank 0.
class Session {
 public:
  Session(const Plan& plan, int rank, std::ostream& table)
      : plan_(plan),
        rank_(rank),
        table_(table),
        buffers_(allocate_buffers(plan)),
        status_(rank == 0 && ::isatty(STDERR_FILENO) != 0) {}

  std::vector<Row> run(const BenchMachine& machine) {
    print(format_header(plan_, machine));
    std::vector<Row> all;
    for (const Step& step : plan_.steps) {
      print(format_columns(*step.info));
      std::vector<Row> rows;
      for (const int64_t count : step.counts) {
        rows.push_back(measure_row(step, count));
        print(format_row(plan_, rows.back()));
      }
      print(format_footer(rows));
      all.insert(all.end(), rows.begin(), rows.end());
    }
    return all;
  }

 private:
  void print(const std::string& text) {
    status_.clear();
    if (rank_ == 0) table_ << text << std::flush;
  }

  Row measure_row(const Step& step, int64_t count) {
    Row row{
        .info = step.info, .bytes = shown_bytes(*step.info, count, plan_.ranks, plan_.dtype), .count = count};
    for (const Placement placement : step.placements) {
      const Case measured = make_case(plan_, *step.info, placement, count, rank_, buffers_);
      const Sample sample = measure(measured, plan_.iterations, plan_.warmup, [&](int64_t done) {
        status_.show([&] { return describe(row, placement, done); });
      });
      auto& result = placement == Placement::kInPlace ? row.in_place : row.out_of_place;
      result = make_measurement(*step.info, row.bytes, plan_.ranks, sample.nanoseconds, sample.wrong);
    }
    return row;
  }

  std::string describe(const Row& row, Placement placement, int64_t done) const {
    return std::string(row.info->name) + " " + format_bytes(row.bytes) +
           (placement == Placement::kInPlace ? " in place: " : ": ") + std::to_string(done) + " of " +
           std::to_string(plan_.warmup + plan_.iterations) + " iterations";
  }

  const Plan& plan_;
  int rank_;
  std::ostream& table_;
  Buffers buffers_;
  StatusLine status_;
};

/// In a process that has its place in a job. Returns the exit status, the same on all ranks.
int run_rank(const BenchOptions& options) {
  at::set_num_threads(1);
  auto world = init_process_group({.timeout = options.timeout});
  const Plan plan = make_plan(options, world.size());
  if (const auto objection = agree_on_memory(plan)) {
    if (world.rank() == 0) say("error: " + *objection);
    return kUsageStatus;
  }
  BenchMachine machine = describe_machine();
  machine.topology = gather_topology(world.rank());
  const std::vector<Row> rows =
      Session(plan, world.rank(), options.json == "-" ? std::cerr : std::cout).run(machine);
  if (world.rank() == 0 && !options.json.empty()) write_output(options.json, to_json(plan, machine, rows));
  return count_wrong(rows) == 0 ? 0 : kWrongStatus;
}

void check_options(const BenchOptions& options, int ranks) {
  make_plan(options, ranks);
  check_output_path("--json", options.json);
}

int run_in_job(const BenchOptions& options, const LaunchEnvironment& environment) {
  try {
    TORCH_CHECK_VALUE(!options.nproc_per_node,
                      "--nproc-per-node is for a bench that starts its ranks itself; this one "
                      "was started by ",
                      environment.launcher, " in a job of ", environment.world_size,
                      ": leave the option out");
    check_options(options, environment.world_size);
  } catch (const c10::ValueError&) {
    if (environment.rank == 0) throw;
    return kUsageStatus;  // rank 0 says why
  }
  return run_rank(options);
}

/// The exit status for how the ranks ended. A rank that ends with one of ours has said why, or rank 0 has.
int status_of(const launch::SpawnResult& result) {
  if (result.interrupted_by) {
    if (::isatty(STDERR_FILENO) != 0) std::cerr << kClearLine;
    const char* name = ::sigabbrev_np(*result.interrupted_by);
    say(std::string("ended by SIG") + (name == nullptr ? "?" : name));
    return 128 + *result.interrupted_by;
  }
  if (result.failed.empty()) return 0;
  const auto agreed = [&](const launch::SpawnOutcome& outcome) {
    return outcome.reached && !outcome.exception && WIFEXITED(outcome.wait_status) &&
           outcome.wait_status == result.outcomes[0].wait_status;
  };
  if (std::all_of(result.outcomes.begin(), result.outcomes.end(), agreed)) {
    return WEXITSTATUS(result.outcomes[0].wait_status);
  }
  const int rank = result.failed.front();
  say("error: " + launch::describe_failure(rank, result.outcomes[static_cast<size_t>(rank)]));
  return kWrongStatus;
}

int run_self_started(const BenchOptions& options) {
  const int ranks = launch::parse_nprocs(options.nproc_per_node.value_or(kDefaultRanks));
  check_options(options, ranks);
  launch::SpawnRequest request{.options = {.label = "bench", .grace_period = std::chrono::seconds(5)},
                               .nprocs = ranks};
  const auto result = launch::spawn_processes(request, [&](int) {
    const int status = run_rank(options);
    if (status != 0) std::exit(status);  // NOLINT(concurrency-mt-unsafe): flushes, as a return from main does
  });
  TORCH_INTERNAL_ASSERT(result, "this process was started for another call of spawn()");
  return status_of(*result);
}

}  // namespace

int run(const BenchOptions& options) {
  // A process that run_self_started() made has a rank, too, but has to come to the same call first.
  const bool spawned = environment::text("LOCKSTEP_SPAWN").has_value();
  const LaunchEnvironment environment = read_launch_environment(&environment::text);
  return environment.rank >= 0 && !spawned ? run_in_job(options, environment) : run_self_started(options);
}

}  // namespace lockstep::bench
