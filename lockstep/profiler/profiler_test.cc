#include <algorithm>
#include <array>
#include <csignal>
#include <fstream>
#include <future>
#include <gmock/gmock.h>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <torch/torch.h>

#include <lockstep/base/host_name.h>
#include <lockstep/flight/operation_observer.h>
#include <lockstep/profiler/profiler.h>
#include <lockstep/profiler/record_function.h>
#include <lockstep/testing/message_of.h>
#include <lockstep/testing/multi_rank.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::profiler_test {

// Not in an anonymous namespace, so that its name can be looked up in every way.
at::Tensor called_by_name(const at::Tensor& tensor);
__attribute__((noinline)) at::Tensor called_by_name(const at::Tensor& tensor) {
  return torch::mm(tensor, tensor) + 1;
}

namespace {

using nlohmann::json;
using profiler::RecordFunction;
using profiler::schedule;
using profiler::tensorboard_trace_handler;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;
using testing::run_ranks;
using testing::TemporaryFolder;

json read(const std::string& path) {
  std::ifstream file(path);
  return json::parse(file);
}

std::vector<json> events_named(const json& trace, const std::string& name) {
  std::vector<json> found;
  for (const json& event : trace["traceEvents"]) {
    if (event.value("ph", "") == "X" && event.value("name", "") == name) found.push_back(event);
  }
  return found;
}

std::map<std::string, int64_t> counts(Profiler& profile) {
  std::map<std::string, int64_t> all;
  for (const auto& average : profile.key_averages()) all[average.key] = average.count;
  return all;
}

/// What a backend tells of an operation.
uint64_t tell_operation(const std::vector<at::Tensor>& tensors, uint64_t sequence) {
  static const auto group =
      std::make_shared<const flight::ObservedGroup>(flight::ObservedGroup{"pair", {3, 5}, 1, "key-of-pair"});
  flight::ObservedOperation operation;
  operation.kind = "all_reduce";
  operation.sequence = sequence;
  operation.detail = "SUM";
  operation.inputs = operation.outputs = &tensors;
  const uint64_t id = flight::scheduled(group, operation);
  flight::started(id);
  flight::completed(id);
  return id;
}

TEST(Profiler, RecordsTheActiveStepsOfEachCycle) {
  std::vector<std::map<std::string, int64_t>> cycles;
  Profiler profile({.schedule = schedule({.wait = 1, .warmup = 1, .active = 3, .repeat = 2}),
                    .on_trace_ready = [&](Profiler& ready) { cycles.push_back(counts(ready)); }});
  for (int step = 0; step < 12; ++step) {
    torch::mm(torch::ones({2, 3}), torch::ones({3, 4}));
    profile.step();
  }
  profile.stop();
  ASSERT_EQ(cycles.size(), 2);
  for (const auto& cycle : cycles) {
    EXPECT_EQ(cycle.at("aten::mm"), 3);
    EXPECT_EQ(cycle.at("ProfilerStep*"), 3);
  }
  EXPECT_EQ(profile.step_num(), 12);
}

TEST(Profiler, WithoutAScheduleRecordsAll) {
  int ready = 0;
  Profiler profile({.on_trace_ready = [&](Profiler&) { ++ready; }});
  torch::ones({2});
  profile.step();
  torch::ones({2});
  profile.stop();
  profile.stop();
  EXPECT_EQ(ready, 1);
  EXPECT_EQ(counts(profile).at("aten::ones"), 2);
  EXPECT_FALSE(counts(profile).contains("ProfilerStep*"));
  profile.start();
  torch::ones({2});
  profile.stop();
  EXPECT_EQ(counts(profile).at("aten::ones"), 1) << "each cycle has its own";
}

TEST(Profiler, AStopInTheMiddleOfACycleSavesWhatThereIs) {
  int ready = 0;
  {
    Profiler profile({.schedule = schedule({.warmup = 1, .active = 5}), .on_trace_ready = [&](Profiler& at) {
                        ++ready;
                        EXPECT_EQ(counts(at).at("ProfilerStep*"), 2);
                      }});
    profile.step();
    profile.step();
  }
  EXPECT_EQ(ready, 1);
  ready = 0;
  {
    Profiler warm(
        {.schedule = schedule({.warmup = 2, .active = 1}), .on_trace_ready = [&](Profiler&) { ++ready; }});
  }
  EXPECT_EQ(ready, 0);
}

/// Not compared with torch (parity/profiler_test.py), which ends by SIGSEGV.
TEST(Profiler, AWarmUpMayFollowARecordThatWasNotSaved) {
  std::vector<std::map<std::string, int64_t>> cycles;
  Profiler profile({.schedule =
                        [](int64_t step) {
                          using enum profiler::ProfilerAction;
                          constexpr std::array kActions = {kRecord, kWarmup, kRecord, kRecordAndSave, kNone};
                          return kActions.at(static_cast<size_t>(step));
                        },
                    .on_trace_ready = [&](Profiler& ready) { cycles.push_back(counts(ready)); }});
  for (int step = 0; step < 4; ++step) {
    torch::ones({2});
    profile.step();
  }
  ASSERT_EQ(cycles.size(), 1);
  EXPECT_EQ(cycles[0].at("aten::ones"), 2);
}

TEST(Profiler, GoesOnAfterAHandlerThatFails) {
  int calls = 0;
  Profiler profile({.schedule = schedule({.warmup = 1, .active = 1}),
                    .on_trace_ready = [&](Profiler&) { TORCH_CHECK(++calls > 1, "no room"); }});
  profile.step();
  EXPECT_THAT(message_of<c10::Error>([&] { profile.step(); }), HasSubstr("no room"));
  profile.step();
  profile.step();
  EXPECT_EQ(calls, 2);
}

TEST(Profiler, ShapesMemoryAndFlops) {
  Profiler profile({.profile_memory = true, .with_flops = true});  // which records shapes, too
  const auto product = torch::mm(torch::ones({2, 3}), torch::ones({3, 4}));
  profile.stop();
  const auto averages = profile.key_averages({.group_by_input_shape = true});
  const auto mm =
      std::find_if(averages.begin(), averages.end(), [](const auto& one) { return one.key == "aten::mm"; });
  ASSERT_NE(mm, averages.end());
  EXPECT_EQ(*mm->input_shapes, (std::vector<std::vector<int64_t>>{{2, 3}, {3, 4}}));
  EXPECT_EQ(mm->flops, 2 * 2 * 3 * 4);
  EXPECT_EQ(mm->cpu_memory_usage, 2 * 4 * 4);
  const std::string table = averages.table({.sort_by = "self_cpu_time_total"});
  for (const char* column : {"Self CPU %", "CPU Mem", "Input Shapes", "Total FLOPs"}) {
    EXPECT_THAT(table, HasSubstr(column));
  }
}

TEST(Profiler, TheTraceHasOperationsOfAllThreads) {
  const TemporaryFolder folder;
  const std::vector<at::Tensor> tensors = {torch::ones({6}), torch::ones({4})};
  Profiler profile;
  profile.add_metadata("note", "a \"quoted\" one");
  profile.add_metadata_json("numbers", "[1, 2]");
  tell_operation(tensors, 41);
  std::thread([&] { tell_operation(tensors, 42); }).join();
  profile.stop();
  tell_operation(tensors, 43);
  profile.export_chrome_trace(folder.path("trace.json"));
  const json trace = read(folder.path("trace.json"));
  const auto operations = events_named(trace, "lockstep:all_reduce");
  ASSERT_EQ(operations.size(), 2) << "and not the one after the end";
  const json& arguments = operations[0]["args"];
  EXPECT_EQ(arguments["Seq"], 41);
  EXPECT_EQ(arguments["Process Group Name"], "pair");
  EXPECT_EQ(arguments["Process Group Key"], "key-of-pair");
  EXPECT_EQ(arguments["Process Group Ranks"], "[3,5]");
  EXPECT_EQ(arguments["Rank"], 5);
  EXPECT_EQ(arguments["In msg nelems"], 10);
  EXPECT_EQ(arguments["Bytes"], 40);
  EXPECT_EQ(arguments["dtype"], "Float");
  EXPECT_EQ(arguments["Detail"], "SUM");
  EXPECT_GE(arguments["Queued (us)"], 0);
  EXPECT_GE(operations[1]["ts"], operations[0]["ts"]);
  EXPECT_EQ(trace["note"], "a \"quoted\" one");
  EXPECT_EQ(trace["numbers"], json({1, 2}));
  EXPECT_EQ(trace["lockstep"]["pid"], ::getpid());
  EXPECT_THAT(folder.entries(), ElementsAre("trace.json"));
}

/// In a process whose flight recorder is off: there an operation has a number while it has an observer.
TEST(Profiler, WhileNothingIsRecordedNothingIsObserved) {
  run_ranks(
      1,
      [](int) {
        const std::vector<at::Tensor> tensors = {torch::ones({2})};
        const auto observed = [&] { return std::pair(at::hasCallbacks(), tell_operation(tensors, 1) != 0); };
        const std::pair nothing(false, false), all(true, true);
        EXPECT_EQ(observed(), nothing);
        {
          Profiler profile(
              {.schedule = schedule({.wait = 1, .warmup = 1, .active = 1, .repeat = 1}), .with_stack = true});
          EXPECT_EQ(observed(), nothing) << "in the step that waits";
          profile.step();
          EXPECT_EQ(observed(), nothing) << "in the warm-up";
          profile.step();
          EXPECT_EQ(observed(), all);
          profile.step();
          EXPECT_EQ(observed(), nothing) << "after the cycle";
        }
        EXPECT_EQ(observed(), nothing) << "after the profiler";
        Profiler whole;
        EXPECT_EQ(observed(), all);
        whole.stop();
        EXPECT_EQ(observed(), nothing) << "after stop()";
      },
      {.environment = {{"LOCKSTEP_FLIGHT_RECORDS", "0"}}});
}

TEST(Profiler, OtherThreadsShowTheirScopes) {
  const TemporaryFolder folder;
  Profiler profile;
  std::thread([] { RecordFunction scope("in another thread"); }).join();
  { RecordFunction scope("in this thread"); }
  profile.stop();
  EXPECT_EQ(counts(profile).at("in this thread"), 1);
  profile.export_chrome_trace(folder.path("trace.json"));
  const json trace = read(folder.path("trace.json"));
  const auto there = events_named(trace, "in another thread");
  const auto here = events_named(trace, "in this thread");
  ASSERT_EQ(there.size(), 1);
  ASSERT_EQ(here.size(), 1);
  EXPECT_NE(there[0]["tid"], here[0]["tid"]);
}

TEST(Profiler, AScopesNameMayHaveQuotes) {
  const TemporaryFolder folder;
  Profiler profile;
  { RecordFunction scope("say \"this\""); }
  std::thread([] { RecordFunction scope("say \"that\""); }).join();
  profile.stop();
  profile.export_chrome_trace(folder.path("trace.json"));
  const json trace = read(folder.path("trace.json"));
  EXPECT_EQ(events_named(trace, "say 'this'").size(), 1);
  EXPECT_EQ(events_named(trace, "say 'that'").size(), 1);
}

TEST(Profiler, StacksNameTheCallsOfTheProgram) {
  const TemporaryFolder folder;
  const auto square = torch::ones({3, 3});
  Profiler profile({.with_stack = true});
  called_by_name(square);
  torch::zeros({2});
  { const RecordFunction scope("a scope"); }
  profile.stop();
  std::optional<profiler::FunctionEvent> mm;
  for (const auto& event : profile.events()) {
    if (event.name == "aten::mm") mm = event;
    if (event.name == "a scope") {
      EXPECT_THAT(event.stack, Not(Contains(HasSubstr("RecordFunction")))) << "which is ours";
      EXPECT_THAT(event.stack, Contains(HasSubstr("main")));
    }
  }
  ASSERT_TRUE(mm);
  EXPECT_THAT(mm->stack, Contains(HasSubstr("called_by_name")));
  EXPECT_THAT(profile.key_averages({.group_by_stack_n = 4}).table(), HasSubstr("Source Location"));
  profile.export_chrome_trace(folder.path("trace.json"));
  const json trace = read(folder.path("trace.json"));
  const auto within = events_named(trace, "aten::mm"), beside = events_named(trace, "aten::zeros");
  ASSERT_EQ(within.size(), 1);
  ASSERT_EQ(beside.size(), 1);
  EXPECT_EQ(within[0]["cat"], "cpu_op");
  EXPECT_EQ(within[0]["args"]["Call stack"].get<std::string>(), c10::Join(";", mm->stack))
      << "as TensorBoard's plug-in splits it";
  EXPECT_THAT(beside[0]["args"]["Call stack"].get<std::string>(), Not(HasSubstr("called_by_name")));
}

TEST(Profiler, AForkedChildComputesAndLeavesTheTraceAlone) {
  Profiler profile({.with_stack = true});
  torch::ones({2});
  auto open = std::make_unique<RecordFunction>("open across the fork");
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    open.reset();
    torch::zeros({2});
    std::thread([] { RecordFunction scope("in a thread of the child"); }).join();
    ::_exit(0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  open.reset();
  profile.stop();
  EXPECT_EQ(counts(profile).at("aten::ones"), 1);
  EXPECT_FALSE(counts(profile).contains("aten::zeros"));
}

/// The main thread, and one that ends before.
TEST(Profiler, AProgramMayEndInTheMiddleOfARecording) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        Profiler profile({.record_shapes = true, .profile_memory = true, .with_stack = true});
        torch::ones({2});
        std::exit(3);
      },
      ::testing::ExitedWithCode(3), "");
  EXPECT_EXIT(
      {
        Profiler* left = nullptr;
        std::thread([&] {
          left = new Profiler();
          torch::ones({2});
        }).join();
        std::exit(3);
      },
      ::testing::ExitedWithCode(3), "");
}

TEST(Profiler, WhatAnotherThreadEndsIsLost) {
  std::unique_ptr<Profiler> profile;
  std::thread([&] { profile = std::make_unique<Profiler>(); }).join();
  EXPECT_THAT(message_of<c10::Error>([&] { profile->stop(); }),
              HasSubstr("in another thread than it was begun"));
  Profiler next;
  torch::ones({2});
  next.stop();
  EXPECT_EQ(counts(next).at("aten::ones"), 1);
}

/// torch would fail in the thread that has begun it.
TEST(Profiler, AThreadThatStillRecordsKeepsOthersFromIt) {
  std::unique_ptr<Profiler> profile;
  std::promise<void> begun, end;
  std::thread begins([&] {
    profile = std::make_unique<Profiler>();
    begun.set_value();
    end.get_future().wait();
  });
  begun.get_future().wait();
  EXPECT_THAT(message_of<c10::Error>([&] { profile->stop(); }),
              HasSubstr("in another thread than it was begun"));
  EXPECT_THAT(message_of<c10::Error>([] { Profiler next; }), HasSubstr("goes on until that thread ends"));
  end.set_value();
  begins.join();
  Profiler next;
  torch::ones({2});
  next.stop();
  EXPECT_EQ(counts(next).at("aten::ones"), 1);
}

TEST(Profiler, ATraceTakesNoDevicesPlaceAndMayBeExportedElsewhere) {
  const TemporaryFolder folder;
  Profiler profile;
  torch::ones({2});
  profile.stop();
  ASSERT_EQ(::mkfifo(folder.path("pipe").c_str(), 0600), 0);
  EXPECT_THAT(message_of<c10::Error>([&] { profile.export_chrome_trace(folder.path("pipe")); }),
              HasSubstr("pipe can't be written: it is no file"));
  profile.export_chrome_trace(folder.path("trace.json"));
  EXPECT_THAT(folder.entries(), ElementsAre("pipe", "trace.json"));
}

/// As by a full disk, of which Kineto does not tell.
TEST(Profiler, ATraceThatWasCutShortIsRefused) {
  const TemporaryFolder folder;
  Profiler profile;
  for (int i = 0; i < 1000; ++i) torch::ones({2});
  profile.stop();
  rlimit former{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &former), 0);
  auto* const handler = ::signal(SIGXFSZ, SIG_IGN);
  const rlimit less{.rlim_cur = 64 << 10, .rlim_max = former.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &less), 0);
  const std::string message =
      message_of<c10::Error>([&] { profile.export_chrome_trace(folder.path("trace.json.gz")); });
  EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &former), 0);
  ::signal(SIGXFSZ, handler);
  EXPECT_THAT(message, HasSubstr("was cut short"));
  EXPECT_THAT(folder.entries(), ElementsAre());
}

TEST(Profiler, TheHandlersFilesHaveTorchsNames) {
  const TemporaryFolder folder;
  const std::string below = folder.path("a/b");
  for (const auto& handler :
       {tensorboard_trace_handler(below), tensorboard_trace_handler(below, "worker", true)}) {
    Profiler profile({.on_trace_ready = handler});
    torch::ones({2});
  }
  const auto names = TemporaryFolder::entries_of(below);
  const std::string own = host_name() + "_" + std::to_string(::getpid()) + ".";
  EXPECT_THAT(names,
              Contains(::testing::AllOf(::testing::StartsWith(own), ::testing::EndsWith(".pt.trace.json"))));
  EXPECT_THAT(names, Contains(::testing::AllOf(::testing::StartsWith("worker."),
                                               ::testing::EndsWith(".pt.trace.json.gz"))));
  EXPECT_EQ(names.size(), 2);
}

TEST(Profiler, MisuseIsTold) {
  const TemporaryFolder folder;
  EXPECT_THROW(Profiler({.activities = std::set<profiler::ProfilerActivity>{}}), c10::ValueError);
  Profiler profile({.schedule = schedule({.wait = 1})});
  EXPECT_THAT(message_of<c10::Error>([&] { profile.events(); }), HasSubstr("no cycle has ended"));
  profile.stop();
  EXPECT_THAT(message_of<c10::Error>([&] { profile.step(); }), HasSubstr("after stop()"));
  Profiler first;
  EXPECT_THAT(message_of<c10::Error>([] { Profiler second; }), HasSubstr("another one records"));
  first.stop();
  EXPECT_THAT(message_of<c10::Error>([&] { first.export_chrome_trace(folder.path("none/trace.json")); }),
              HasSubstr("none/trace.json can't be written"));
  first.export_chrome_trace(folder.path("trace.json"));
  EXPECT_THAT(message_of<c10::Error>([&] { first.export_chrome_trace(folder.path("trace.json")); }),
              HasSubstr("exported already"));
  Profiler never({.schedule = schedule({.wait = 100})});
  never.step();
  never.stop();
  EXPECT_THAT(message_of<c10::Error>([&] { never.key_averages(); }), HasSubstr("none of the first 2 steps"));
}

}  // namespace
}  // namespace lockstep::profiler_test
