#include <algorithm>
#include <functional>
#include <optional>

#include <lockstep/base/ranks.h>
#include <lockstep/base/text/formatted.h>
#include <lockstep/doctor/internal/judge_text.h>
#include <lockstep/doctor/internal/median.h>
#include <lockstep/doctor/judge_job.h>

namespace lockstep::doctor {

using internal::common_member;
using internal::duration;
using internal::median;
using internal::tell_different_errors;
using internal::tell_errors;

namespace {

constexpr size_t kMostPairsNamed = 12;

void judge_gone(const JobObservations& job, Findings& findings) {
  for (const auto& [rank, how] : job.gone) {
    std::string who = "rank " + std::to_string(rank);
    const auto& facts = job.ranks[static_cast<size_t>(rank)];
    if (facts) who += " (pid " + std::to_string(facts->pid) + " on " + facts->hostname + ")";
    findings.push_back(problem("ranks", who + " " + how,
                               "see what it wrote; if it still runs: gdb -p PID, or cat /proc/PID/stack"));
  }
  for (size_t rank = 0; rank < job.ranks.size(); ++rank) {
    if (job.ranks[rank] || job.gone.contains(static_cast<int>(rank))) continue;
    findings.push_back(problem("versions",
                               "what rank " + std::to_string(rank) +
                                   " tells about itself can't be read: it runs another version of Lockstep",
                               "install the same build of Lockstep for all ranks"));
  }
}

bool failed(const PairResult& pair) {
  return !pair.errors.empty();
}

double latency_of(const PairResult& pair) {
  return median(pair.latencies);
}
double transfer_of(const PairResult& pair) {
  return median(pair.transfers);
}

struct Typical {
  double latency = 0;
  double transfer = 0;
};

Typical typical_of(const std::vector<PairResult>& pairs) {
  std::vector<double> latencies;
  std::vector<double> transfers;
  for (const PairResult& pair : pairs) {
    if (failed(pair) || pair.latencies.empty()) continue;
    latencies.push_back(latency_of(pair));
    transfers.push_back(transfer_of(pair));
  }
  if (latencies.size() < thresholds::kPairsToCompare) return {1e9, 1e9};  // no pair is slow
  return {median(latencies), median(transfers)};
}

bool exceeds(double value, double typical) {
  return value > typical * thresholds::kSlowFactor && value > typical + thresholds::kSlowSeconds;
}

std::string tell_slowness(const PairResult& pair, const Typical& typical) {
  const bool by_transfer = exceeds(transfer_of(pair), typical.transfer);
  const double value = by_transfer ? transfer_of(pair) : latency_of(pair);
  const double usual = by_transfer ? typical.transfer : typical.latency;
  return std::string("all_reduce of ") + (by_transfer ? "1 MiB" : "4 B") + " takes " + duration(value) +
         formatted(", %.3g times the median of all pairs, ", value / std::max(usual, 1e-9)) + duration(usual);
}

/// The rank that is the cause of all pairs for which `is_bad`.
std::optional<int> common_rank(const std::vector<PairResult>& pairs,
                               const std::function<bool(const PairResult&)>& is_bad) {
  std::vector<Pair> bad;
  std::vector<Pair> good;
  for (const PairResult& pair : pairs) (is_bad(pair) ? bad : good).push_back(pair.ranks);
  return common_member(bad, good);
}

std::vector<int> partners(int rank, const std::vector<PairResult>& pairs,
                          const std::function<bool(const PairResult&)>& is_bad) {
  std::vector<int> result;
  for (const PairResult& pair : pairs) {
    if (!is_bad(pair)) continue;
    result.push_back(pair.ranks.first == rank ? pair.ranks.second : pair.ranks.first);
  }
  return result;
}

std::string name_pair(const PairResult& pair) {
  return "ranks " + std::to_string(pair.ranks.first) + " and " + std::to_string(pair.ranks.second);
}

/// One finding for each bad pair, or one for the rank that is in all of them.
void name_bad_pairs(const std::vector<PairResult>& pairs,
                    const std::function<bool(const PairResult&)>& is_bad,
                    const std::function<std::string(const PairResult&)>& tell, Finding form,
                    Findings& findings) {
  const auto first = std::find_if(pairs.begin(), pairs.end(), is_bad);
  if (first == pairs.end()) return;
  if (const auto rank = common_rank(pairs, is_bad)) {
    form.message = "rank " + std::to_string(*rank) + " with each of " +
                   name_ranks(partners(*rank, pairs, is_bad)) + ", say " + name_pair(*first) + ": " +
                   tell(*first);
    findings.push_back(form);
    return;
  }
  size_t named = 0;
  size_t left_out = 0;
  for (const PairResult& pair : pairs) {
    if (!is_bad(pair)) continue;
    if (named++ >= kMostPairsNamed) {
      ++left_out;
      continue;
    }
    form.message = name_pair(pair) + ": " + tell(pair);
    findings.push_back(form);
  }
  if (left_out == 0) return;
  form.message = std::to_string(left_out) + " more pairs";
  findings.push_back(form);
}

/// Of pairs that are alike: `which` is " between hosts", or nothing.
void judge_speed(const JobObservations& job, const std::vector<PairResult>& pairs, const std::string& which,
                 Findings& findings) {
  if (pairs.empty()) return;
  const Typical typical = typical_of(pairs);
  const BadWires bad_wires(job);
  const auto is_slow = [&](const PairResult& pair) {
    // A slow wire is reported already, once for all ranks of its hosts.
    return !failed(pair) && !bad_wires.between(pair.ranks.first, pair.ranks.second) &&
           (exceeds(latency_of(pair), typical.latency) || exceeds(transfer_of(pair), typical.transfer));
  };
  name_bad_pairs(
      pairs, is_slow, [&](const PairResult& pair) { return tell_slowness(pair, typical); },
      warning("pairs", "",
              which.empty()
                  ? "see what else runs on its cores (top), their clock rate, and on which NUMA nodes the "
                    "ranks are"
                  : "see what else runs on its cores (top), and what its host's interface has to do"),
      findings);
  std::vector<double> latencies;
  std::vector<double> transfers;
  for (const PairResult& pair : pairs) {
    if (failed(pair) || is_slow(pair) || pair.latencies.empty()) continue;
    latencies.push_back(latency_of(pair));
    transfers.push_back(transfer_of(pair));
  }
  if (latencies.empty()) return;
  findings.push_back(ok("pairs", std::to_string(latencies.size()) + " of " + std::to_string(pairs.size()) +
                                     " pairs" + which + " work: all_reduce of 4 B in " +
                                     duration(median(latencies)) + ", of 1 MiB in " +
                                     duration(median(transfers)) + " in the median"));
}

void judge_pairs(const JobObservations& job, Findings& findings) {
  name_bad_pairs(
      job.pairs, failed, [](const PairResult& pair) { return tell_errors(pair.errors); },
      problem("pairs", "",
              "see which of the two ranks fails with others too, and what is special "
              "about its host, container or user"),
      findings);
  std::vector<PairResult> within, between;
  for (const PairResult& pair : job.pairs) {
    const auto& one = job.ranks.at(static_cast<size_t>(pair.ranks.first));
    const auto& other = job.ranks.at(static_cast<size_t>(pair.ranks.second));
    (one && other && one->host != other->host ? between : within).push_back(pair);
  }
  judge_speed(job, within, "", findings);
  judge_speed(job, between, " between hosts", findings);
}

}  // namespace

Findings judge_communication(const JobObservations& job) {
  Findings findings;
  judge_gone(job, findings);
  if (!job.join_errors.empty()) {
    findings.push_back(problem("join", "init_process_group fails; " + tell_different_errors(job.join_errors),
                               "mend that; lockstep doctor without --job checks each host alone"));
    return findings;
  }
  if (!job.all_errors.empty()) {
    findings.push_back(problem("all ranks",
                               "all_reduce and broadcast over all ranks fail; " + tell_errors(job.all_errors),
                               "see the ranks and pairs that are named"));
  } else if (job.gone.empty()) {
    findings.push_back(ok("all ranks", "all_reduce and broadcast over all " +
                                           std::to_string(job.ranks.size()) +
                                           " ranks gave the right values"));
  }
  for (Finding& finding : judge_wires(job)) findings.push_back(std::move(finding));
  judge_pairs(job, findings);
  return findings;
}

std::string JobObservations::host_name(int rank) const {
  const auto& facts = ranks.at(static_cast<size_t>(rank));
  return facts ? facts->hostname : "the host of rank " + std::to_string(rank);
}

Findings judge_job(const JobObservations& job) {
  Findings all = judge_ranks(job);
  for (Finding& finding : judge_hosts(job)) all.push_back(std::move(finding));
  for (Finding& finding : judge_communication(job)) all.push_back(std::move(finding));
  return all;
}

}  // namespace lockstep::doctor
