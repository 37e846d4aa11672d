#include <algorithm>
#include <cmath>
#include <cstddef>

#include <c10/util/StringUtil.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/text/formatted.h>
#include <lockstep/base/text/json_text.h>
#include <lockstep/bench/internal/scaling_report.h>

namespace lockstep::bench::internal {
namespace {

constexpr double kSecondsPerHour = 3600;
constexpr int kBarColumns = 50;

template <typename Of>
double median_of(const std::vector<ScalingRun>& runs, const Of& of) {
  std::vector<double> values;
  for (const ScalingRun& run : runs) values.push_back(of(run));
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

/// The unit that all runs have of this member; nothing where one has none, or another.
std::optional<std::string> common_unit(const std::vector<ScalingRuns>& all,
                                       std::optional<Throughput> ScalingRun::*member) {
  std::optional<std::string> unit;
  for (const ScalingRuns& runs : all) {
    for (const ScalingRun& run : runs.runs) {
      const auto& found = run.*member;
      if (!found || (unit && *unit != found->unit)) return std::nullopt;
      unit = found->unit;
    }
  }
  return unit;
}

std::string describe_source(const ScalingReport& report) {
  switch (report.source) {
    case ThroughputSource::kMarked:
      return "by the program's lines LOCKSTEP_SCALING";
    case ThroughputSource::kTrainer:
      return "by the Trainer's progress bar";
    case ThroughputSource::kTime:
      break;
  }
  return report.scaling == Scaling::kStrong
             ? "by the time of a whole run, whose work is the same for all (--work fixed)"
             : "by the time of a whole run, with as much work on each rank (--work per-rank)";
}

std::string escaped(const std::string& text) {
  std::string result;
  for (const char letter : text) {
    if (letter == '&') {
      result += "&amp;";
    } else if (letter == '<') {
      result += "&lt;";
    } else if (letter == '>') {
      result += "&gt;";
    } else {
      result += static_cast<unsigned char>(letter) < ' ' ? ' ' : letter;
    }
  }
  return result;
}

/// The largest value on both axes: the ideal line ends at the most ranks, and a speedup may lie above it.
double end_of_axes(const ScalingReport& report) {
  double end = 1;
  for (const ScalingPoint& point : report.points) {
    end = std::max({end, static_cast<double>(point.ranks), point.speedup});
  }
  return end;
}

std::string format_bars(const ScalingReport& report) {
  const double columns = kBarColumns / end_of_axes(report);
  std::string text = "# speedup; | is where it would be without loss\n";
  for (const ScalingPoint& point : report.points) {
    std::string bar(static_cast<size_t>(std::lround(point.speedup * columns)), '#');
    const auto ideal = static_cast<size_t>(std::lround(point.ranks * columns));
    if (bar.size() < ideal) bar.resize(ideal, ' ');
    bar.insert(ideal, "|");
    text += formatted("# %6d %s\n", point.ranks, bar.c_str());
  }
  return text;
}

}  // namespace

ScalingReport make_scaling_report(const std::vector<ScalingRuns>& all, Scaling scaling) {
  ScalingReport report{.scaling = scaling, .unit = "runs/h"};
  if (const auto marked = common_unit(all, &ScalingRun::marked)) {
    report.source = ThroughputSource::kMarked;
    report.unit = *marked;
  } else if (const auto trainer = common_unit(all, &ScalingRun::trainer)) {
    report.source = ThroughputSource::kTrainer;
    report.unit = *trainer;
  }
  for (const ScalingRuns& runs : all) {
    ScalingPoint point{.ranks = runs.ranks, .hosts = runs.hosts, .barrier_us = runs.barrier_us};
    point.seconds = median_of(runs.runs, [](const ScalingRun& run) { return run.seconds; });
    point.throughput = median_of(runs.runs, [&](const ScalingRun& run) {
      if (report.source == ThroughputSource::kMarked) return run.marked->value;
      if (report.source == ThroughputSource::kTrainer) return run.trainer->value;
      return kSecondsPerHour / run.seconds * (scaling == Scaling::kWeak ? runs.ranks : 1);
    });
    const ScalingPoint& first = report.points.empty() ? point : report.points.front();
    point.speedup = point.throughput / (first.throughput / first.ranks);
    point.efficiency = point.speedup / point.ranks;
    report.points.push_back(point);
  }
  return report;
}

std::string format_scaling(const ScalingReport& report, const BenchMachine& machine,
                           const std::vector<std::string>& command) {
  const bool over_hosts = !report.hosts.empty();
  std::string text =
      "# lockstep scaling " + machine.lockstep_version + ", torch " + machine.torch_version +
      (over_hosts ? ", hosts " + report.hosts + "\n"
                  : ", host " + machine.host + formatted(", usable cores %d\n", machine.cores));
  text += "# " + c10::Join(" ", command) + "\n# throughput in " + report.unit + ", " +
          describe_source(report) + "\n";
  if (!over_hosts && report.points.back().ranks > machine.cores) {
    text += formatted("# note: %d ranks share %d cores\n", report.points.back().ranks, machine.cores);
  }
  text += std::string("#  ranks") + (over_hosts ? "  hosts" : "") +
          "    time(s)   throughput  speedup  efficiency  barrier(us)\n";
  for (const ScalingPoint& point : report.points) {
    text += formatted("  %6d ", point.ranks) + (over_hosts ? formatted("%6d ", point.hosts) : "");
    text += formatted("%10.2f %12.5g %8.2f %9.1f %% ", point.seconds, point.throughput, point.speedup,
                      100 * point.efficiency);
    text += point.barrier_us ? formatted(" %11.2f\n", *point.barrier_us) : formatted(" %11s\n", "-");
  }
  return text + format_bars(report);
}

std::string scaling_json(const ScalingReport& report, const BenchMachine& machine,
                         const std::vector<std::string>& command) {
  const char* source = report.source == ThroughputSource::kMarked    ? "program"
                       : report.source == ThroughputSource::kTrainer ? "trainer"
                                                                     : "time";
  nlohmann::ordered_json json = {{"lockstep", machine.lockstep_version},
                                 {"torch", machine.torch_version},
                                 {"host", machine.host},
                                 {"cores", machine.cores},
                                 {"command", command},
                                 {"throughput_from", source},
                                 {"work", report.scaling == Scaling::kStrong ? "fixed" : "per-rank"},
                                 {"unit", report.unit}};
  if (!report.hosts.empty()) json["hosts"] = report.hosts;
  json["results"] = nlohmann::ordered_json::array();
  for (const ScalingPoint& point : report.points) {
    nlohmann::ordered_json entry = {{"ranks", point.ranks},     {"hosts", point.hosts},
                                    {"seconds", point.seconds}, {"throughput", point.throughput},
                                    {"speedup", point.speedup}, {"efficiency", point.efficiency}};
    entry["barrier_us"] = point.barrier_us ? nlohmann::ordered_json(*point.barrier_us) : nullptr;
    json["results"].push_back(std::move(entry));
  }
  // Words of a command line need not be UTF-8.
  return json_text(json, 2) + "\n";
}

std::string scaling_svg(const ScalingReport& report, const std::vector<std::string>& command) {
  constexpr double kLeft = 60, kTop = 40, kSide = 320;  // of the square within the axes
  const double end = end_of_axes(report);
  const auto x = [&](double ranks) { return kLeft + kSide * ranks / end; };
  const auto y = [&](double speedup) { return kTop + kSide * (1 - speedup / end); };
  std::string text =
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"440\" height=\"420\" font-family=\"sans-serif\" "
      "font-size=\"12\">\n<rect width=\"440\" height=\"420\" fill=\"white\"/>\n";
  text += "<text x=\"60\" y=\"24\">" + escaped(c10::Join(" ", command)) + "</text>\n";
  text += formatted("<path d=\"M%g %gV%gH%g\" fill=\"none\" stroke=\"black\"/>\n", kLeft, kTop, y(0), x(end));
  text += formatted("<path d=\"M%g %gL%g %g\" stroke=\"gray\" stroke-dasharray=\"4\"/>\n", x(0), y(0), x(end),
                    y(end));
  std::string line;
  for (const ScalingPoint& point : report.points) {
    line += formatted("%c%g %g", line.empty() ? 'M' : 'L', x(point.ranks), y(point.speedup));
    text += formatted("<circle cx=\"%g\" cy=\"%g\" r=\"3\" fill=\"#1f77b4\"/>\n", x(point.ranks),
                      y(point.speedup));
    text += formatted("<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">%d</text>\n", x(point.ranks), y(0) + 16,
                      point.ranks);
    text += formatted("<text x=\"%g\" y=\"%g\" text-anchor=\"end\">%.2f</text>\n", x(point.ranks) - 6,
                      y(point.speedup) - 6, point.speedup);
  }
  text += "<path d=\"" + line + "\" fill=\"none\" stroke=\"#1f77b4\" stroke-width=\"2\"/>\n";
  text += formatted("<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">ranks</text>\n", x(end / 2), y(0) + 34);
  text += formatted(
      "<text x=\"20\" y=\"%g\" text-anchor=\"middle\" transform=\"rotate(-90 20 %g)\">speedup</text>\n",
      y(end / 2), y(end / 2));
  return text + "</svg>\n";
}

}  // namespace lockstep::bench::internal
