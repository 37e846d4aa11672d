// Logs to MLflow as the tests tell it: a JSON object a line on standard input, an answer a line on
// standard output.
#include <future>
#include <iostream>
#include <map>
#include <memory>
#include <string>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/training/step_mark.h>
#include <lockstep/mlflow/mlflow_writer.h>

namespace {

using lockstep::MlflowWriter;
using nlohmann::json;
using std::chrono::milliseconds;

lockstep::MlflowWriterOptions options_of(const json& command) {
  lockstep::MlflowWriterOptions options;
  // Short times: the tests wait for what happens, not for these.
  options.send_interval = milliseconds(command.value("send_interval", 20));
  options.first_retry = milliseconds(command.value("first_retry", 10));
  options.longest_retry = milliseconds(command.value("longest_retry", 100));
  options.timeout = milliseconds(command.value("timeout", 10'000));
  options.close_timeout = milliseconds(command.value("close_timeout", 30'000));
  options.tracking_uri = command.value("tracking_uri", "");
  options.experiment_name = command.value("experiment_name", "");
  options.run_name = command.value("run_name", "");
  options.run_id = command.value("run_id", "");
  options.parent_run_id = command.value("parent_run_id", "");
  options.tags = command.value("tags", std::map<std::string, std::string>());
  options.spool_directory = command.value("spool_directory", "");
  return options;
}

/// {"x": 0.5, "y": "nan"}
lockstep::Metrics metrics_of(const json& values) {
  lockstep::Metrics metrics;
  for (const auto& [name, value] : values.items()) {
    metrics[name] = value.is_string() ? std::stod(value.get<std::string>()) : value.get<double>();
  }
  return metrics;
}

lockstep::Hyperparameters hyperparameters_of(const json& values) {
  lockstep::Hyperparameters result;
  for (const auto& [name, value] : values.items()) {
    if (value.is_boolean()) {
      result[name] = value.get<bool>();
    } else if (value.is_number_integer()) {
      result[name] = value.get<int64_t>();
    } else if (value.is_number()) {
      result[name] = value.get<double>();
    } else {
      result[name] = value.get<std::string>();
    }
  }
  return result;
}

std::future<void> finalizing;  // in a thread, beside further commands

json answer(std::map<std::string, std::unique_ptr<MlflowWriter>>& writers, const json& command) {
  const std::string what = command.at("do");
  if (what == "send_spooled") {
    const auto done = MlflowWriter::send_spooled(options_of(command));
    return {{"sent", done.sent}, {"left", done.left}};
  }
  if (what == "step") {  // of a training begins, for LOCKSTEP_PROFILE
    lockstep::mark_step(lockstep::StepMark::kForward, &writers);
    return json::object();
  }
  auto& writer = writers[command.value("writer", "")];
  if (what == "open") {
    writer = std::make_unique<MlflowWriter>(options_of(command));
  } else if (what == "metrics") {
    writer->log_metrics(metrics_of(command.at("metrics")), command.at("step"));
  } else if (what == "many") {  // "count" metrics of one name, from step 0 on
    for (int64_t step = 0; step < command.at("count"); ++step) {
      writer->log_metrics({{command.at("name"), static_cast<double>(step) / 2}}, step);
    }
  } else if (what == "params") {
    writer->log_hyperparameters(hyperparameters_of(command.at("params")));
  } else if (what == "tag") {
    writer->set_tag(command.at("key"), command.at("value"));
  } else if (what == "artifact") {
    writer->log_artifact(command.at("file").get<std::string>(), command.value("folder", ""));
  } else if (what == "flush") {
    writer->flush();
  } else if (what == "wait") {
    return {{"sent", writer->wait_until_sent(milliseconds(60'000))}, {"run_id", writer->run_id()}};
  } else if (what == "finalize") {
    writer->finalize(command.value("status", "finished"));
  } else if (what == "begin_to_finalize") {
    finalizing = std::async(std::launch::async, [&writer = *writer] { writer.finalize("finished"); });
  } else if (what == "await_finalize") {
    finalizing.get();
  } else if (what == "close") {
    writer.reset();
  } else if (what == "state") {
    const auto counts = writer->counts();
    return {{"run_id", writer->run_id()},  {"sent", counts.sent},
            {"rejected", counts.rejected}, {"failures", counts.failures},
            {"lost", counts.lost},         {"spool_file", writer->spool_file().string()}};
  } else {
    return {{"error", "unknown command: " + what}};
  }
  return json::object();
}

}  // namespace

int main() {
  std::map<std::string, std::unique_ptr<MlflowWriter>> writers;
  for (std::string line; std::getline(std::cin, line);) {
    json result;
    try {
      result = answer(writers, json::parse(line));
    } catch (const c10::Error& error) {
      result = {{"error", error.what_without_backtrace()}};
    } catch (const std::exception& error) {
      result = {{"error", error.what()}};
    }
    std::cout << result.dump() << std::endl;
  }
}
