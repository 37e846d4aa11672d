// What trace_analysis.h has found, in words and as JSON.
#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <ranges>
#include <sstream>
#include <utility>

#include <nlohmann/json.hpp>

#include <lockstep/base/text/counted.h>
#include <lockstep/base/text/formatted.h>
#include <lockstep/base/text/json_text.h>
#include <lockstep/base/text/printable.h>
#include <lockstep/profiler/internal/held_memory.h>
#include <lockstep/profiler/trace_analysis.h>

namespace lockstep::profiler {
namespace {

using nlohmann::ordered_json;

struct ReportedPhase {
  const char* key;
  const char* words;
  double TracePhaseTimes::*part;
};
constexpr std::array<ReportedPhase, 6> kReported = {
    {{"data", "waiting for data", &TracePhaseTimes::data},
     {"forward", "forward", &TracePhaseTimes::forward},
     {"backward", "backward", &TracePhaseTimes::backward},
     {"communication", "communication, exposed", &TracePhaseTimes::communication},
     {"optimizer", "optimizer", &TracePhaseTimes::optimizer},
     {"idle", "nothing recorded", &TracePhaseTimes::idle}}};

constexpr size_t kMostOperators = 20;

std::string number(double value, int digits = 2) {
  return formatted("%.*f", digits, value);
}

std::string signed_number(double value) {
  return (value >= 0 ? "+" : "") + number(value);
}

std::string percent(double part, double whole) {
  return whole > 0 ? number(100 * part / whole, 1) + " %" : "-";
}

std::string column(const std::string& text, size_t width) {
  return std::string(width - std::min(width, text.size()), ' ') + text;
}

std::string name_column(const std::string& text, size_t width) {
  const std::string name = printable(text, width);
  return name + std::string(width - std::min(width, name.size()), ' ');
}

double in_mebibytes(int64_t bytes) {
  return static_cast<double>(bytes) / 0x1p20;
}

std::string mebibytes(int64_t bytes) {
  return number(in_mebibytes(bytes), 1) + " MiB";
}

void describe_phases(const TraceAnalysis& analysis, std::ostream& out) {
  const double step = analysis.mean.total();
  out << "A step takes " << number(step) << " ms, the mean over the steps of "
      << counted(analysis.ranks.size(), "rank") << ":\n\n";
  for (const ReportedPhase& phase : kReported) {
    const double part = analysis.mean.*phase.part;
    out << "  " << name_column(phase.words, 24) << column(number(part), 10) << " ms"
        << column(percent(part, step), 9) << "\n";
  }
  if (analysis.waiting_is_known) {
    out << "\n  of the exposed communication " << number(analysis.mean.waiting)
        << " ms are waiting for other ranks; ";
  } else {
    out << "\n  how much of the exposed communication is waiting for other ranks is not known; ";
  }
  out << number(analysis.mean.hidden_communication) << " ms more are hidden beside operators\n";
}

void describe_ranks(const TraceAnalysis& analysis, std::ostream& out) {
  out << "\n  rank  host                steps     step      data   forward  backward  exposed  waiting  "
         "optimizer     "
         "idle   (ms)\n";
  for (const RankProfile& rank : analysis.ranks) {
    const TracePhaseTimes& mean = rank.mean;
    out << column(std::to_string(rank.rank), 6) << "  " << name_column(rank.host, 16)
        << column(std::to_string(rank.steps), 9) << column(number(mean.total()), 9)
        << column(number(mean.data), 10) << column(number(mean.forward), 10)
        << column(number(mean.backward), 10) << column(number(mean.communication), 9)
        << column(analysis.waiting_is_known ? number(mean.waiting) : "-", 9)
        << column(number(mean.optimizer), 11) << column(number(mean.idle), 9) << "\n";
  }
  if (analysis.slowest) out << "\nSlowest is rank " << *analysis.slowest << ": " << analysis.why << ".\n";
}

std::string held_before(const HeldMemory& held) {
  std::string text;
  const auto add = [&](const char* use, int64_t bytes) {
    if (bytes > 0)
      text += std::string(text.empty() ? "; from before: " : ", ") + use + " " + mebibytes(bytes);
  };
  add("parameters", held.parameters);
  add("gradients", held.gradients);
  add("optimizer state", held.optimizer_state);
  return text;
}

void describe_memory(const TraceAnalysis& analysis, std::ostream& out) {
  bool any = false;
  for (const RankProfile& rank : analysis.ranks) {
    for (const MemoryPeak& peak : rank.memory) {
      if (!std::exchange(any, true)) {
        out << "\nTensors at their peak, beyond those from before the recording:\n";
      }
      out << "  rank " << rank.rank << ", " << printable(peak.device) << ": " << mebibytes(peak.bytes)
          << " (inputs " << mebibytes(peak.inputs) << ", activations " << mebibytes(peak.activations)
          << ", gradients " << mebibytes(peak.gradients) << ", optimizer state "
          << mebibytes(peak.optimizer_state) << ", temporary " << mebibytes(peak.temporary) << ", other "
          << mebibytes(peak.other) << ")" << held_before(peak.held) << "\n";
    }
  }
}

ordered_json json_of(const TracePhaseTimes& times, bool waiting_is_known) {
  ordered_json phases;
  for (const ReportedPhase& phase : kReported) phases[phase.key] = times.*phase.part;
  phases["waiting"] = waiting_is_known ? ordered_json(times.waiting) : ordered_json();
  phases["hidden_communication"] = times.hidden_communication;
  return phases;
}

ordered_json json_of(const TraceAnalysis& analysis) {
  ordered_json ranks = ordered_json::array();
  for (const RankProfile& rank : analysis.ranks) {
    ordered_json memory = ordered_json::array();
    for (const MemoryPeak& peak : rank.memory) {
      memory.push_back({{"device", peak.device},
                        {"bytes", peak.bytes},
                        {"inputs", peak.inputs},
                        {"activations", peak.activations},
                        {"gradients", peak.gradients},
                        {"optimizer_state", peak.optimizer_state},
                        {"temporary", peak.temporary},
                        {"other", peak.other},
                        {"held", internal::json_of_held(peak.held)}});
    }
    ranks.push_back({{"rank", rank.rank},
                     {"host", rank.host},
                     {"steps", rank.steps},
                     {"step_ms", rank.mean.total()},
                     {"phases", json_of(rank.mean, analysis.waiting_is_known)},
                     {"memory", memory}});
  }
  ordered_json operators = ordered_json::array();
  for (const OperatorTime& one : analysis.operators | std::views::take(kMostOperators)) {
    operators.push_back(
        {{"name", one.name}, {"calls", one.calls}, {"self_ms", one.self_ms}, {"share", one.share}});
  }
  ordered_json slowest;
  if (analysis.slowest) slowest = {{"rank", *analysis.slowest}, {"why", analysis.why}};
  return {{"step_ms", analysis.mean.total()},
          {"phases", json_of(analysis.mean, analysis.waiting_is_known)},
          {"ranks", ranks},
          {"slowest", slowest},
          {"operators", operators},
          {"advice", analysis.advice},
          {"notes", analysis.notes}};
}

std::string text_of_json(const ordered_json& value) {
  return json_text(value, 2) + "\n";
}

struct OperatorChange {
  std::string name;
  double before = 0;
  double after = 0;
  double change() const { return after - before; }
};

/// The operators whose time differs most. Those that only one of both runs has are taken for 0 in the other.
std::vector<OperatorChange> operator_changes(const TraceAnalysis& before, const TraceAnalysis& after) {
  constexpr size_t kMost = 10;
  std::map<std::string, OperatorChange> by_name;
  for (const OperatorTime& one : before.operators) by_name[one.name].before = one.self_ms;
  for (const OperatorTime& one : after.operators) by_name[one.name].after = one.self_ms;
  std::vector<OperatorChange> changes;
  for (auto& [name, change] : by_name) {
    change.name = name;
    changes.push_back(change);
  }
  std::stable_sort(changes.begin(), changes.end(), [](const OperatorChange& a, const OperatorChange& b) {
    return std::abs(a.change()) > std::abs(b.change());
  });
  if (changes.size() > kMost) changes.resize(kMost);
  return changes;
}

/// Before and after by device, each of the rank with most. None where one of the runs has recorded no memory.
std::map<std::string, std::array<MemoryPeak, 2>> compared_peaks(const TraceAnalysis& before,
                                                                const TraceAnalysis& after) {
  std::map<std::string, std::array<MemoryPeak, 2>> peaks;
  const auto tells_memory = [](const TraceAnalysis& run) {
    return std::any_of(run.ranks.begin(), run.ranks.end(),
                       [](const RankProfile& rank) { return !rank.memory.empty(); });
  };
  if (!tells_memory(before) || !tells_memory(after)) return peaks;
  for (const size_t run : {size_t{0}, size_t{1}}) {
    for (const RankProfile& rank : (run == 0 ? before : after).ranks) {
      for (const MemoryPeak& peak : rank.memory) {
        MemoryPeak& most = peaks[peak.device][run];
        if (peak.bytes + peak.held.total() > most.bytes + most.held.total()) most = peak;
      }
    }
  }
  return peaks;
}

}  // namespace

std::string describe(const TraceAnalysis& analysis) {
  std::ostringstream out;
  for (const std::string& note : analysis.notes) out << "Note: " << printable(note, 500) << ".\n";
  describe_phases(analysis, out);
  describe_ranks(analysis, out);
  if (!analysis.operators.empty()) {
    out << "\nOperators by their own time, in a step of a rank:\n";
    for (const OperatorTime& one : analysis.operators | std::views::take(kMostOperators)) {
      out << "  " << name_column(one.name, 60) << column(number(one.self_ms, 3), 11) << " ms"
          << column(percent(one.share, 1), 9) << column(number(one.calls, 1), 10) << " calls\n";
    }
  }
  describe_memory(analysis, out);
  if (!analysis.advice.empty()) {
    out << "\nWhat to try next, by its share of the step:\n";
    for (const std::string& advice : analysis.advice) out << "  " << printable(advice, 500) << "\n";
  }
  return out.str();
}

std::string to_json(const TraceAnalysis& analysis) {
  return text_of_json(json_of(analysis));
}

std::string describe_difference(const TraceAnalysis& before, const TraceAnalysis& after) {
  std::ostringstream out;
  for (const std::string& note : before.notes)
    out << "Note on the run before: " << printable(note, 500) << ".\n";
  for (const std::string& note : after.notes) out << "Note: " << printable(note, 500) << ".\n";
  if (before.ranks.size() != after.ranks.size()) {
    out << "Note: " << after.ranks.size() << " ranks are compared with " << before.ranks.size() << ".\n";
  }
  const double first = before.mean.total(), second = after.mean.total();
  out << "A step takes " << number(second) << " ms, before " << number(first) << " ms";
  if (first > 0) out << " (" << signed_number(100 * (second - first) / first) << " %)";
  out << "\n\n  " << name_column("", 24) << column("before", 10) << column("after", 10)
      << column("change", 10) << "   (ms)\n";
  const auto row = [&](const std::string& words, double was, double is) {
    out << "  " << name_column(words, 24) << column(number(was), 10) << column(number(is), 10)
        << column(signed_number(is - was), 10) << "\n";
  };
  for (const ReportedPhase& phase : kReported)
    row(phase.words, before.mean.*phase.part, after.mean.*phase.part);
  out << "\n";
  if (before.waiting_is_known && after.waiting_is_known) {
    row("waiting, of the exposed", before.mean.waiting, after.mean.waiting);
  }
  row("communication, hidden", before.mean.hidden_communication, after.mean.hidden_communication);
  const auto peaks = compared_peaks(before, after);
  if (!peaks.empty()) {
    out << "\nTensors at their peak, of the rank with most:\n\n  " << name_column("", 24)
        << column("before", 10) << column("after", 10) << column("change", 10) << "   (MiB)\n";
  }
  for (const auto& [device, peak] : peaks) {
    const auto& [was, is] = peak;
    row(device, in_mebibytes(was.bytes), in_mebibytes(is.bytes));
    if (was.held.total() == 0 || is.held.total() == 0) continue;  // older traces do not tell
    row(device + ", from before", in_mebibytes(was.held.total()), in_mebibytes(is.held.total()));
  }
  if (before.slowest) out << "\nSlowest was rank " << *before.slowest << ": " << before.why << ".\n";
  if (after.slowest) out << "\nSlowest is rank " << *after.slowest << ": " << after.why << ".\n";
  if (before.slowest && !after.slowest) out << "\nNo rank is slowest now.\n";
  out << "\nOperators that differ most:\n";
  for (const OperatorChange& change : operator_changes(before, after)) {
    out << "  " << name_column(change.name, 60) << column(number(change.before, 3), 11)
        << column(number(change.after, 3), 11) << column(signed_number(change.change()), 10) << "\n";
  }
  return out.str();
}

std::string difference_to_json(const TraceAnalysis& before, const TraceAnalysis& after) {
  ordered_json phases;
  for (const ReportedPhase& phase : kReported)
    phases[phase.key] = after.mean.*phase.part - before.mean.*phase.part;
  phases["waiting"] = before.waiting_is_known && after.waiting_is_known
                          ? ordered_json(after.mean.waiting - before.mean.waiting)
                          : ordered_json();
  phases["hidden_communication"] = after.mean.hidden_communication - before.mean.hidden_communication;
  ordered_json memory = ordered_json::array();
  const auto held = [](const MemoryPeak& peak) {  // older traces do not tell
    return peak.held.total() > 0 ? ordered_json(peak.held.total()) : ordered_json();
  };
  for (const auto& [device, peak] : compared_peaks(before, after)) {
    const auto& [was, is] = peak;
    memory.push_back({{"device", device},
                      {"bytes", {{"before", was.bytes}, {"after", is.bytes}}},
                      {"held", {{"before", held(was)}, {"after", held(is)}}}});
  }
  const auto slowest = [](const TraceAnalysis& analysis) {
    return analysis.slowest ? ordered_json(*analysis.slowest) : ordered_json();
  };
  ordered_json operators = ordered_json::array();
  for (const OperatorChange& change : operator_changes(before, after)) {
    operators.push_back({{"name", change.name}, {"before", change.before}, {"after", change.after}});
  }
  return text_of_json({{"before", json_of(before)},
                       {"after", json_of(after)},
                       {"change",
                        {{"step_ms", after.mean.total() - before.mean.total()},
                         {"phases", phases},
                         {"memory", memory},
                         {"slowest", {{"before", slowest(before)}, {"after", slowest(after)}}},
                         {"operators", operators}}}});
}

}  // namespace lockstep::profiler
