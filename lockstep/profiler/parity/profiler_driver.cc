// What Python's profiler is compared with; the first argument says what:
//
//   schedule          for each line of standard input, WAIT WARMUP ACTIVE REPEAT SKIP_FIRST SKIP_FIRST_WAIT STEPS, a line
//                     with the number of the action of each step, or "error"
//   cycles            for each line of standard input, with the number of the action of each step, the scopes of each cycle
//   events            for each line of standard input, a list of events as profiler_test.py makes them, the averages and
//                     their tables with a card's columns, as JSON
//   model             a small training, as profiler_test.py does it: its averages and their tables, as JSON
//   traces DIR RANK AS
//                     two cycles of it, as the handler for TensorBoard writes them, with operations AS:all_reduce of a group
//   level             the environment variable that keeps Kineto quiet, as main() finds it
//   own DIR           steps of it, the later ones with a Profiler, whatever LOCKSTEP_PROFILE has begun before
#include <cstdint>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include <torch/torch.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/training/step_mark.h>
#include <lockstep/base/world_defaults.h>
#include <lockstep/flight/operation_observer.h>
#include <lockstep/profiler/profiler.h>
#include <lockstep/profiler/record_function.h>
#include <lockstep/testing/driver.h>

namespace profiler_driver {
namespace {

using lockstep::Profiler;
using lockstep::ProfilerOptions;
using lockstep::profiler::FunctionEvent;
using lockstep::profiler::FunctionEventAvg;
using lockstep::profiler::KeyAverages;
using lockstep::profiler::RecordFunction;
using lockstep::profiler::TableOptions;
using nlohmann::json;

void answer_schedules() {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream in(line);
    lockstep::profiler::ScheduleOptions options;
    int64_t steps = 0;
    in >> options.wait >> options.warmup >> options.active >> options.repeat >> options.skip_first >>
        options.skip_first_wait >> steps;
    try {
      const auto when = lockstep::profiler::schedule(options);
      for (int64_t step = 0; step < steps; ++step) std::cout << static_cast<int>(when(step));
    } catch (const c10::ValueError&) {
      std::cout << "error";
    }
    std::cout << "\n";
  }
}

/// The scopes of each cycle, of which each step has one.
void answer_cycles() {
  for (std::string actions; std::getline(std::cin, actions);) {
    json cycles = json::array();
    {
      Profiler profile({.activities = std::set{lockstep::profiler::ProfilerActivity::kCpu},
                        .schedule =
                            [&](int64_t step) {
                              const int action = actions.at(static_cast<size_t>(step)) - '0';
                              return static_cast<lockstep::profiler::ProfilerAction>(action);
                            },
                        .on_trace_ready =
                            [&](Profiler& ready) {
                              json scopes = json::array();
                              for (const FunctionEvent& event : ready.events()) {
                                if (event.name.starts_with("work ")) scopes.push_back(event.name);
                              }
                              cycles.push_back(scopes);
                            }});
      for (size_t step = 0; step < actions.size(); ++step) {
        if (step > 0) profile.step();
        const RecordFunction scope("work " + std::to_string(step));
      }
    }
    std::cout << cycles << "\n";
  }
}

/// The same operators as profiler_test.py's Model.
class Model {
 public:
  void step() const {
    const RecordFunction scope("step");
    auto hidden = torch::relu(torch::conv2d(images_, filters_, bias_, {1, 1}, {1, 1}, {1, 1}));
    auto output = torch::linear(hidden.flatten(1), weight_);
    auto loss = torch::cross_entropy_loss(output, labels_);
    torch::autograd::backward({loss}, {one_});
    torch::NoGradGuard guard;
    for (auto parameter : {filters_, bias_, weight_}) {
      parameter.sub_(parameter.grad(), 0.125);
      parameter.mutable_grad().zero_();
    }
  }

 private:
  static torch::Tensor numbers(std::vector<int64_t> sizes) {
    const auto count = c10::multiply_integers(sizes);
    return (torch::arange(count, torch::kFloat32) / static_cast<double>(count)).reshape(sizes);
  }

  torch::Tensor images_ = numbers({4, 3, 8, 8});
  torch::Tensor labels_ = torch::arange(4);
  torch::Tensor one_ = torch::ones({});
  torch::Tensor filters_ = numbers({5, 3, 3, 3}).requires_grad_();
  torch::Tensor bias_ = numbers({5}).requires_grad_();
  torch::Tensor weight_ = numbers({10, 320}).requires_grad_();
};

json row_of(const FunctionEventAvg& row) {
  return {{"key", row.key},
          {"count", row.count},
          {"cpu_time_total", row.cpu_time_total},
          {"self_cpu_time_total", row.self_cpu_time_total},
          {"device_time_total", row.device_time_total},
          {"self_device_time_total", row.self_device_time_total},
          {"cpu_memory_usage", row.cpu_memory_usage},
          {"self_cpu_memory_usage", row.self_cpu_memory_usage},
          {"device_memory_usage", row.device_memory_usage},
          {"self_device_memory_usage", row.self_device_memory_usage},
          {"flops", row.flops},
          {"input_shapes", row.input_shapes ? json(*row.input_shapes) : json()},
          {"is_async", row.is_async},
          {"is_top_level", row.is_top_level}};
}

json averages_of(const KeyAverages& averages) {
  json rows = json::array();
  for (const FunctionEventAvg& row : averages) rows.push_back(row_of(row));
  json tables = json::array();
  const auto add = [&](const json& arguments, const TableOptions& options) {
    tables.push_back({{"arguments", arguments}, {"text", averages.table(options)}});
  };
  add(json::object(), {});
  add({{"sort_by", "self_cpu_time_total"}, {"row_limit", 5}},
      {.sort_by = "self_cpu_time_total", .row_limit = 5});
  add({{"sort_by", "cpu_memory_usage"}, {"header", "memory"}, {"time_unit", "ms"}},
      {.sort_by = "cpu_memory_usage", .header = "memory", .time_unit = "ms"});
  add({{"sort_by", "count"}, {"max_name_column_width", 20}, {"max_shapes_column_width", 15}},
      {.sort_by = "count", .max_name_column_width = 20, .max_shapes_column_width = 15});
  add({{"sort_by", "self_cuda_time_total"}, {"top_level_events_only", true}, {"row_limit", 2}},
      {.sort_by = "self_cuda_time_total", .row_limit = 2, .top_level_events_only = true});
  add({{"sort_by", "device_memory_usage"}, {"header", "devices"}, {"top_level_events_only", true}},
      {.sort_by = "device_memory_usage", .header = "devices", .top_level_events_only = true});
  return {{"rows", rows},
          {"tables", tables},
          {"total", row_of(averages.total_average())},
          {"self_cpu_time_total", averages.self_cpu_time_total()}};
}

FunctionEvent event_of(const json& fields) {
  FunctionEvent event;
  event.name = fields.at("name").get<std::string>();
  event.thread = fields.at("thread").get<uint64_t>();
  event.start_ns = fields.at("start_us").get<int64_t>() * 1000;
  event.end_ns = fields.at("end_us").get<int64_t>() * 1000;
  event.kernel_ns = fields.at("kernel_us").get<int64_t>() * 1000;
  event.input_shapes = fields.at("input_shapes").get<std::vector<std::vector<int64_t>>>();
  if (fields.at("on_device").get<bool>()) event.device_type = c10::DeviceType::CUDA;
  event.is_async = fields.at("is_async").get<bool>();
  event.is_user_annotation = fields.at("is_user_annotation").get<bool>();
  event.flops = fields.at("flops").get<uint64_t>();
  event.cpu_memory_usage = fields.at("cpu_memory_usage").get<int64_t>();
  event.device_memory_usage = fields.at("device_memory_usage").get<int64_t>();
  return event;
}

void answer_events() {
  for (std::string line; std::getline(std::cin, line);) {
    std::vector<FunctionEvent> events;
    for (const json& fields : json::parse(line)) events.push_back(event_of(fields));
    lockstep::profiler::build_tree(events);
    json answer;
    for (const bool by_shape : {false, true}) {
      answer[by_shape ? "by shape" : "by name"] = averages_of(
          lockstep::profiler::key_averages(events, {.group_by_input_shape = by_shape},
                                           {.device = "CUDA", .profile_memory = true, .with_flops = true}));
    }
    std::cout << answer << "\n";
  }
}

ProfilerOptions all_options() {
  return {.activities = std::set{lockstep::profiler::ProfilerActivity::kCpu},
          .schedule = lockstep::profiler::schedule({.warmup = 1, .active = 2, .repeat = 1}),
          .record_shapes = true,
          .profile_memory = true,
          .with_flops = true};
}

void profile_model() {
  const Model model;
  model.step();  // the first allocates gradients
  Profiler profile(all_options());
  for (int step = 0; step < 3; ++step) {
    model.step();
    profile.step();
  }
  profile.stop();
  std::cout << json{{"by name", averages_of(profile.key_averages())},
                    {"by shape", averages_of(profile.key_averages({.group_by_input_shape = true}))}}
            << "\n";
}

void write_traces(const std::string& folder, int rank, const std::string& collectives_as) {
  const Model model;
  lockstep::set_world_defaults({.rank = rank, .world_size = 2});
  const auto group = std::make_shared<const lockstep::flight::ObservedGroup>(
      lockstep::flight::ObservedGroup{"default", {0, 1}, rank, "key"});
  const std::vector<torch::Tensor> tensors = {torch::ones({1000})};
  ProfilerOptions options = all_options();
  options.schedule = lockstep::profiler::schedule({.warmup = 1, .active = 3, .repeat = 2});
  options.on_trace_ready =
      lockstep::profiler::tensorboard_trace_handler(folder, "rank" + std::to_string(rank));
  options.collectives_as = collectives_as;
  Profiler profile(options);
  for (uint64_t step = 1; step <= 8; ++step) {
    model.step();
    lockstep::flight::ObservedOperation operation;
    operation.kind = "all_reduce";
    operation.sequence = step;
    operation.inputs = operation.outputs = &tensors;
    const uint64_t id = lockstep::flight::scheduled(group, operation);
    lockstep::flight::started(id);
    lockstep::flight::completed(id);
    profile.step();
  }
}

void profile_later_steps(const std::string& folder) {
  const Model model;
  const auto step = [&] {
    lockstep::mark_step(lockstep::StepMark::kForward, &model);
    model.step();
  };
  for (int i = 0; i < 3; ++i) step();
  Profiler profile({.on_trace_ready = lockstep::profiler::tensorboard_trace_handler(folder)});
  for (int i = 0; i < 3; ++i) step();
}

}  // namespace

LOCKSTEP_DRIVER(profiler_driver) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "schedule") {
    answer_schedules();
  } else if (what == "cycles") {
    answer_cycles();
  } else if (what == "events") {
    answer_events();
  } else if (what == "model") {
    profile_model();
  } else if (what == "traces" && argc > 4) {
    write_traces(argv[2], std::stoi(argv[3]), argv[4]);
  } else if (what == "level") {
    std::cout << lockstep::environment::text("KINETO_LOG_LEVEL").value_or("none") << "\n";
  } else if (what == "own" && argc > 2) {
    profile_later_steps(argv[2]);
  } else {
    return 2;
  }
  return 0;
}

}  // namespace profiler_driver
