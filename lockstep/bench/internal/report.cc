#include <nlohmann/json.hpp>
#include <torch/version.h>

#include <lockstep/base/host_name.h>
#include <lockstep/base/process/cpu.h>
#include <lockstep/base/text/formatted.h>
#include <lockstep/bench/internal/report.h>
#include <lockstep/rendezvous/protocol_version.h>

namespace lockstep::bench::internal {
namespace {

using Json = nlohmann::ordered_json;

const char* memory_name(const Plan& plan) {
  return plan.memory == MemoryKind::kArena ? "arena" : "staged";
}

/// Eight characters, with as many decimals as the size deserves.
std::string format_time(double microseconds) {
  return formatted(microseconds >= 10000 ? "%8.0f" : microseconds >= 100 ? "%8.1f" : "%8.2f", microseconds);
}

std::string format_bandwidth(std::optional<double> gigabytes) {
  return gigabytes ? formatted("%7.2f", *gigabytes) : "      -";
}

std::string format_columns_of(const std::optional<Measurement>& measured) {
  if (!measured) return formatted("  %8s %7s %7s %6s", "-", "-", "-", "-");
  const auto algbw = measured->busbw ? std::optional(measured->algbw) : std::nullopt;
  return "  " + format_time(measured->time.mean) + " " + format_bandwidth(algbw) + " " +
         format_bandwidth(measured->busbw) + formatted(" %6lld", static_cast<long long>(measured->wrong));
}

std::string format_percentiles(const std::optional<Measurement>& measured) {
  if (!measured) return formatted("  %8s %8s", "-", "-");
  return "  " + format_time(measured->time.p50) + " " + format_time(measured->time.p99);
}

Json to_json(const Measurement& measured) {
  Json json = {{"time_us", measured.time.mean},
               {"min_us", measured.time.min},
               {"p50_us", measured.time.p50},
               {"p99_us", measured.time.p99},
               {"max_us", measured.time.max}};
  json["algbw_gbps"] = measured.busbw ? Json(measured.algbw) : Json(nullptr);
  json["busbw_gbps"] = measured.busbw ? Json(*measured.busbw) : Json(nullptr);
  json["wrong"] = measured.wrong;
  return json;
}

Json to_json(const std::optional<Measurement>& measured) {
  return measured ? to_json(*measured) : Json(nullptr);
}

}  // namespace

BenchMachine describe_machine() {
  const std::string host = host_name();
  return {.host = host.empty() ? "unknown" : host,
          .cores = usable_cores(),
          .lockstep_version = own_release(),
          .torch_version = TORCH_VERSION};
}

Measurement make_measurement(const CollectiveInfo& info, int64_t bytes, int ranks,
                             const std::vector<int64_t>& nanoseconds, int64_t wrong) {
  Measurement measured{.time = summarize(nanoseconds), .wrong = wrong};
  measured.algbw = bandwidth(bytes, measured.time.mean);
  if (const auto factor = bus_factor(info.collective, ranks)) measured.busbw = measured.algbw * *factor;
  return measured;
}

std::string format_header(const Plan& plan, const BenchMachine& machine) {
  std::string text =
      "# lockstep bench " + machine.lockstep_version + ", torch " + machine.torch_version + "\n";
  const bool several = machine.topology.spans_hosts();
  text += formatted("# ranks %d, ", plan.ranks);
  text += several ? machine.topology.describe() + ", usable cores of the first one"
                  : "host " + machine.host + ", usable cores";
  text += formatted(" %d\n", machine.cores);
  text += formatted("# memory %s: %s\n", memory_name(plan),
                    plan.memory == MemoryKind::kArena
                        ? "tensors in shared memory (empty_shared); --staged for others"
                        : "tensors from anywhere; --arena for those in shared memory");
  text += formatted(
      "# minBytes %lld maxBytes %lld step: %lld(factor) warmup iters: %lld iters: %lld validation: 1\n",
      static_cast<long long>(plan.min_bytes), static_cast<long long>(plan.max_bytes),
      static_cast<long long>(plan.step_factor), static_cast<long long>(plan.warmup),
      static_cast<long long>(plan.iterations));
  const int ranks = several ? machine.topology.local_world_size() : plan.ranks;
  if (ranks > machine.cores) {
    text += formatted("# note: %d ranks share %d cores, so times include waiting for a core\n", ranks,
                      machine.cores);
  }
  return text;
}

std::string format_columns(const CollectiveInfo& info) {
  std::string text = formatted("#\n# %s\n", info.name);
  text += formatted("# %68s %32s %18s %18s\n", "out-of-place", "in-place", "out-of-place", "in-place");
  text += formatted("# %12s %12s %9s %7s %5s", "size", "count", "type", "redop", "root");
  for (int i = 0; i < 2; ++i) text += formatted("  %8s %7s %7s %6s", "time", "algbw", "busbw", "#wrong");
  for (int i = 0; i < 2; ++i) text += formatted("  %8s %8s", "p50", "p99");
  text += formatted("\n# %12s %12s %9s %7s %5s", "(B)", "(elements)", "", "", "");
  for (int i = 0; i < 2; ++i) text += formatted("  %8s %7s %7s %6s", "(us)", "(GB/s)", "(GB/s)", "");
  for (int i = 0; i < 2; ++i) text += formatted("  %8s %8s", "(us)", "(us)");
  return text + "\n";
}

std::string format_row(const Plan& plan, const Row& row) {
  const bool has_data = row.info->collective != Collective::kBarrier;
  std::string text =
      formatted("  %12lld %12lld %9s %7s %5d", static_cast<long long>(row.bytes),
                static_cast<long long>(row.count), has_data ? plan.dtype_name.c_str() : "none",
                row.info->reduces ? plan.op_name.c_str() : "none", row.info->rooted ? plan.root : -1);
  text += format_columns_of(row.out_of_place) + format_columns_of(row.in_place);
  return text + format_percentiles(row.out_of_place) + format_percentiles(row.in_place) + "\n";
}

int64_t count_wrong(const std::vector<Row>& rows) {
  int64_t wrong = 0;
  for (const Row& row : rows) {
    for (const auto& measured : {row.out_of_place, row.in_place}) wrong += measured ? measured->wrong : 0;
  }
  return wrong;
}

std::optional<double> average_busbw(const std::vector<Row>& rows) {
  double sum = 0;
  int values = 0;
  for (const Row& row : rows) {
    for (const auto& measured : {row.out_of_place, row.in_place}) {
      if (!measured || !measured->busbw) continue;
      sum += *measured->busbw;
      ++values;
    }
  }
  return values > 0 ? std::optional(sum / values) : std::nullopt;
}

std::string format_footer(const std::vector<Row>& rows) {
  const int64_t wrong = count_wrong(rows);
  std::string text = formatted("# Out of bounds values : %lld %s\n", static_cast<long long>(wrong),
                               wrong == 0 ? "OK" : "FAILED");
  if (const auto average = average_busbw(rows)) text += formatted("# Avg bus bandwidth    : %g\n", *average);
  return text;
}

std::string to_json(const Plan& plan, const BenchMachine& machine, const std::vector<Row>& rows) {
  Json json = {{"lockstep", machine.lockstep_version},
               {"torch", machine.torch_version},
               {"host", machine.host},
               {"hosts", Json::array()},
               {"cores", machine.cores},
               {"ranks", plan.ranks},
               {"memory", memory_name(plan)},
               {"iterations", plan.iterations},
               {"warmup", plan.warmup},
               {"wrong", count_wrong(rows)}};
  for (const Topology::Host& host : machine.topology.hosts) {
    json["hosts"].push_back({{"name", host.name}, {"ranks", host.ranks}});
  }
  json["results"] = Json::array();
  for (const Row& row : rows) {
    Json entry = {{"collective", row.info->name}, {"size_bytes", row.bytes}, {"count", row.count}};
    entry["type"] = row.info->collective == Collective::kBarrier ? Json(nullptr) : Json(plan.dtype_name);
    entry["redop"] = row.info->reduces ? Json(plan.op_name) : Json(nullptr);
    entry["root"] = row.info->rooted ? Json(plan.root) : Json(nullptr);
    entry["out_of_place"] = to_json(row.out_of_place);
    entry["in_place"] = to_json(row.in_place);
    json["results"].push_back(std::move(entry));
  }
  return json.dump(2) + "\n";
}

}  // namespace lockstep::bench::internal
