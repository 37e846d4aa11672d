#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <lockstep/profiler/internal/cover.h>
#include <lockstep/profiler/internal/held_memory.h>
#include <lockstep/profiler/internal/trace_operations.h>
#include <lockstep/profiler/internal/trace_reader.h>

namespace lockstep::profiler::internal {

enum class Phase { kData, kCommunication, kBackward, kOptimizer, kForward, kIdle };
inline constexpr size_t kPhases = 6;

/// How a step of one rank is spent; nanoseconds.
struct StepProfile {
  Span span;
  std::array<int64_t, kPhases> ns{};  // by Phase
  int64_t hidden_ns = 0;              // communication beside operators
  bool left_out = false;              // of the means
};

/// What an allocation is for, as its phase and its life tell (MemoryPeak in trace_analysis.h).
enum class MemoryUse { kInputs, kActivations, kGradients, kOptimizerState, kTemporary, kOther };
inline constexpr size_t kMemoryUses = 6;

/// The most that a device's tensors have taken beyond what they took at first; bytes.
struct PeakMemory {
  int64_t bytes = 0;
  std::array<int64_t, kMemoryUses> by_use{};
};

struct OperatorSum {
  int64_t calls = 0;
  double self_ns = 0;
};

/// One file. Times are nanoseconds since 1970 by its own clock.
struct FileProfile {
  std::string path;
  TraceOrigin origin;
  std::vector<StepProfile> steps;  // by begin
  bool has_step_marks = false;     // else the whole file is taken for one step
  Cover exposed;                   // communication without operators, within steps
  std::vector<TracedOperation> operations;
  std::map<std::string, OperatorSum> operators;  // within steps
  std::map<std::string, PeakMemory> memory;      // by device
  HeldByDevice held;                             // when it began
};

/// Reads a file and adds it up. Throws what TraceReader throws.
FileProfile profile_of(const std::string& path);

}  // namespace lockstep::profiler::internal
