#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/DeviceType.h>

/// What the profiler has recorded, event by event and added up: torch/autograd/profiler_util.py. All functions are pure;
/// values are used by one thread at a time.
namespace lockstep::profiler {

/// One call of an operator, one scope, or one kernel of a device.
struct FunctionEvent {
  uint64_t id =
      0;  ///< "External id" in the trace; an operator and the kernels that it launches have the same
  std::string name;         ///< "aten::mm"; "ProfilerStep*" for each step
  uint64_t thread = 0;      ///< torch's number of it
  uint64_t fwd_thread = 0;  ///< of a backward function: where its forward ran
  int64_t start_ns = 0;     ///< since the begin of the recording
  int64_t end_ns = 0;
  std::vector<std::vector<int64_t>> input_shapes = {};  ///< with record_shapes; empty for what is no tensor
  std::vector<std::string> stack = {};  ///< with with_stack, the innermost call first: "train.cc(31): step"
  uint8_t scope = 0;                    ///< at::RecordScope
  int64_t sequence_nr = -1;             ///< what a backward function and its forward have in common
  c10::DeviceType device_type = c10::DeviceType::CPU;
  bool is_async = false;  ///< it ended in another thread, or was marked so
  bool is_user_annotation = false;
  uint64_t flops = 0;               ///< with with_flops; 0: not known
  int64_t cpu_memory_usage = 0;     ///< bytes allocated less those freed, with profile_memory
  int64_t device_memory_usage = 0;  ///< bytes
  int64_t kernel_ns = 0;            ///< of the kernels that it has launched itself

  // Set by build_tree().
  int64_t parent = -1;  ///< index of the event in the list within which it lies; -1: none
  std::vector<int64_t> children = {};
};

/// All events with one name, and whatever else key_averages() was to tell apart. Times are in microseconds, memory in
/// bytes, both with those of what was called within (total) or without (self).
struct FunctionEventAvg {
  std::string key;
  int64_t count = 0;
  double cpu_time_total = 0;
  double self_cpu_time_total = 0;
  double device_time_total = 0;
  double self_device_time_total = 0;
  int64_t cpu_memory_usage = 0;
  int64_t self_cpu_memory_usage = 0;
  int64_t device_memory_usage = 0;
  int64_t self_device_memory_usage = 0;
  uint64_t flops = 0;
  std::optional<std::vector<std::vector<int64_t>>> input_shapes = {};  ///< where they were told apart
  std::vector<std::string> stack = {};
  c10::DeviceType device_type = c10::DeviceType::CPU;
  bool is_async = false;
  bool is_user_annotation = false;
  bool is_top_level = true;  ///< the first of them was called by no other event

  double cpu_time() const { return count == 0 ? 0 : cpu_time_total / static_cast<double>(count); }
  double device_time() const { return count == 0 ? 0 : device_time_total / static_cast<double>(count); }
};

/// What the columns of a table are to be, which depends on what was recorded.
struct TableKind {
  std::string device = {};  ///< "CUDA"; empty: none was recorded
  bool profile_memory = false;
  bool with_flops = false;
};

struct TableOptions {
  /// "cpu_time_total", "self_cpu_time_total", "cpu_time", "device_time_total" (or "cuda_time_total"),
  /// "self_device_time_total", "device_time", "cpu_memory_usage", "self_cpu_memory_usage", "device_memory_usage",
  /// "self_device_memory_usage", "count"; the largest first. Empty: in the order of the list.
  std::string sort_by = {};
  int64_t row_limit = 100;  ///< -1: all
  int64_t max_src_column_width = 75;
  int64_t max_name_column_width = 55;
  int64_t max_shapes_column_width = 80;
  std::string header = {};
  bool top_level_events_only = false;  ///< without rows whose first event was called by another one
  std::string time_unit = {};          ///< "s", "ms", "us"; empty: as fits each value
};

/// torch's EventList of key_averages().
class KeyAverages : public std::vector<FunctionEventAvg> {
 public:
  explicit KeyAverages(TableKind kind = {}) : kind_(std::move(kind)) {}

  /// For people: the text that torch prints for the same values. Throws c10::ValueError for a `sort_by` or a
  /// `time_unit` that it does not know.
  std::string table(const TableOptions& options = {}) const;
  /// The sums over all rows, with the key "Total".
  FunctionEventAvg total_average() const;
  double self_cpu_time_total() const { return total_average().self_cpu_time_total; }

 private:
  TableKind kind_;
};

struct KeyAveragesOptions {
  bool group_by_input_shape = false;  ///< wants record_shapes
  int64_t group_by_stack_n = 0;       ///< so many calls of the stack, from the innermost; wants with_stack
};

/// Events, by begin, as a tree: who called whom. Those that call nothing but another of the same name are left out, as
/// torch leaves them out; backward functions get the stack of their forward.
void build_tree(std::vector<FunctionEvent>& events);

/// `events`: as build_tree() has left them. In the order of the first event of each.
KeyAverages key_averages(const std::vector<FunctionEvent>& events, const KeyAveragesOptions& options,
                         TableKind kind);

}  // namespace lockstep::profiler
