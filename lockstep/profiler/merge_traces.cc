#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>
#include <system_error>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/text/json_text.h>
#include <lockstep/base/text/printable.h>
#include <lockstep/profiler/internal/trace_operations.h>
#include <lockstep/profiler/internal/trace_output.h>
#include <lockstep/profiler/internal/trace_reader.h>
#include <lockstep/profiler/merge_traces.h>

namespace lockstep::profiler {
namespace {

using internal::OperationParts;
using internal::TracedOperation;
using internal::TraceOrigin;
using internal::TraceReader;
using nlohmann::json;

/// A file, as the first reading leaves it.
struct MergedFile {
  std::string path;
  TraceOrigin origin;
  size_t first_operation = 0;  // index of its first one in all
};

/// What the second reading needs of all files.
struct MergePlan {
  std::vector<MergedFile> files;
  std::vector<TracedOperation> operations;  // file by file, in the files' order
  std::map<std::string, flight::ClockOffset> clocks;
  std::vector<int64_t> waited_ns;  // of each operation; -1: not known
  std::vector<OperationParts> matched;
};

MergePlan read_all(const std::string& directory, int64_t& events) {
  MergePlan plan;
  json event;
  for (const std::string& path : internal::trace_files(directory)) {
    TraceReader reader(path);
    MergedFile file{path, internal::origin_of(reader), plan.operations.size()};
    while (reader.next(event)) {
      ++events;
      internal::learn_process(file.origin, event);
      if (auto operation = internal::operation_of(event, file.origin)) {
        internal::learn_rank(file.origin, operation->rank);
        plan.operations.push_back(std::move(*operation));
      }
    }
    plan.files.push_back(std::move(file));
  }
  std::vector<TraceOrigin*> origins;
  for (MergedFile& file : plan.files) origins.push_back(&file.origin);
  const std::vector<std::string> mixed = internal::complete_ranks(origins);
  TORCH_CHECK_VALUE(mixed.empty(), directory, ": ", c10::Join("; ", mixed));
  plan.clocks = internal::offsets_between(plan.operations, plan.files.front().origin.clock);
  plan.matched = internal::match_operations(plan.operations, plan.clocks);
  plan.waited_ns.assign(plan.operations.size(), -1);
  for (const OperationParts& parts : plan.matched) {
    for (const size_t part : parts.parts) {
      plan.waited_ns[part] = internal::waited_ns(parts, part, plan.operations, plan.clocks);
    }
  }
  return plan;
}

/// Events of one file on the common clock, under numbers that no other file's have.
class EventMover {
 public:
  EventMover(const MergePlan& plan, const MergedFile& file, int64_t index)
      : plan_(plan), file_(file), index_(index), operation_(file.first_operation) {
    // What a time of the file is more than on the first file's base and clock, in microseconds.
    const TraceOrigin& first = plan.files.front().origin;
    const int64_t at = internal::common_time(file.origin.clock, file.origin.base_ns, plan.clocks);
    shift_us_ = static_cast<double>(at - first.base_ns) / 1000;
  }

  /// False for what the merged trace has in other words.
  bool move(json& event) {
    if (auto operation = internal::operation_of(event, file_.origin)) add_waiting(event);
    const std::string name = internal::text_of(event, "name");
    const bool is_about = internal::text_of(event, "ph") == "M";
    const bool is_process = event.contains("pid") && event["pid"] == file_.origin.pid;
    if (is_about && is_process && (name == "process_name" || name == "process_sort_index")) return false;
    if (event.contains("pid")) event["pid"] = pid_of(event["pid"]);
    if (is_about && name == "process_name") {
      event["args"]["name"] = "rank " + std::to_string(file_.origin.rank) + ": " +
                              internal::text_of(internal::arguments_of(event), "name");
    }
    if (const auto time = event.find("ts"); time != event.end() && time->is_number()) {
      *time = time->get<double>() + shift_us_;
    }
    if (const auto id = event.find("id"); id != event.end()) {
      if (id->is_number_integer()) *id = (index_ << 32) + (id->get<int64_t>() & 0xffffffff);
      if (id->is_string()) *id = std::to_string(index_) + ":" + id->get<std::string>();
    }
    return true;
  }

  /// The process of a rank has the rank as its number; a device of it one far above, for Perfetto wants numbers.
  json pid_of(const json& pid) const {
    constexpr int64_t kDevices = 1'000'000;
    if (pid == file_.origin.pid) return file_.origin.rank;
    if (pid.is_number_integer()) {
      return kDevices * (file_.origin.rank + 1) + std::clamp<int64_t>(pid.get<int64_t>(), 0, kDevices - 1);
    }
    return "rank " + std::to_string(file_.origin.rank) + " " +
           (pid.is_string() ? pid.get<std::string>() : "");
  }

 private:
  void add_waiting(json& event) {
    const int64_t waited = plan_.waited_ns.at(operation_);
    const TracedOperation& operation = plan_.operations[operation_];
    ++operation_;
    if (waited < 0) return;
    event["args"]["Waiting (us)"] = static_cast<double>(waited) / 1000;
    event["args"]["Moving (us)"] = static_cast<double>(operation.end_ns - operation.start_ns - waited) / 1000;
  }

  const MergePlan& plan_;
  const MergedFile& file_;
  const int64_t index_;
  size_t operation_;
  double shift_us_;
};

class MergedTrace {
 public:
  explicit MergedTrace(const std::string& path) : out_(path) {}

  void begin(const json& header) {
    out_.write("{\n");
    for (const auto& [key, value] : header.items())
      out_.write(json_text<json>(key) + ": " + json_text(value) + ",\n");
    out_.write("\"traceEvents\": [");
  }
  void add(const json& event) {
    out_.write((any_ ? ",\n" : "\n") + json_text(event));
    any_ = true;
  }
  void end() {
    out_.write("\n]}\n");
    out_.commit();
  }

 private:
  internal::TraceOutput out_;
  bool any_ = false;
};

/// From where a bar begins to where another ends. Readers look for the bar around an end of an arrow, so both lie a little
/// within.
void add_arrow(const MergePlan& plan, size_t cause, size_t effect, int64_t id, MergedTrace& out) {
  constexpr int64_t kWithinNs = 500;
  const auto add = [&](size_t index, const char* phase, int64_t at) {
    const TracedOperation& operation = plan.operations[index];
    json event = {{"ph", phase},
                  {"cat", "operation"},
                  {"name", operation.kind},
                  {"id", id},
                  {"pid", operation.rank},
                  {"tid", operation.thread},
                  {"ts", static_cast<double>(at - plan.files.front().origin.base_ns) / 1000}};
    if (*phase == 'f') event["bp"] = "e";
    out.add(event);
  };
  const auto within = [&](size_t index) {
    return std::min(kWithinNs, (plan.operations[index].end_ns - plan.operations[index].start_ns) / 2);
  };
  const auto common = [&](size_t index, int64_t ns) {
    return internal::common_time(plan.operations[index].clock, ns, plan.clocks);
  };
  const int64_t from = common(cause, plan.operations[cause].start_ns + within(cause));
  add(cause, "s", from);
  add(effect, "f", std::max(from, common(effect, plan.operations[effect].end_ns - within(effect))));
}

void add_arrows(const MergePlan& plan, MergedTrace& out, MergeReport& report) {
  int64_t id = static_cast<int64_t>(plan.files.size()) << 32;  // after those of all files
  for (const OperationParts& parts : plan.matched) {
    ++(parts.point_to_point ? report.messages : report.collectives);
    for (const auto& [cause, effect] : internal::causes_of(parts, plan.operations, plan.clocks)) {
      const TracedOperation& from = plan.operations[cause];
      const TracedOperation& to = plan.operations[effect];
      if (internal::common_time(from.clock, from.start_ns, plan.clocks) >
          internal::common_time(to.clock, to.end_ns, plan.clocks)) {
        ++report.backward;
        continue;
      }
      add_arrow(plan, cause, effect, id++, out);
      ++report.arrows;
    }
  }
}

void name_rank(const MergedFile& file, MergedTrace& out) {
  const int64_t rank = file.origin.rank;
  const std::string name = "rank " + std::to_string(rank) + " (" + file.origin.host + ")";
  out.add({{"ph", "M"}, {"name", "process_name"}, {"pid", rank}, {"tid", 0}, {"args", {{"name", name}}}});
  out.add({{"ph", "M"},
           {"name", "process_sort_index"},
           {"pid", rank},
           {"tid", 0},
           {"args", {{"sort_index", rank}}}});
}

bool lies_in(const std::string& file, const std::string& directory) {
  std::error_code is_none;  // then the file can't be made
  return std::filesystem::equivalent(std::filesystem::absolute(file).parent_path(), directory, is_none);
}

void note_hosts(const MergePlan& plan, MergeReport& report) {
  std::set<std::string> clocks;
  for (const MergedFile& file : plan.files) {
    report.ranks.push_back(file.origin.rank);
    if (!clocks.insert(file.origin.clock).second) continue;
    MergeReport::Host host{.name = file.origin.host};
    const auto found = plan.clocks.find(file.origin.clock);
    host.known = found != plan.clocks.end();
    if (host.known) {
      host.clock_ahead_ns = found->second.ns;
      host.clock_error_ns = found->second.error_ns;
    }
    report.hosts.push_back(std::move(host));
  }
  std::sort(report.ranks.begin(), report.ranks.end());
  report.ranks.erase(std::unique(report.ranks.begin(), report.ranks.end()), report.ranks.end());
}

}  // namespace

MergeReport merge_traces(const std::string& directory, const std::string& output) {
  TORCH_CHECK_VALUE(
      !internal::is_called_like_a_trace(output) || !lies_in(output, directory), output,
      " is called like a rank's trace, and would be read as one; call it all.json.gz, say, or write it "
      "into another folder");
  MergeReport report;
  const MergePlan plan = read_all(directory, report.events);
  report.files = static_cast<int64_t>(plan.files.size());
  note_hosts(plan, report);
  MergedTrace out(output);
  json event;
  std::set<int64_t> named;
  for (size_t i = 0; i < plan.files.size(); ++i) {
    TraceReader reader(plan.files[i].path);
    if (i == 0) {
      json header = reader.header();
      for (const char* of_one_rank : {"distributedInfo", "lockstep", "trace_id"}) header.erase(of_one_rank);
      header["lockstep_merged_ranks"] = report.ranks;
      out.begin(header);
    }
    if (named.insert(plan.files[i].origin.rank).second) name_rank(plan.files[i], out);
    EventMover mover(plan, plan.files[i], static_cast<int64_t>(i));
    while (reader.next(event)) {
      if (mover.move(event)) out.add(event);
    }
  }
  add_arrows(plan, out, report);
  out.end();
  return report;
}

std::string describe(const MergeReport& report) {
  std::ostringstream text;
  text << report.files << " traces of " << report.ranks.size() << " ranks, " << report.events << " events; "
       << report.collectives << " collectives and " << report.messages << " messages linked by "
       << report.arrows << " arrows\n";
  if (report.backward > 0) {
    text << report.backward
         << " arrows are left out, for they would go back in time: the clocks can't be right\n";
  }
  if (report.hosts.size() < 2) return text.str();
  for (const MergeReport::Host& host : report.hosts) {
    text << "  host " << printable(host.name) << ": ";
    if (host.known) {
      text << "its clock was " << static_cast<double>(host.clock_ahead_ns) / 1000 << " us ahead, within "
           << static_cast<double>(host.clock_error_ns) / 1000 << " us\n";
    } else {
      text << "nothing tells how its clock stands to the others', so its times are taken as they are\n";
    }
  }
  return text.str();
}

}  // namespace lockstep::profiler
