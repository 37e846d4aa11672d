#include <algorithm>
#include <functional>

#include <lockstep/base/text/formatted.h>
#include <lockstep/doctor/internal/judge_text.h>
#include <lockstep/doctor/internal/median.h>
#include <lockstep/doctor/judge_job.h>

namespace lockstep::doctor {

using internal::common_member;
using internal::duration;
using internal::median;
using internal::tell_errors;

namespace {

constexpr size_t kMostWiresNamed = 12;

/// "19.2 Mbit/s", as interfaces are named.
std::string bit_rate(double bytes_a_second) {
  const double bits = bytes_a_second * 8;
  const bool giga = bits >= 1e9;
  return formatted("%.3g %s", bits / (giga ? 1e9 : 1e6), giga ? "Gbit/s" : "Mbit/s");
}

bool broken(const WireResult& wire) {
  return !wire.errors.empty();
}

bool measured(const WireResult& wire) {
  return !broken(wire) && !wire.latencies.empty() && !wire.rates[0].empty() && !wire.rates[1].empty();
}

/// All wires are to be alike.
struct Usual {
  size_t wires = 0;
  double latency = 0;
  double rate = 0;  // of all directions
};

Usual usual_of(const std::vector<WireResult>& wires) {
  Usual usual;
  std::vector<double> latencies;
  std::vector<double> rates;
  for (const WireResult& wire : wires) {
    if (!measured(wire)) continue;
    ++usual.wires;
    latencies.push_back(median(wire.latencies));
    for (const auto& direction : wire.rates) rates.push_back(-median(direction));
  }
  usual.latency = median(latencies);
  usual.rate =
      -median(rates);  // the faster one of an even number, for the reason for which it is the lower latency
  return usual;
}

/// What is wrong with a wire that works; empty: nothing.
class WireJudge {
 public:
  explicit WireJudge(const JobObservations& job) : job_(job), usual_(usual_of(job.wires)) {}

  const Usual& usual() const { return usual_; }

  /// Slowness, and what explains it.
  std::string flaws(const WireResult& wire) const {
    const std::string slow = slowness(wire);
    const std::string lost = losses(wire);
    return slow + (slow.empty() || lost.empty() ? "" : "; ") + lost;
  }

  std::string name(const WireResult& wire) const {
    return host_of(wire, 0) + " and " + host_of(wire, 1) + " (ranks " + std::to_string(wire.ranks.first) +
           " and " + std::to_string(wire.ranks.second) + ")";
  }

  std::string host_of(const WireResult& wire, int end) const {
    return job_.host_name(end == 0 ? wire.ranks.first : wire.ranks.second);
  }

 private:
  std::string slowness(const WireResult& wire) const {
    if (!measured(wire)) return "";
    const bool compared = usual_.wires >= thresholds::kPairsToCompare;
    std::string text;
    for (const int direction : {0, 1}) {
      const double rate = median(wire.rates[direction]);
      const double back = median(wire.rates[1 - direction]);
      // With few wires a direction has only the other one to be compared with.
      const double expected = compared ? usual_.rate : back;
      if (rate * thresholds::kSlowFactor >= expected) continue;
      text += (text.empty() ? "" : "; ") + bit_rate(rate) + " " + from_to(wire, direction) + ", " +
              formatted("%.3g times less than ", expected / std::max(rate, 1.0)) +
              (compared ? "the median of all wires, " : "the other way, ") + bit_rate(expected);
      if (compared && back * thresholds::kSlowFactor >= expected)
        text += " (" + bit_rate(back) + " the other way)";
    }
    const double latency = median(wire.latencies);
    if (compared && latency > usual_.latency * thresholds::kSlowFactor &&
        latency > usual_.latency + thresholds::kSlowSeconds) {
      text += (text.empty() ? "" : "; ") + ("a message takes " + duration(latency)) + ", " +
              formatted("%.3g times the median of all wires, ", latency / std::max(usual_.latency, 1e-9)) +
              duration(usual_.latency);
    }
    return text;
  }

  std::string losses(const WireResult& wire) const {
    std::string text;
    for (const int direction : {0, 1}) {
      const int64_t resent = wire.resent_segments[direction];
      const auto segments = static_cast<double>(std::max<int64_t>(wire.segments[direction], 1));
      const double share = static_cast<double>(resent) / segments;
      if (resent < thresholds::kResentSegments || share < thresholds::kResentShare) continue;
      text += (text.empty() ? "" : "; ") + formatted("%.2g %% of what was sent ", share * 100) +
              from_to(wire, direction) + " was lost and sent again (" + std::to_string(resent) +
              " TCP segments)";
    }
    return text;
  }

  std::string from_to(const WireResult& wire, int direction) const {
    return "from " + host_of(wire, direction) + " to " + host_of(wire, 1 - direction);
  }

  const JobObservations& job_;
  Usual usual_;
};

/// One finding for each wire of which there is something to tell, or one for the host that all of them have in common.
void name_bad_wires(const JobObservations& job, const WireJudge& judge,
                    const std::function<std::string(const WireResult&)>& tell, Finding form,
                    Findings& findings) {
  std::vector<Pair> bad;
  std::vector<Pair> good;
  for (const WireResult& wire : job.wires) (tell(wire).empty() ? good : bad).push_back(wire.ranks);
  const auto common = common_member(bad, good);
  size_t named = 0;
  for (const WireResult& wire : job.wires) {
    const std::string text = tell(wire);
    if (text.empty()) continue;
    if (++named > kMostWiresNamed) continue;
    form.message = judge.name(wire) + ": " + text;
    if (common) form.message = job.host_name(*common) + " with each other host, say " + form.message;
    findings.push_back(form);
    if (common) return;
  }
  if (named <= kMostWiresNamed) return;
  form.message = std::to_string(named - kMostWiresNamed) + " more wires";
  findings.push_back(form);
}

}  // namespace

BadWires::BadWires(const JobObservations& job) {
  for (const auto& facts : job.ranks) host_of_.push_back(facts ? facts->host : "");
  const WireJudge judge(job);
  for (const WireResult& wire : job.wires) {
    if (broken(wire) || !judge.flaws(wire).empty())
      hosts_.insert(hosts_of(wire.ranks.first, wire.ranks.second));
  }
}

BadWires::Hosts BadWires::hosts_of(int rank, int other) const {
  return std::minmax(host_of_.at(static_cast<size_t>(rank)), host_of_.at(static_cast<size_t>(other)));
}

bool BadWires::between(int rank, int other) const {
  return hosts_.contains(hosts_of(rank, other));
}

Findings judge_wires(const JobObservations& job) {
  Findings findings;
  if (job.wires.empty()) return findings;
  const WireJudge judge(job);
  name_bad_wires(
      job, judge,
      [](const WireResult& wire) { return broken(wire) ? tell_errors(wire.errors) : std::string(); },
      problem("wires", "",
              "see on both hosts that the interfaces are up, which way the packets go (ip route get "
              "ADDRESS), and that "
              "firewalls let them through in both directions"),
      findings);
  name_bad_wires(
      job, judge, [&](const WireResult& wire) { return judge.flaws(wire); },
      warning("wires", "",
              "see on both hosts, and at the switch, each interface's speed and duplex (ethtool), errors, "
              "drops and "
              "queues (ip -s link; tc -s qdisc), cables, which way the packets go (ip route get ADDRESS), "
              "and what else "
              "uses it"),
      findings);
  const auto good = std::count_if(job.wires.begin(), job.wires.end(), [&](const WireResult& wire) {
    return measured(wire) && judge.flaws(wire).empty();
  });
  if (good == 0) return findings;
  findings.push_back(ok("wires", std::to_string(good) + " of " + std::to_string(job.wires.size()) +
                                     " wires between hosts work: a message in " +
                                     duration(judge.usual().latency) + ", " + bit_rate(judge.usual().rate) +
                                     " in the median"));
  return findings;
}

}  // namespace lockstep::doctor
