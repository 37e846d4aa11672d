#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string_view>
#include <unistd.h>
#include <utility>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/text/json_text.h>
#include <lockstep/profiler/internal/trace_file.h>
#include <lockstep/profiler/internal/trace_names.h>
#include <lockstep/profiler/internal/trace_output.h>

namespace lockstep::profiler::internal {
namespace {

using nlohmann::ordered_json;

/// Rows of group operations are no threads; Linux has no thread with such a number.
constexpr int64_t kFirstLane = 1'000'000'000;

/// Events as text, each followed by a comma.
class EventWriter {
 public:
  explicit EventWriter(int64_t base_ns) : base_ns_(base_ns) {}

  void name_row(int64_t row, const std::string& name) {
    const int64_t pid = ::getpid();
    add({{"ph", "M"}, {"name", "thread_name"}, {"pid", pid}, {"tid", row}, {"args", {{"name", name}}}});
    add({{"ph", "M"},
         {"name", "thread_sort_index"},
         {"pid", pid},
         {"tid", row},
         {"args", {{"sort_index", row}}}});
  }
  void add_span(const std::string& name, int64_t row, int64_t start_ns, int64_t end_ns,
                ordered_json arguments) {
    add({{"ph", "X"},
         {"cat", "user_annotation"},
         {"name", name},
         {"pid", ::getpid()},
         {"tid", row},
         {"ts", microseconds(start_ns - base_ns_)},
         {"dur", microseconds(end_ns - start_ns)},
         {"args", std::move(arguments)}});
  }
  const std::string& text() const { return text_; }

  static double microseconds(int64_t ns) { return static_cast<double>(ns) / 1000; }

 private:
  void add(const ordered_json& event) { text_ += json_text(event) + ",\n"; }

  int64_t base_ns_;
  std::string text_;
};

void add_scopes(const std::vector<ThreadScope>& scopes, EventWriter& writer) {
  std::map<int64_t, std::string> threads;
  for (const ThreadScope& scope : scopes) {
    if (threads.emplace(scope.thread, scope.thread_name).second) {
      writer.name_row(scope.thread,
                      "thread " + std::to_string(scope.thread) + " (" + scope.thread_name + ")");
    }
    writer.add_span(scope.name, scope.thread, scope.start_ns, scope.end_ns, ordered_json::object());
  }
}

/// `id`: by which TensorBoard's plug-in tells operations apart; Kineto counts those of torch from 1.
ordered_json operation_arguments(const flight::ObservedGroup& group, const LoggedOperation& operation,
                                 int64_t id) {
  // Names as those of record_param_comms, where torch has one.
  ordered_json arguments = {
      {"External id", id},
      {"Collective name", operation.kind},
      {"dtype", operation.dtype},
      {"In msg nelems", operation.input_elements},
      {"Out msg nelems", operation.output_elements},
      {"Bytes", operation.bytes},
      {"Group size", group.ranks.size()},
      {"Process Group Name", group.name},
      {kGroupKeyArgument, group.key.empty() ? group.name : group.key},
      {"Process Group Ranks", json_text<ordered_json>(group.ranks)},
      {"Rank", group.ranks.at(static_cast<size_t>(group.rank))},
      {"Seq", operation.sequence},
      {"Is P2P", operation.point_to_point},
      {"Is asynchronized op", operation.asynchronous},
      {kQueuedArgument, EventWriter::microseconds(operation.started_ns - operation.scheduled_ns)},
  };
  if (operation.peer >= 0) arguments[kPeerArgument] = group.ranks.at(static_cast<size_t>(operation.peer));
  if (operation.point_to_point) arguments["Tag"] = operation.tag;
  if (!operation.detail.empty()) arguments["Detail"] = operation.detail;
  if (!operation.where.empty()) arguments["Call"] = operation.where;
  if (!operation.purpose.empty()) arguments["Purpose"] = operation.purpose;
  if (!operation.error.empty()) arguments["Error"] = operation.error;
  return arguments;
}

/// Each group has a row; those of its operations that overlap, as messages may, are in further ones.
void add_operations(OperationLog::Content content, const std::string& prefix, EventWriter& writer) {
  std::stable_sort(
      content.operations.begin(), content.operations.end(),
      [](const LoggedOperation& a, const LoggedOperation& b) { return a.started_ns < b.started_ns; });
  struct Lane {
    int64_t row;
    int64_t end_ns;
  };
  std::vector<std::vector<Lane>> lanes(content.groups.size());
  int64_t rows = kFirstLane, id = kFirstLane;
  for (const LoggedOperation& operation : content.operations) {
    if (operation.started_ns == 0 || operation.ended_ns == 0) continue;
    const flight::ObservedGroup& group = content.groups[operation.group];
    std::vector<Lane>& of_group = lanes[operation.group];
    auto lane = std::find_if(of_group.begin(), of_group.end(),
                             [&](const Lane& one) { return one.end_ns <= operation.started_ns; });
    if (lane == of_group.end()) {
      lane = of_group.insert(lane, {rows++, 0});
      writer.name_row(lane->row, prefix + ": group " + group.name);
    }
    lane->end_ns = operation.ended_ns;
    writer.add_span(prefix + ":" + operation.kind, lane->row, operation.started_ns, operation.ended_ns,
                    operation_arguments(group, operation, id++));
  }
}

/// What Kineto writes before its first event.
struct KinetoHeader {
  std::string fields;  // up to "traceEvents"
  int64_t base_ns = 0;
};

KinetoHeader read_header(std::istream& in, const std::string& from) {
  constexpr const char* kEvents = "\"traceEvents\": [";
  constexpr const char* kBase = "\"baseTimeNanoseconds\": ";
  constexpr size_t kMost = 16 << 20;
  KinetoHeader header;
  std::string line;
  while (header.fields.size() < kMost && std::getline(in, line)) {
    if (const size_t at = line.find(kEvents); at != std::string::npos) {
      header.fields += line.substr(0, at);
      if (const size_t base = header.fields.find(kBase); base != std::string::npos) {
        const char* digits = header.fields.data() + base + std::strlen(kBase);
        std::from_chars(digits, header.fields.data() + header.fields.size(), header.base_ns);
      }
      return header;
    }
    header.fields += line + "\n";
  }
  TORCH_CHECK(false, from, " has no \"traceEvents\", so it is no trace of Kineto's");
}

/// Whether it ends as Kineto's files do, with the file's own name. Kineto does not tell when it could not write on.
bool is_whole(std::istream& in) {
  constexpr std::streamoff kMost = 16 << 10;  // of a name
  in.seekg(0, std::ios::end);
  const std::streamoff size = in.tellg();
  in.seekg(std::max<std::streamoff>(0, size - kMost));
  const std::string end(std::istreambuf_iterator<char>(in), {});
  in.clear();
  in.seekg(0);
  const size_t last = end.find_last_not_of(" \n");
  return last != std::string::npos && end[last] == '}' && end.find("\"traceName\"") != std::string::npos;
}

void copy_events(std::istream& in, TraceOutput& out) {
  std::vector<char> block(1 << 20);
  while (in.read(block.data(), static_cast<std::streamsize>(block.size())) || in.gcount() > 0) {
    out.write(block.data(), static_cast<size_t>(in.gcount()));
  }
}

/// Line by line, with each operator's stack in front of its number. Kineto has no way to tell it in all versions of torch.
void copy_events_with_stacks(std::istream& in, const std::unordered_map<uint64_t, std::string>& stacks,
                             TraceOutput& out) {
  constexpr std::string_view kCategory = "\"cat\": ", kOperator = "\"cpu_op\"", kNumber = "\"External id\": ";
  bool is_operator = false;
  for (std::string line; std::getline(in, line);) {
    if (const size_t at = line.find(kCategory); at != std::string::npos) {
      is_operator = line.compare(at + kCategory.size(), kOperator.size(), kOperator) == 0;
    }
    if (const size_t at = is_operator ? line.find(kNumber) : std::string::npos; at != std::string::npos) {
      uint64_t id = 0;
      std::from_chars(line.data() + at + kNumber.size(), line.data() + line.size(), id);
      const auto found = stacks.find(id);
      if (found != stacks.end())
        line.insert(at, "\"Call stack\": " + json_text<ordered_json>(found->second) + ", ");
    }
    out.write(line + "\n");
  }
}

}  // namespace

void write_trace(const std::string& from, const std::string& to, const TraceAdditions& additions) {
  std::ifstream in(from, std::ios::binary);
  TORCH_CHECK(in, from, " can't be read: ", std::strerror(errno));
  TORCH_CHECK(is_whole(in), from, " was cut short: is the disk full?");
  const KinetoHeader header = read_header(in, from);
  EventWriter events(header.base_ns);
  add_scopes(additions.scopes, events);
  add_operations(additions.operations, additions.collectives_as, events);
  TraceOutput out(to);
  out.write(header.fields);
  for (const auto& [key, value] : additions.metadata)
    out.write(json_text<ordered_json>(key) + ": " + value + ",\n    ");
  out.write("\"traceEvents\": [\n" + events.text());
  if (additions.stacks.empty()) {
    copy_events(in, out);
  } else {
    copy_events_with_stacks(in, additions.stacks, out);
  }
  out.commit();
}

}  // namespace lockstep::profiler::internal
