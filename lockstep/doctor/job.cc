#include <algorithm>
#include <exception>
#include <functional>
#include <optional>
#include <ostream>
#include <set>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/exception_text.h>
#include <lockstep/base/text/formatted.h>
#include <lockstep/base/text/json_text.h>
#include <lockstep/doctor/internal/peer_watch.h>
#include <lockstep/doctor/internal/report_board.h>
#include <lockstep/doctor/job.h>
#include <lockstep/rendezvous/rendezvous.h>

namespace lockstep::doctor {

using internal::PeerWatch;
using internal::ReportBoard;

namespace {

/// Each pair is tested so often, each time between others, and its median counts.
constexpr int kSweeps = 3;
/// A rank that is late, but within its timeout, has this long to say so.
constexpr std::chrono::milliseconds kSlack{1000};
/// With more rounds than this each wire is tested once.
constexpr size_t kRoundsToSweep = 8;
constexpr std::chrono::seconds kProgressInterval{2};

std::string message_of(const std::function<void()>& action) {
  try {
    action();
    return "";
  } catch (const std::exception& error) {
    return text_of(error);
  }
}

nlohmann::json to_json(const PairMeasurement& measured) {
  return {{"error", measured.error}, {"latency", measured.latency}, {"transfer", measured.transfer}};
}

nlohmann::json to_json(const WireMeasurement& measured) {
  return {{"error", measured.error},       {"rate", measured.rate},
          {"segments", measured.segments}, {"resent_segments", measured.resent_segments},
          {"latency", measured.latency},   {"clock_offset", measured.clock_offset}};
}

std::string tell_round(const std::vector<Pair>& pairs) {
  std::string names;
  for (const Pair& pair : pairs) {
    names += (names.empty() ? "" : ", ") + std::to_string(pair.first) + "-" + std::to_string(pair.second);
  }
  return names;
}

/// Leads one rank through the tests. All ranks take the same way, because it depends on nothing but the
/// reports that the board gives to all.
class JobExamination {
 public:
  JobExamination(const World& world, JobProbe& probe, const JobOptions& options)
      : world_(world), probe_(probe), options_(options), board_(world.store, world.rank, world.world_size) {}

  JobObservations run() {
    collect_facts();
    if (!any_rank_ended() && join() && !any_rank_ended()) {
      test_all();
      test_wires();
      test_pairs();
    }
    return std::move(job_);
  }

  ReportBoard& board() { return board_; }

 private:
  /// Gathers, and notes which ranks do not answer any more. `step` completes "ended during …".
  ReportBoard::Reports gather(const std::string& mine, const std::string& step) {
    auto reports = board_.gather(mine, step_deadline_);
    step_deadline_ = next_deadline();
    for (int rank = 0; rank < world_.world_size; ++rank) {
      const auto state = board_.state(rank);
      if (state == ReportBoard::State::kPresent || job_.gone.contains(rank)) continue;
      const bool ended = state == ReportBoard::State::kEnded;
      const double seconds = std::chrono::duration<double>(options_.timeout).count();
      job_.gone[rank] =
          ended ? "ended during " + step : formatted("did not answer within %g s during ", seconds) + step;
    }
    return reports;
  }

  /// A launcher will end the job then: there is little time left to report.
  bool any_rank_ended() const {
    for (int rank = 0; rank < world_.world_size; ++rank) {
      if (board_.state(rank) == ReportBoard::State::kEnded) return true;
    }
    return false;
  }

  void collect_facts() {
    begin(std::to_string(world_.world_size) + " ranks on " + world_.topology.describe() +
          "; versions and settings");
    RankFacts own = gather_rank_facts(world_.rank, options_.program, world_.meeting_host);
    // As messages call it: no two hosts alike.
    if (world_.topology.spans_hosts()) own.hostname = world_.topology.host_name(world_.rank);
    const auto reports = gather(doctor::to_json(own), "the exchange of facts");
    std::vector<RankFacts> known;
    for (const auto& report : reports) {
      job_.ranks.push_back(report ? parse_rank_facts(*report) : std::nullopt);
      known.push_back(job_.ranks.back().value_or(RankFacts()));
    }
    watch_.emplace(known, world_.rank);
    board_.set_watch([this](int rank) { return watch_->has_ended(rank); });
  }

  bool join() {
    begin("init_process_group");
    const std::string error = message_of([&] { probe_.join(); });
    keep_errors(gather(error, "init_process_group"), job_.join_errors);
    return job_.join_errors.empty();
  }

  void test_all() {
    begin("operations over all ranks");
    double offset = 0;
    std::string wire;
    const std::string error = message_of([&] {
      probe_.test_all();
      offset = probe_.clock_offset();
      wire = probe_.wire();
    });
    const auto reports = gather(json_text({{"error", error}, {"offset", offset}, {"wire", wire}}),
                                "operations over all ranks");
    for (int rank = 0; rank < world_.world_size; ++rank) {
      const auto& report = reports[static_cast<size_t>(rank)];
      if (!report) continue;
      const auto json = nlohmann::json::parse(*report);
      const std::string text = json.value("error", "");
      if (!text.empty()) job_.all_errors[rank] = text;
      if (text.empty()) job_.clock_offsets[rank] = json.value("offset", 0.0);
      if (const std::string used = json.value("wire", ""); !used.empty()) job_.wires_used[rank] = used;
    }
  }

  /// One rank of each host, by whom its wires are tested: the lowest that still answers.
  std::vector<int> ranks_of_hosts() const {
    std::vector<int> result;
    std::set<std::string> seen;
    for (int rank = 0; rank < world_.world_size; ++rank) {
      const auto& facts = job_.ranks[static_cast<size_t>(rank)];
      if (facts && !job_.gone.contains(rank) && seen.insert(facts->host).second) result.push_back(rank);
    }
    return result;
  }

  /// In a round no host has more than one wire under test, so that they do not disturb each other.
  void test_wires() {
    const std::vector<int> hosts = ranks_of_hosts();
    if (hosts.size() < 2) return;
    const auto rounds = tournament(static_cast<int>(hosts.size()));
    const int sweeps = rounds.size() <= kRoundsToSweep ? kSweeps : 1;
    const size_t all = rounds.size() * static_cast<size_t>(sweeps);
    for (size_t number = 0; number < all; ++number) {
      if (any_rank_ended()) return;
      std::vector<Pair> pairs;
      for (const Pair& pair : rounds[number % rounds.size()]) {
        const Pair ranks(hosts[static_cast<size_t>(pair.first)], hosts[static_cast<size_t>(pair.second)]);
        if (is_testable(ranks, job_.wires)) pairs.push_back(ranks);
      }
      if (pairs.empty()) continue;
      begin("wires between hosts", number, all);
      const auto reports = gather(json_text(to_json(probe_.test_wires(pairs))),
                                  "the test of the wires between the hosts of ranks " + tell_round(pairs));
      for (const Pair& pair : pairs) keep_wire(pair, reports);
    }
  }

  void keep_wire(const Pair& pair, const ReportBoard::Reports& reports) {
    WireResult& result = result_of(pair, job_.wires);
    nlohmann::json ends[2];
    bool complete = true;
    for (const int end : {0, 1}) {
      const int rank = end == 0 ? pair.first : pair.second;
      const auto& report = reports[static_cast<size_t>(rank)];
      if (!report) {
        complete = false;
        continue;
      }
      ends[end] = nlohmann::json::parse(*report);
      const std::string error = ends[end].value("error", "");
      if (!error.empty()) result.errors[rank] = error;
    }
    if (!complete || !result.errors.empty()) return;
    for (const int end : {0, 1}) {
      result.rates[end].push_back(ends[end].value("rate", 0.0));
      result.segments[end] += ends[end].value("segments", int64_t{0});
      result.resent_segments[end] += ends[end].value("resent_segments", int64_t{0});
    }
    result.latencies.push_back(ends[0].value("latency", 0.0));
    result.clock_offsets.push_back(ends[0].value("clock_offset", 0.0));
  }

  void test_pairs() {
    const auto rounds = tournament(world_.world_size);
    // Each of many pairs would need its timeout only to find out what has been seen.
    const BadWires bad_wires(job_);
    const size_t all = rounds.size() * kSweeps;
    size_t number = 0;
    for (int sweep = 0; sweep < kSweeps; ++sweep) {
      for (const auto& round : rounds) {
        if (any_rank_ended()) return;
        begin("pairs of ranks", number++, all);
        std::vector<Pair> pairs;
        for (const Pair& pair : round) {
          if (is_testable(pair, job_.pairs) && !bad_wires.between(pair.first, pair.second))
            pairs.push_back(pair);
        }
        if (!pairs.empty()) test_round(pairs);
      }
    }
  }

  /// Not with ranks that are gone, and not again what has failed.
  template <class Result>
  bool is_testable(const Pair& pair, const std::vector<Result>& results) const {
    if (job_.gone.contains(pair.first) || job_.gone.contains(pair.second)) return false;
    return std::none_of(results.begin(), results.end(),
                        [&](const Result& each) { return each.ranks == pair && !each.errors.empty(); });
  }

  void test_round(const std::vector<Pair>& pairs) {
    const auto reports =
        gather(json_text(to_json(probe_.test_pairs(pairs))), "the test of the pairs " + tell_round(pairs));
    for (const Pair& pair : pairs) keep_measurements(pair, reports);
  }

  void keep_measurements(const Pair& pair, const ReportBoard::Reports& reports) {
    PairResult& result = result_of(pair, job_.pairs);
    double latency = 0;
    double transfer = 0;
    bool complete = true;
    for (int rank : {pair.first, pair.second}) {
      const auto& report = reports[static_cast<size_t>(rank)];
      if (!report) {
        complete = false;
        continue;
      }
      const auto json = nlohmann::json::parse(*report);
      const std::string error = json.value("error", "");
      if (!error.empty()) result.errors[rank] = error;
      latency = std::max(latency, json.value("latency", 0.0));
      transfer = std::max(transfer, json.value("transfer", 0.0));
    }
    if (!complete || !result.errors.empty()) return;
    result.latencies.push_back(latency);
    result.transfers.push_back(transfer);
  }

  template <class Result>
  static Result& result_of(const Pair& pair, std::vector<Result>& results) {
    for (Result& each : results) {
      if (each.ranks == pair) return each;
    }
    results.push_back({});
    results.back().ranks = pair;
    return results.back();
  }

  static void keep_errors(const ReportBoard::Reports& reports, std::map<int, std::string>& errors) {
    for (size_t rank = 0; rank < reports.size(); ++rank) {
      if (reports[rank] && !reports[rank]->empty()) errors[static_cast<int>(rank)] = *reports[rank];
    }
  }

  void begin(const std::string& step) {
    told_ = std::chrono::steady_clock::now();
    if (world_.rank == 0 && options_.progress) options_.progress(step);
  }

  /// The first of many rounds is told of, and then one now and then.
  void begin(const std::string& step, size_t round, size_t rounds) {
    if (round > 0 && std::chrono::steady_clock::now() - told_ < kProgressInterval) return;
    begin(step + ", round " + std::to_string(round + 1) + " of " + std::to_string(rounds));
  }

  /// All ranks begin a step at the same moment, when rank 0 has published the results of the one before.
  Deadline next_deadline() const { return Deadline::after(options_.timeout + kSlack); }

  const World& world_;
  JobProbe& probe_;
  const JobOptions& options_;
  ReportBoard board_;
  Deadline step_deadline_ = next_deadline();
  std::chrono::steady_clock::time_point told_;
  std::optional<PeerWatch> watch_;
  JobObservations job_;
};

std::string job_json(const Findings& findings, const JobObservations& job, bool strict) {
  const std::string version = job.ranks.front() ? job.ranks.front()->lockstep_version : "";
  auto json = nlohmann::ordered_json::parse(doctor::to_json(findings, version, strict));
  json["pairs"] = nlohmann::ordered_json::array();
  for (const PairResult& pair : job.pairs) {
    nlohmann::ordered_json entry = {{"ranks", {pair.ranks.first, pair.ranks.second}}};
    entry["errors"] = nlohmann::ordered_json::object();
    for (const auto& [rank, error] : pair.errors) entry["errors"][std::to_string(rank)] = error;
    entry["latency_seconds"] = pair.latencies;
    entry["transfer_1mib_seconds"] = pair.transfers;
    json["pairs"].push_back(std::move(entry));
  }
  json["wires"] = nlohmann::ordered_json::array();
  for (const WireResult& wire : job.wires) {
    nlohmann::ordered_json entry = {
        {"ranks", {wire.ranks.first, wire.ranks.second}},
        {"hosts", {job.host_name(wire.ranks.first), job.host_name(wire.ranks.second)}}};
    entry["errors"] = nlohmann::ordered_json::object();
    for (const auto& [rank, error] : wire.errors) entry["errors"][std::to_string(rank)] = error;
    entry["latency_seconds"] = wire.latencies;
    entry["clock_offset_seconds"] = wire.clock_offsets;
    for (const int direction : {0, 1}) {
      entry[direction == 0 ? "forth" : "back"] = {{"bytes_per_second", wire.rates[direction]},
                                                  {"segments", wire.segments[direction]},
                                                  {"resent_segments", wire.resent_segments[direction]}};
    }
    json["wires"].push_back(std::move(entry));
  }
  return json_text(json, 2) + "\n";
}

void check_options(const JobOptions& options) {
  TORCH_CHECK_VALUE(options.timeout >= std::chrono::seconds(1), "the timeout is ", options.timeout.count(),
                    " ms; it must be at least 1 second");
}

}  // namespace

int examine_job(const World& world, JobProbe& probe, const JobOptions& options, std::ostream& out) {
  check_options(options);
  JobExamination examination(world, probe, options);
  const JobObservations job = examination.run();
  const Findings findings = judge_job(job);
  if (world.rank == 0) {
    out << (options.json ? job_json(findings, job, options.strict) : to_text(findings));
    out.flush();
  }
  // Rank 0's status counts on all ranks, for another version may judge otherwise.
  const int status = exit_status(findings, options.strict);
  const std::string shared =
      examination.board().share(std::to_string(status), Deadline::after(options.timeout));
  return shared == "0" ? 0 : 1;
}

int examine_job(const JobOptions& options, std::ostream& out) {
  check_options(options);
  const World world = rendezvous({.timeout = options.timeout});
  // An operation takes half of the time at most, and no new ones are begun after that half.
  LockstepProbe probe(world, options.timeout / 2);
  return examine_job(world, probe, options, out);
}

}  // namespace lockstep::doctor
