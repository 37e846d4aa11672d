#include <cstdint>
#include <gmock/gmock.h>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <torch/torch.h>

#include <lockstep/base/training/held_tensors.h>
#include <lockstep/profiler/profiler.h>
#include <lockstep/profiler/record_function.h>
#include <lockstep/profiler/testing/synthetic_trace.h>
#include <lockstep/profiler/trace_analysis.h>
#include <lockstep/testing/temporary_folder.h>

namespace lockstep::profiler::trace_memory_test {
namespace {

using lockstep::testing::TemporaryFolder;
using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::SyntheticTrace;

constexpr int64_t kMs = 1'000'000;

/// Two steps of one block for each use; in the second, with the state that the first has left, is the peak.
TEST(TraceMemory, MemoryPeaksTellWhatItsBlocksAreFor) {
  const TemporaryFolder folder;
  SyntheticTrace trace({.rank = 0, .world_size = 1});
  const auto add = [&](int64_t at, int64_t mebibytes, int64_t address) {
    trace.add_memory(at, mebibytes * (1 << 20), address);
  };
  for (int64_t step = 0; step < 2; ++step) {
    const int64_t begin = step * 100 * kMs;
    const auto at = [&](int64_t ms) { return begin + ms * kMs; };
    trace.add_step(step, begin, at(100));
    trace.add("user_annotation", "data", begin, at(10));
    trace.add("user_annotation", "forward", at(10), at(40));
    trace.add_operator("autograd::engine::evaluate_function: MmBackward0", at(40), at(70));
    trace.add("user_annotation", "optimizer", at(70), at(90));
    add(at(5), 1, 0x10);
    add(at(11), 2, 0x20);   // an activation
    add(at(12), 64, 0x30);  // is gone at the peak
    add(at(13), -64, 0x30);
    add(at(14), -7, 0x99);                  // from before the recording
    add(at(41), 4, 0x40);                   // a gradient
    add(at(42), 8, 0x50);                   // of backward alone
    if (step == 1) add(at(43), 128, 0x60);  // the peak
    if (step == 1) add(at(44), -128, 0x60);
    add(at(50), -2, 0x20);
    add(at(51), -8, 0x50);
    if (step == 0) add(at(71), 16, 0x70);  // the optimizer's state
    add(at(72), 32, 0x80);                 // of the optimizer alone
    add(at(73), -32, 0x80);
    add(at(95), -4, 0x40);
    add(at(96), -1, 0x10);
    if (step == 1) add(at(97), -16, 0x70);
  }
  trace.write(folder);
  const TraceAnalysis analysis = analyze_traces(folder.path().string());
  ASSERT_EQ(analysis.ranks.at(0).memory.size(), 1);
  const MemoryPeak& peak = analysis.ranks[0].memory[0];
  EXPECT_EQ(peak.device, "CPU");
  EXPECT_EQ(peak.inputs, 1 << 20);
  EXPECT_EQ(peak.activations, 2 << 20);
  EXPECT_EQ(peak.gradients, 4 << 20);
  EXPECT_EQ(peak.optimizer_state, 16 << 20);
  EXPECT_EQ(peak.temporary, (8 + 128) << 20);
  EXPECT_EQ(peak.other, 0);
  EXPECT_EQ(peak.bytes, (1 + 2 + 4 + 16 + 8 + 128) << 20);
  EXPECT_THAT(describe(analysis),
              HasSubstr("159.0 MiB (inputs 1.0 MiB, activations 2.0 MiB, gradients 4.0 MiB, "
                        "optimizer state 16.0 MiB, temporary 136.0 MiB, other 0.0 MiB)"));
  const json told = json::parse(to_json(analysis))["ranks"][0]["memory"][0];
  EXPECT_EQ(told["optimizer_state"], 16 << 20);
  EXPECT_EQ(told["temporary"], (8 + 128) << 20);
}

/// Which have blocks at the same addresses.
TEST(TraceMemory, MemoryPeaksAreOfEachDevice) {
  const TemporaryFolder folder;
  SyntheticTrace trace({.world_size = 1});
  trace.add_step(1, 0, 100 * kMs);
  trace.add("user_annotation", "forward", 0, 40 * kMs);
  trace.add_operator("autograd::engine::evaluate_function: MmBackward0", 50 * kMs, 90 * kMs);
  for (const int64_t gpu : {-1, 0, 1}) {
    const int64_t unit = int64_t{1} << (20 + gpu + 1);  // 1, 2 and 4 MiB
    trace.add_memory((10 + gpu) * kMs, unit, 0x10, gpu);
    trace.add_memory((20 + gpu) * kMs, unit, 0x20, gpu);
    trace.add_memory((30 + gpu) * kMs, -unit, 0x20, gpu);
    trace.add_memory((60 + gpu) * kMs, -unit, 0x10, gpu);
  }
  trace.write(folder);
  const TraceAnalysis analysis = analyze_traces(folder.path().string());
  const auto& memory = analysis.ranks.at(0).memory;
  ASSERT_EQ(memory.size(), 3);
  const char* const names[] = {"CPU", "CUDA 0", "CUDA 1"};
  for (size_t i = 0; i < memory.size(); ++i) {
    const int64_t unit = int64_t{1} << (20 + i);
    EXPECT_EQ(memory[i].device, names[i]);
    EXPECT_EQ(memory[i].bytes, 2 * unit);
    EXPECT_EQ(memory[i].activations, unit);
    EXPECT_EQ(memory[i].temporary, unit);
  }
  EXPECT_THAT(describe(analysis), HasSubstr("rank 0, CUDA 1: 8.0 MiB (inputs 0.0 MiB, activations 4.0 MiB"));
}

/// The cycle with the most is told, and a device of which there is nothing else.
TEST(TraceMemory, MemoryFromBeforeIsBesideThePeak) {
  const TemporaryFolder folder;
  const auto write = [&](int cycle, const nlohmann::ordered_json& held) {
    SyntheticTrace trace({.world_size = 1, .held = held});
    trace.add_operator("aten::mm", 0, kMs);
    trace.add_memory(0, 1 << 20, 0x10);
    trace.write(folder, "", cycle);
  };
  write(1, {{"CPU", {{"parameters", 4 << 20}, {"gradients", 2 << 20}, {"optimizer_state", 8 << 20}}},
            {"CUDA 1", {{"parameters", 3 << 20}}}});
  write(2, {{"CPU", {{"parameters", 4 << 20}, {"other", 1 << 30}}}});
  const TraceAnalysis analysis = analyze_traces(folder.path().string());
  const auto& memory = analysis.ranks.at(0).memory;
  ASSERT_EQ(memory.size(), 2);
  EXPECT_EQ(memory[0].bytes, 1 << 20);
  EXPECT_EQ(memory[0].held.parameters, 4 << 20);
  EXPECT_EQ(memory[0].held.total(), 14 << 20);
  EXPECT_EQ(memory[1].device, "CUDA 1");
  EXPECT_EQ(memory[1].bytes, 0);
  EXPECT_EQ(memory[1].held.total(), 3 << 20);
  EXPECT_THAT(describe(analysis),
              HasSubstr("; from before: parameters 4.0 MiB, gradients 2.0 MiB, optimizer state 8.0 MiB\n"));
  const json told = json::parse(to_json(analysis))["ranks"][0]["memory"];
  EXPECT_EQ(told[0]["held"]["optimizer_state"], 8 << 20);
  EXPECT_EQ(told[1]["held"], (json{{"parameters", 3 << 20}}));
}

TEST(TraceMemory, HeaderOfAnotherFormTellsOfNoMemory) {
  const TemporaryFolder folder;
  for (const char* held : {"7", "[]", R"({"CPU": 7})", R"({"CPU": {"parameters": "many"}})"}) {
    SyntheticTrace trace({.world_size = 1, .held = nlohmann::ordered_json::parse(held)});
    trace.add_operator("aten::mm", 0, kMs);
    trace.write(folder);
    EXPECT_THAT(analyze_traces(folder.path().string()).ranks.at(0).memory, IsEmpty()) << held;
  }
}

/// Views of one storage, storages of one memory, and what has none.
TEST(TraceMemory, MemoryFromBeforeIsCountedOnce) {
  const TemporaryFolder folder;
  const auto flat = torch::zeros({100});
  const auto alias = torch::from_blob(flat.mutable_data_ptr<float>() + 50, {60});
  const TellingHeldTensors telling([&](HeldTensors& held) {
    held.parameters = {flat.narrow(0, 0, 10), flat.narrow(0, 90, 10), alias};
    held.gradients = {torch::Tensor(), torch::empty({5}, torch::kMeta), torch::zeros({3})};
  });
  {
    Profiler profile({.activities = std::set{ProfilerActivity::kCpu},
                      .on_trace_ready = tensorboard_trace_handler(folder.path().string()),
                      .profile_memory = true});
    const auto recorded = torch::ones({2});
  }
  const HeldMemory held = analyze_traces(folder.path().string()).ranks.at(0).memory.at(0).held;
  EXPECT_EQ(held.parameters, 110 * 4);
  EXPECT_EQ(held.gradients, 3 * 4);
  EXPECT_EQ(held.optimizer_state, 0);
}

/// Operators of a GPU are launched while others' kernels communicate, and another thread gives back what nothing tells of.
TEST(TraceMemory, MemoryIsForWhatTheThreadDoesBesideCommunication) {
  const TemporaryFolder folder;
  SyntheticTrace trace({.rank = 0, .world_size = 1});
  trace.add_step(1, 0, 100 * kMs);
  trace.add("user_annotation", "forward", 0, 50 * kMs);
  trace.add_collective("all_reduce", 1, 10 * kMs, 60 * kMs);
  trace.add_operator("autograd::engine::evaluate_function: MmBackward0", 60 * kMs, 90 * kMs);
  trace.add_memory(20 * kMs, 1 << 20, 0x10);
  trace.add_memory(30 * kMs, 2 << 20, 0x20);
  trace.add_memory(40 * kMs, 4 << 20, 0x20);  // in the place of the one before
  trace.write(folder);
  const MemoryPeak peak = analyze_traces(folder.path().string()).ranks.at(0).memory.at(0);
  EXPECT_EQ(peak.activations, 5 << 20);
  EXPECT_EQ(peak.bytes, 5 << 20);
}

/// What Adam keeps for each parameter is known, and so are gradients and inputs.
TEST(TraceMemory, MemoryOfATrainingIsWhatItsTensorsTake) {
  const TemporaryFolder folder;
  const auto weight = torch::zeros({256, 256}).requires_grad_();
  const int64_t weight_bytes = 256 * 256 * 4, input_bytes = 64 * 256 * 4;
  torch::optim::Adam optimizer({weight}, torch::optim::AdamOptions(0.001));
  {
    Profiler profile({.activities = std::set{ProfilerActivity::kCpu},
                      .schedule = schedule({.active = 2, .repeat = 1}),
                      .on_trace_ready = tensorboard_trace_handler(folder.path().string()),
                      .profile_memory = true});
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      torch::Tensor input, loss;
      {
        const RecordFunction scope("data");
        input = torch::ones({64, 256});
      }
      {
        const RecordFunction scope("forward");
        loss = torch::mm(input, weight).pow(2).sum();
      }
      loss.backward();
      {
        const RecordFunction scope("optimizer");
        optimizer.step();
      }
      profile.step();
    }
  }
  const MemoryPeak peak = analyze_traces(folder.path().string()).ranks.at(0).memory.at(0);
  EXPECT_EQ(peak.optimizer_state, 2 * weight_bytes);
  EXPECT_EQ(peak.gradients, weight_bytes);
  EXPECT_EQ(peak.inputs, input_bytes);
  EXPECT_EQ(peak.other, 0);
  EXPECT_EQ(peak.bytes,
            peak.inputs + peak.activations + peak.gradients + peak.optimizer_state + peak.temporary);
}

}  // namespace
}  // namespace lockstep::profiler::trace_memory_test
