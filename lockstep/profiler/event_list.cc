#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <tuple>

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <lockstep/base/text/formatted.h>
#include <lockstep/profiler/event_list.h>

namespace lockstep::profiler {
namespace {

bool on_cpu(const FunctionEvent& event) {
  return event.device_type == c10::DeviceType::CPU;
}

double microseconds(int64_t ns) {
  return static_cast<double>(ns) / 1000;
}

/// Who lies within whom, thread by thread. `events` are sorted by begin, the longer one first.
void find_children(std::vector<FunctionEvent>& events) {
  std::map<uint64_t, std::vector<int64_t>> open_of;  // by thread, the outermost first
  for (size_t i = 0; i < events.size(); ++i) {
    FunctionEvent& event = events[i];
    if (event.is_async || !on_cpu(event)) continue;
    std::vector<int64_t>& open = open_of[event.thread];
    while (!open.empty()) {
      FunctionEvent& outer = events[static_cast<size_t>(open.back())];
      if (event.start_ns < outer.end_ns && event.end_ns <= outer.end_ns) {
        outer.children.push_back(static_cast<int64_t>(i));
        event.parent = open.back();
        break;
      }
      open.pop_back();
    }
    open.push_back(static_cast<int64_t>(i));
  }
}

/// One that does nothing but call another of its name stands for both.
void remove_duplicates(std::vector<FunctionEvent>& events) {
  std::vector<bool> removed(events.size(), false);
  for (bool found = true; found;) {
    found = false;
    for (size_t i = 0; i < events.size(); ++i) {
      const FunctionEvent& event = events[i];
      if (removed[i] || event.parent < 0) continue;
      FunctionEvent& outer = events[static_cast<size_t>(event.parent)];
      if (outer.name != event.name || outer.children.size() != 1) continue;
      outer.children = event.children;
      outer.kernel_ns = event.kernel_ns;
      for (const int64_t child : event.children) events[static_cast<size_t>(child)].parent = event.parent;
      removed[i] = found = true;
    }
  }
  std::vector<int64_t> place(events.size());
  int64_t kept = 0;
  for (size_t i = 0; i < events.size(); ++i) place[i] = removed[i] ? -1 : kept++;
  for (size_t i = 0; i < events.size(); ++i) {
    if (removed[i]) continue;
    FunctionEvent& event = events[i];
    if (event.parent >= 0) event.parent = place[static_cast<size_t>(event.parent)];
    for (int64_t& child : event.children) child = place[static_cast<size_t>(child)];
    if (place[i] != static_cast<int64_t>(i)) events[static_cast<size_t>(place[i])] = std::move(event);
  }
  events.resize(static_cast<size_t>(kept));
}

/// The backward function within which an event lies, or that it is.
const FunctionEvent* backward_of(const std::vector<FunctionEvent>& events, const FunctionEvent& event) {
  const auto* at = &event;
  while (at->scope != static_cast<uint8_t>(at::RecordScope::BACKWARD_FUNCTION)) {
    if (at->parent < 0) return nullptr;
    at = &events[static_cast<size_t>(at->parent)];
  }
  return at;
}

void set_backward_stacks(std::vector<FunctionEvent>& events) {
  std::map<std::pair<int64_t, uint64_t>, std::vector<std::string>> forward_stacks;
  std::vector<const FunctionEvent*> backward;
  backward.reserve(events.size());
  for (const FunctionEvent& event : events) {
    backward.push_back(backward_of(events, event));
    if (backward.back() == nullptr)
      forward_stacks.try_emplace({event.sequence_nr, event.thread}, event.stack);
  }
  for (size_t i = 0; i < events.size(); ++i) {
    if (backward[i] == nullptr) continue;
    const auto found = forward_stacks.find({backward[i]->sequence_nr, backward[i]->fwd_thread});
    events[i].stack = found != forward_stacks.end() ? found->second : std::vector<std::string>{};
  }
}

/// As Python writes such a list.
std::string text_of_shapes(const std::vector<std::vector<int64_t>>& shapes) {
  std::vector<std::string> texts;
  for (const auto& shape : shapes) texts.push_back("[" + c10::Join(", ", shape) + "]");
  return "[" + c10::Join(", ", texts) + "]";
}

// --- the table

std::string text_of_time(double us, const std::string& unit) {
  if (unit == "s" || (unit.empty() && us >= 1e6)) return formatted("%.3fs", us / 1e6);
  if (unit == "ms" || (unit.empty() && us >= 1e3)) return formatted("%.3fms", us / 1e3);
  return formatted("%.3fus", us);
}

std::string text_of_share(double us, double total_us) {
  return total_us == 0 ? "NaN" : formatted("%.2f%%", us * 100 / total_us);
}

std::string text_of_memory(int64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (std::abs(value) >= 0x1p30) return formatted("%.2f GB", value / 0x1p30);
  if (std::abs(value) >= 0x1p20) return formatted("%.2f MB", value / 0x1p20);
  if (std::abs(value) >= 0x1p10) return formatted("%.2f KB", value / 0x1p10);
  return std::to_string(bytes) + " B";
}

/// The end of what is too long.
std::string trimmed_path(std::string path, size_t width) {
  if (path.size() <= width) return path;
  path.erase(0, path.size() - width);
  return path.size() > 3 ? "..." + path.substr(3) : path;
}

double sort_value(const FunctionEventAvg& event, std::string by) {
  if (const auto at = by.find("cuda"); at != std::string::npos) by.replace(at, 4, "device");
  if (by == "cpu_time_total") return event.cpu_time_total;
  if (by == "self_cpu_time_total") return event.self_cpu_time_total;
  if (by == "cpu_time") return event.cpu_time();
  if (by == "device_time_total") return event.device_time_total;
  if (by == "self_device_time_total") return event.self_device_time_total;
  if (by == "device_time") return event.device_time();
  if (by == "cpu_memory_usage") return static_cast<double>(event.cpu_memory_usage);
  if (by == "self_cpu_memory_usage") return static_cast<double>(event.self_cpu_memory_usage);
  if (by == "device_memory_usage") return static_cast<double>(event.device_memory_usage);
  if (by == "self_device_memory_usage") return static_cast<double>(event.self_device_memory_usage);
  if (by == "count") return static_cast<double>(event.count);
  TORCH_CHECK_VALUE(
      false, "sort_by is '", by,
      "'; it takes count, and cpu_time, device_time, cpu_memory_usage, device_memory_usage with "
      "what torch puts before and after them: self_cpu_time_total");
}

/// Columns of fixed widths, as Python's str.format() fills them.
class Rows {
 public:
  void add_column(std::string header, size_t width, bool left = false) {
    columns_.push_back({std::move(header), width, left});
  }
  size_t columns() const { return columns_.size(); }
  size_t line_length() const {
    return std::accumulate(columns_.begin(), columns_.end(), 2 * columns_.size() - 2,
                           [](size_t sum, const Column& column) { return sum + column.width; });
  }
  void add_line(const std::string& line) { text_ += line + "\n"; }
  void add_separator() {
    for (const Column& column : columns_) text_ += std::string(column.width, '-') + "  ";
    text_ += "\n";
  }
  void add_headers() {
    std::vector<std::string> headers;
    for (const Column& column : columns_) headers.push_back(column.header);
    add(headers);
  }
  void add(const std::vector<std::string>& values) {
    for (size_t i = 0; i < values.size(); ++i) {
      const Column& column = columns_[i];
      const std::string fill(column.width - std::min(values[i].size(), column.width), ' ');
      text_ += (column.left ? values[i] + fill : fill + values[i]) + "  ";
    }
    text_ += "\n";
  }
  const std::string& text() const { return text_; }

 private:
  struct Column {
    std::string header;
    size_t width;
    bool left;
  };
  std::vector<Column> columns_;
  std::string text_;
};

template <class Size>
size_t widest(const std::vector<FunctionEventAvg>& events, int64_t most, const Size& size) {
  size_t width = 0;
  for (const FunctionEventAvg& event : events) width = std::max(width, size(event));
  return std::min(width + 4, static_cast<size_t>(most));
}

std::string shapes_cell(const FunctionEventAvg& event) {
  return event.input_shapes ? text_of_shapes(*event.input_shapes) : "";
}

/// How numbers of operations are written.
struct FlopsUnit {
  double scale = 1;
  const char* header = nullptr;  // null: none is known
};

FlopsUnit flops_unit(const std::vector<FunctionEventAvg>& events) {
  constexpr std::array<const char*, 6> kHeaders = {"FLOPs", "KFLOPs", "MFLOPs", "GFLOPs", "TFLOPs", "PFLOPs"};
  uint64_t least = 0;
  for (const FunctionEventAvg& event : events) {
    if (event.flops > 0 && (least == 0 || event.flops < least)) least = event.flops;
  }
  if (least == 0) return {};
  const double log = std::clamp(std::log10(static_cast<double>(least)) / 3, 0.0, 5.0);
  return {std::pow(10, std::floor(log) * -3), kHeaders[static_cast<size_t>(log)]};
}

}  // namespace

void build_tree(std::vector<FunctionEvent>& events) {
  std::stable_sort(events.begin(), events.end(), [](const FunctionEvent& a, const FunctionEvent& b) {
    return std::make_tuple(a.start_ns, -a.end_ns) < std::make_tuple(b.start_ns, -b.end_ns);
  });
  find_children(events);
  remove_duplicates(events);
  set_backward_stacks(events);
}

KeyAverages key_averages(const std::vector<FunctionEvent>& events, const KeyAveragesOptions& options,
                         TableKind kind) {
  // A caller comes before those that it calls.
  std::vector<int64_t> device_ns(events.size(), 0);
  for (size_t i = events.size(); i-- > 0;) {
    const FunctionEvent& event = events[i];
    if (kind.device.empty() || event.is_async) continue;
    device_ns[i] += on_cpu(event) ? event.kernel_ns : event.end_ns - event.start_ns;
    if (event.parent >= 0) device_ns[static_cast<size_t>(event.parent)] += device_ns[i];
  }
  KeyAverages averages(std::move(kind));
  std::map<std::tuple<std::string, c10::DeviceType, bool, std::string, std::vector<std::string>>, size_t>
      places;
  for (size_t i = 0; i < events.size(); ++i) {
    const FunctionEvent& event = events[i];
    const auto calls = static_cast<std::ptrdiff_t>(
        std::min(event.stack.size(), static_cast<size_t>(std::max<int64_t>(options.group_by_stack_n, 0))));
    const std::vector<std::string> stack(event.stack.begin(), event.stack.begin() + calls);
    const auto [place, fresh] = places.try_emplace(
        {event.name, event.device_type, event.is_user_annotation,
         options.group_by_input_shape ? text_of_shapes(event.input_shapes) : std::string(), stack},
        averages.size());
    if (fresh) {
      FunctionEventAvg first;
      first.key = event.name;
      if (options.group_by_input_shape) first.input_shapes = event.input_shapes;
      first.stack = stack;
      first.device_type = event.device_type;
      first.is_async = event.is_async;
      first.is_user_annotation = event.is_user_annotation;
      first.is_top_level = event.parent < 0;
      averages.push_back(std::move(first));
    }
    FunctionEventAvg& sum = averages[place->second];
    int64_t children_ns = 0, children_device_ns = 0, children_bytes = 0, children_device_bytes = 0;
    for (const int64_t index : event.children) {
      const FunctionEvent& child = events[static_cast<size_t>(index)];
      children_ns += child.end_ns - child.start_ns;
      children_device_ns += device_ns[static_cast<size_t>(index)];
      children_bytes += child.cpu_memory_usage;
      children_device_bytes += child.device_memory_usage;
    }
    const bool synchronous = !event.is_async && on_cpu(event);
    ++sum.count;
    sum.flops += event.flops;
    sum.cpu_memory_usage += event.cpu_memory_usage;
    sum.device_memory_usage += event.device_memory_usage;
    if (on_cpu(event)) sum.cpu_time_total += microseconds(event.end_ns - event.start_ns);
    if (synchronous) {
      sum.self_cpu_time_total += microseconds(event.end_ns - event.start_ns - children_ns);
      sum.self_cpu_memory_usage += event.cpu_memory_usage - children_bytes;
      sum.self_device_memory_usage += event.device_memory_usage - children_device_bytes;
    }
    sum.device_time_total += microseconds(device_ns[i]);
    sum.self_device_time_total += microseconds(device_ns[i] - (on_cpu(event) ? children_device_ns : 0));
  }
  return averages;
}

/// After _build_table of profiler_util.py, but for a table with sources and FLOPs: there torch's rows don't fit its headers.
std::string KeyAverages::table(const TableOptions& options) const {
  if (empty()) return "";
  TORCH_CHECK_VALUE(options.time_unit.empty() || options.time_unit == "s" || options.time_unit == "ms" ||
                        options.time_unit == "us",
                    "time_unit is '", options.time_unit, "'; it takes s, ms and us");
  std::vector<FunctionEventAvg> events(*this);
  if (!options.sort_by.empty()) {
    std::stable_sort(events.begin(), events.end(), [&](const FunctionEventAvg& a, const FunctionEventAvg& b) {
      return sort_value(a, options.sort_by) > sort_value(b, options.sort_by);
    });
  }
  const auto any = [&](auto&& holds) { return std::any_of(events.begin(), events.end(), holds); };
  const bool has_device_time = any([](const auto& event) { return event.self_device_time_total > 0; });
  const bool has_device_memory =
      !kind_.device.empty() && any([](const auto& event) { return event.self_device_memory_usage > 0; });
  const bool has_shapes =
      any([](const auto& event) { return event.input_shapes && !event.input_shapes->empty(); });
  const bool has_stack = any([](const auto& event) { return !event.stack.empty(); });
  const FlopsUnit flops = kind_.with_flops ? flops_unit(events) : FlopsUnit{};

  constexpr size_t kWidth = 12;
  const auto name_width = widest(events, options.max_name_column_width,
                                 [](const FunctionEventAvg& event) { return event.key.size(); });
  const auto shapes_width = widest(events, options.max_shapes_column_width,
                                   [](const FunctionEventAvg& event) { return shapes_cell(event).size(); });
  const auto source_width = widest(events, options.max_src_column_width, [](const FunctionEventAvg& event) {
    size_t longest = 0;
    for (const std::string& entry : event.stack) longest = std::max(longest, entry.size());
    return longest;
  });
  Rows rows;
  rows.add_column("Name", name_width);
  for (const char* header : {"Self CPU %", "Self CPU", "CPU total %", "CPU total", "CPU time avg"}) {
    rows.add_column(header, kWidth);
  }
  if (has_device_time) {
    rows.add_column("Self " + kind_.device, kWidth);
    rows.add_column("Self " + kind_.device + " %", kWidth);
    rows.add_column(kind_.device + " total", kWidth);
    rows.add_column(kind_.device + " time avg", kWidth);
  }
  if (kind_.profile_memory) {
    rows.add_column("CPU Mem", kWidth);
    rows.add_column("Self CPU Mem", kWidth);
    if (has_device_memory) {
      rows.add_column(kind_.device + " Mem", kWidth);
      rows.add_column("Self " + kind_.device + " Mem", kWidth);
    }
  }
  rows.add_column("# of Calls", kWidth);
  if (has_shapes) rows.add_column("Input Shapes", shapes_width);
  if (has_stack) rows.add_column("Source Location", source_width, /*left=*/true);
  const size_t source_column = rows.columns() - 1;
  if (flops.header != nullptr) rows.add_column(std::string("Total ") + flops.header, kWidth);

  double self_cpu_total = 0, self_device_total = 0;
  for (const FunctionEventAvg& event : events) {
    self_cpu_total += event.self_cpu_time_total;
    if (event.device_type != c10::DeviceType::CPU && !event.is_user_annotation) {
      self_device_total += event.self_device_time_total;
    }
  }
  if (!options.header.empty()) {
    rows.add_line(std::string(rows.line_length(), '='));
    rows.add_line(options.header);
  }
  if (options.top_level_events_only) {
    rows.add_line(std::string(rows.line_length(), '='));
    rows.add_line("This report only display top-level ops statistics");  // torch's words
  }
  rows.add_separator();
  rows.add_headers();
  rows.add_separator();
  const auto time = [&](double us) { return text_of_time(us, options.time_unit); };
  int64_t shown = 0;
  for (const FunctionEventAvg& event : events) {
    if (shown == options.row_limit) break;
    if (options.top_level_events_only && !event.is_top_level) continue;
    ++shown;
    const auto most = static_cast<size_t>(std::max<int64_t>(options.max_name_column_width - 3, 0));
    std::vector<std::string> values = {
        event.key.size() >= most ? event.key.substr(0, most) + "..." : event.key,
        text_of_share(event.self_cpu_time_total, self_cpu_total),
        time(event.self_cpu_time_total),
        event.is_async ? "0" : text_of_share(event.cpu_time_total, self_cpu_total),
        time(event.cpu_time_total),
        time(event.cpu_time())};
    const auto add = [&values](std::string value) { values.push_back(std::move(value)); };
    if (has_device_time) {
      add(time(event.self_device_time_total));
      add(text_of_share(event.self_device_time_total, self_device_total));
      add(time(event.device_time_total));
      add(time(event.device_time()));
    }
    if (kind_.profile_memory) {
      add(text_of_memory(event.cpu_memory_usage));
      add(text_of_memory(event.self_cpu_memory_usage));
      if (has_device_memory) {
        add(text_of_memory(event.device_memory_usage));
        add(text_of_memory(event.self_device_memory_usage));
      }
    }
    add(std::to_string(event.count));
    if (has_shapes) add(shapes_cell(event).substr(0, shapes_width));
    if (has_stack) add(event.stack.empty() ? "" : trimmed_path(event.stack.front(), source_width));
    if (flops.header != nullptr) {
      add(event.flops == 0 ? "--" : formatted("%8.3f", static_cast<double>(event.flops) * flops.scale));
    }
    rows.add(values);
    if (!has_stack) continue;
    std::vector<std::string> below(rows.columns());
    for (size_t i = 1; i < event.stack.size(); ++i) {
      below[source_column] = trimmed_path(event.stack[i], source_width);
      rows.add(below);
    }
    below[source_column].clear();
    rows.add(below);
  }
  rows.add_separator();
  rows.add_line("Self CPU time total: " + time(self_cpu_total));
  if (has_device_time) rows.add_line("Self " + kind_.device + " time total: " + time(self_device_total));
  return rows.text();
}

FunctionEventAvg KeyAverages::total_average() const {
  FunctionEventAvg total;
  total.key = "Total";
  for (const FunctionEventAvg& row : *this) {
    total.count += row.count;
    total.cpu_time_total += row.cpu_time_total;
    total.self_cpu_time_total += row.self_cpu_time_total;
    total.device_time_total += row.device_time_total;
    total.self_device_time_total += row.self_device_time_total;
    total.cpu_memory_usage += row.cpu_memory_usage;
    total.self_cpu_memory_usage += row.self_cpu_memory_usage;
    total.device_memory_usage += row.device_memory_usage;
    total.self_device_memory_usage += row.self_device_memory_usage;
    total.flops += row.flops;
  }
  return total;
}

}  // namespace lockstep::profiler
