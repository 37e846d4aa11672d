#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <lockstep/testing/temporary_folder.h>

namespace lockstep::profiler::testing {

/// A trace as Kineto and we write it, of which a test knows everything. Times are nanoseconds; `ahead_ns` is how far the
/// clock of the machine is wrong.
class SyntheticTrace {
 public:
  static constexpr int64_t kBaseNs = 1'790'000'000'000'000'000;
  static constexpr int64_t kThread = 77;

  struct Options {
    int64_t rank = 0;
    int64_t world_size = 2;
    std::string host = "one";
    int64_t ahead_ns = 0;
    int64_t pid = 1000;                // of rank 0; others' follow
    bool tells_rank = true;            // in the header
    bool tells_process = true;         // in the header
    bool tells_base = true;            // in the header; else times count from 1970
    nlohmann::ordered_json held = {};  // bytes from before, by device and use; null: not told
  };
  explicit SyntheticTrace(Options options) : options_(std::move(options)) {
    events_.push_back(
        {{"ph", "M"}, {"name", "process_name"}, {"pid", pid()}, {"tid", 0}, {"args", {{"name", "train"}}}});
  }

  int64_t pid() const { return options_.pid + options_.rank; }

  void add(const std::string& category, const std::string& name, int64_t begin, int64_t end,
           int64_t thread = kThread, nlohmann::ordered_json arguments = nlohmann::ordered_json::object()) {
    events_.push_back({{"ph", "X"},
                       {"cat", category},
                       {"name", name},
                       {"pid", pid()},
                       {"tid", thread},
                       {"ts", time(begin)},
                       {"dur", microseconds(end - begin)},
                       {"args", std::move(arguments)}});
  }
  void add_step(int64_t number, int64_t begin, int64_t end) {
    add("user_annotation", "ProfilerStep#" + std::to_string(number), begin, end);
  }
  void add_operator(const std::string& name, int64_t begin, int64_t end) { add("cpu_op", name, begin, end); }
  void add_collective(const std::string& kind, int64_t sequence, int64_t begin, int64_t end,
                      int64_t root = -1, const std::string& group = "world") {
    nlohmann::ordered_json arguments = operation(kind, sequence, false);
    arguments["Process Group Key"] = group;
    if (root >= 0) arguments["Peer Rank"] = root;
    add("user_annotation", "lockstep:" + kind, begin, end, 1'000'000'000, std::move(arguments));
  }
  void add_message(const std::string& kind, int64_t peer, int64_t begin, int64_t end, int64_t tag = 0) {
    nlohmann::ordered_json arguments = operation(kind, ++messages_, true);
    arguments["Peer Rank"] = peer;
    arguments["Tag"] = tag;
    add("user_annotation", "lockstep:" + kind, begin, end, 1'000'000'001, std::move(arguments));
  }
  /// On a stream of a GPU, whose number stands for a process, as in Kineto's traces. `category`: "kernel", "gpu_memcpy" or
  /// "gpu_memset".
  void add_kernel(const std::string& category, const std::string& name, int64_t begin, int64_t end,
                  int64_t device = 0) {
    events_.push_back({{"ph", "X"},
                       {"cat", category},
                       {"name", name},
                       {"pid", device},
                       {"tid", 7},
                       {"ts", time(begin)},
                       {"dur", microseconds(end - begin)},
                       {"args", {{"device", device}, {"stream", 7}}}});
  }
  /// `gpu`: its number; -1: the CPU's.
  void add_memory(int64_t at, int64_t bytes, int64_t address, int64_t gpu = -1) {
    events_.push_back(
        {{"ph", "i"},
         {"cat", "cpu_instant_event"},
         {"name", "[memory]"},
         {"pid", pid()},
         {"tid", kThread},
         {"ts", time(at)},
         {"args",
          {{"Device Type", gpu < 0 ? 0 : 1}, {"Device Id", gpu}, {"Bytes", bytes}, {"Addr", address}}}});
  }

  std::string text() const {
    nlohmann::ordered_json trace = {
        {"schemaVersion", 1},
        {"distributedInfo",
         {{"backend", "lockstep"}, {"rank", options_.rank}, {"world_size", options_.world_size}}},
        {"lockstep", {{"pid", pid()}, {"host", options_.host}, {"boot_id", "boot-" + options_.host}}},
        {"host_name", options_.host},
        {"baseTimeNanoseconds", kBaseNs},
        {"traceEvents", events_},
        {"traceName", "synthetic"}};
    if (!options_.held.is_null()) trace["lockstep"]["held"] = options_.held;
    if (!options_.tells_rank) trace.erase("distributedInfo");
    if (!options_.tells_process) trace.erase("lockstep");
    if (!options_.tells_base) trace.erase("baseTimeNanoseconds");
    return trace.dump(1);
  }
  /// `cycle`: of several of a rank.
  void write(const lockstep::testing::TemporaryFolder& folder, const std::string& below = "",
             int cycle = 1) const {
    folder.write(
        below + "rank" + std::to_string(options_.rank) + "." + std::to_string(cycle) + ".pt.trace.json",
        text());
  }

 private:
  static double microseconds(int64_t ns) { return static_cast<double>(ns) / 1000; }
  double time(int64_t ns) const {
    return microseconds(ns + options_.ahead_ns + (options_.tells_base ? 0 : kBaseNs));
  }
  nlohmann::ordered_json operation(const std::string& kind, int64_t sequence, bool point_to_point) const {
    return {{"Collective name", kind}, {"Process Group Key", "world"}, {"Rank", options_.rank},
            {"Seq", sequence},         {"Is P2P", point_to_point},     {"Queued (us)", 0.0}};
  }

  const Options options_;
  std::vector<nlohmann::ordered_json> events_;
  int64_t messages_ = 0;
};

}  // namespace lockstep::profiler::testing
