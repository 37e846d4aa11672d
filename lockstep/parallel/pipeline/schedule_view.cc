#include <algorithm>
#include <iomanip>
#include <sstream>

#include <nlohmann/json.hpp>

#include <lockstep/base/text/counted.h>
#include <lockstep/base/text/formatted.h>
#include <lockstep/parallel/pipeline/schedule_times.h>
#include <lockstep/parallel/pipeline/schedule_view.h>

namespace lockstep::pipeline {
namespace {

struct View {
  PipelineTable table;
  PipelineTimes times;

  View(PipelineSchedule schedule, const PipelineShape& shape)
      : table(pipeline_table(schedule, shape)), times(pipeline_times(table)) {}
};

std::string title(PipelineSchedule schedule, const PipelineShape& shape) {
  std::ostringstream text;
  text << to_string(schedule) << ": " << counted(shape.ranks, "rank");
  if (shape.stages_per_rank > 1) text << " with " << shape.stages_per_rank << " stages each";
  text << ", " << shape.micro_batches << (shape.micro_batches == 1 ? " micro-batch" : " micro-batches");
  return text.str();
}

std::string percent(double share) {
  return formatted("%.1f %%", 100 * share);
}

const char* colour(ComputationType type) {
  switch (type) {
    case ComputationType::kForward:
      return "#9cc3ea";
    case ComputationType::kFullBackward:
      return "#b6dba5";
    case ComputationType::kBackwardInput:
      return "#efd28a";
    case ComputationType::kBackwardWeight:
      return "#c5aee0";
  }
  return "#fff";
}

}  // namespace

std::string describe(PipelineSchedule schedule, const PipelineShape& shape) {
  const View view(schedule, shape);
  const auto last = to_string(
      {shape.ranks * shape.stages_per_rank - 1, ComputationType::kForward, shape.micro_batches - 1});
  const int width = static_cast<int>(last.size()) + 1;
  const int rank_width = static_cast<int>(std::to_string(shape.ranks - 1).size());
  std::ostringstream text;
  text << title(schedule, shape) << '\n';
  text << "idle: " << percent(view.times.bubble)
       << " of the ranks' time, if forward takes 1, backward 1 for the inputs "
       << "and 1 for the weights, and messages nothing\n\n";
  for (size_t rank = 0; rank < view.times.ranks.size(); ++rank) {
    text << "rank " << std::left << std::setw(rank_width) << rank << "  ";
    double now = 0;
    const auto fill = [&](double until, const char* sign) {
      for (; now + 0.5 < until; now += 1) text << std::setw(width) << sign;
    };
    for (const auto& [action, begin, end] : view.times.ranks[rank]) {
      fill(begin, ".");
      text << std::setw(width) << to_string(action);
      now += 1;
      fill(end, "=");
    }
    fill(view.times.end, ".");
    const int64_t peak = peak_activations(view.table, static_cast<int64_t>(rank));
    text << " keeps " << counted(peak, "activation") << "\n";
  }
  return text.str();
}

std::string to_json(PipelineSchedule schedule, const PipelineShape& shape) {
  const View view(schedule, shape);
  auto rows = nlohmann::ordered_json::array();
  for (size_t rank = 0; rank < view.times.ranks.size(); ++rank) {
    auto actions = nlohmann::ordered_json::array();
    for (const auto& [action, begin, end] : view.times.ranks[rank]) {
      actions.push_back({{"stage", action.stage},
                         {"type", to_string(action.type)},
                         {"micro_batch", action.micro_batch},
                         {"begin", begin},
                         {"end", end}});
    }
    rows.push_back({{"rank", rank},
                    {"peak_activations", peak_activations(view.table, static_cast<int64_t>(rank))},
                    {"actions", std::move(actions)}});
  }
  const nlohmann::ordered_json answer = {{"schedule", to_string(schedule)},
                                         {"ranks", shape.ranks},
                                         {"stages_per_rank", shape.stages_per_rank},
                                         {"micro_batches", shape.micro_batches},
                                         {"bubble", view.times.bubble},
                                         {"end", view.times.end},
                                         {"rows", std::move(rows)}};
  return answer.dump(2) + "\n";
}

std::string to_svg(PipelineSchedule schedule, const PipelineShape& shape) {
  const View view(schedule, shape);
  constexpr double kLeft = 64, kTop = 34, kRow = 30;
  const double unit = std::clamp(960 / view.times.end, 18.0, 40.0);
  const double width = kLeft + unit * view.times.end + 12;
  const double bottom = kTop + kRow * static_cast<double>(shape.ranks);
  std::ostringstream svg;
  svg << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << width << ' ' << bottom + 30
      << "\" width=\"" << width << "\" height=\"" << bottom + 30
      << "\" font-family=\"sans-serif\" font-size=\"11\" fill=\"#222\">\n"
      << "<title>" << title(schedule, shape)
      << "</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
      << "<text x=\"12\" y=\"20\" font-weight=\"bold\">" << title(schedule, shape) << "; idle "
      << percent(view.times.bubble) << "</text>\n";
  for (size_t rank = 0; rank < view.times.ranks.size(); ++rank) {
    const double y = kTop + kRow * static_cast<double>(rank);
    svg << "<text x=\"12\" y=\"" << y + 18 << "\">rank " << rank << "</text>\n<rect x=\"" << kLeft
        << "\" y=\"" << y << "\" width=\"" << unit * view.times.end << "\" height=\"" << kRow - 4
        << "\" fill=\"#f3f3f3\"/>\n";
    for (const auto& [action, begin, end] : view.times.ranks[rank]) {
      const double x = kLeft + unit * begin;
      const double length = unit * (end - begin);

      std::string label = std::to_string(action.micro_batch);
      if (shape.stages_per_rank > 1) label = std::to_string(action.stage) + "·" + label;
      svg << "<g><title>" << to_string(action) << "</title><rect x=\"" << x << "\" y=\"" << y << "\" width=\""
          << length << "\" height=\"" << kRow - 4 << "\" fill=\"" << colour(action.type)
          << "\" stroke=\"#888\"/><text x=\"" << x + length / 2 << "\" y=\"" << y + 17
          << "\" text-anchor=\"middle\" font-size=\"" << (label.size() > 3 ? 9 : 11) << "\">" << label
          << "</text></g>\n";
    }
  }
  double x = kLeft;
  const bool splits = schedule == PipelineSchedule::kInterleavedZeroBubble;
  const auto key = [&](ComputationType type, const char* words) {
    svg << "<rect x=\"" << x << "\" y=\"" << bottom + 8 << "\" width=\"12\" height=\"12\" fill=\""
        << colour(type) << "\" stroke=\"#888\"/><text x=\"" << x + 18 << "\" y=\"" << bottom + 18 << "\">"
        << words << "</text>\n";
    x += 34 + 6.2 * static_cast<double>(std::string_view(words).size());
  };
  key(ComputationType::kForward, "forward");
  if (splits) {
    key(ComputationType::kBackwardInput, "backward, inputs");
    key(ComputationType::kBackwardWeight, "backward, weights");
  } else {
    key(ComputationType::kFullBackward, "backward");
  }
  svg << "<text x=\"" << x << "\" y=\"" << bottom + 18 << "\" fill=\"#666\">"
      << (shape.stages_per_rank > 1 ? "numbers: stage·micro-batch" : "numbers: micro-batch")
      << "</text>\n</svg>\n";
  return svg.str();
}

}  // namespace lockstep::pipeline
