#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <lockstep/base/process/memory.h>
#include <lockstep/bench/bench.h>
#include <lockstep/bench/internal/collective.h>

namespace lockstep::bench::internal {

using RedOpType = c10d::ReduceOp::RedOpType;

/// One collective in all its sizes.
struct Step {
  const CollectiveInfo* info = nullptr;
  std::vector<int64_t> counts = {};  // elements of a rank's part; one 0 for a barrier
  std::vector<Placement> placements = {};
};

/// What is going to be measured, checked and spelled out.
struct Plan {
  std::vector<Step> steps = {};
  int ranks = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::string dtype_name = {};
  RedOpType op = RedOpType::SUM;
  std::string op_name = {};
  int root = 0;
  int64_t iterations = 0;
  int64_t warmup = 0;
  int64_t min_bytes = 0;
  int64_t max_bytes = 0;
  int64_t step_factor = 0;
  MemoryKind memory = MemoryKind::kArena;
  BufferElements buffers = {};  // the largest of all steps, for each rank

  /// Bytes of all ranks' buffers together.
  int64_t memory_bytes() const;
};

/// The plan for a job of `ranks`. A pure function. Throws c10::ValueError that names the option, its value
/// and what to write instead. With no collective named, those that the other options rule out are left out;
/// a named one that is ruled out is an error.
Plan make_plan(const BenchOptions& options, int ranks);

/// Why the plan does not fit into what the machine has left, with the remedy; nothing when it does.
std::optional<std::string> memory_objection(const Plan& plan, const MemoryLimits& limits);

/// Bytes that the size column shows: of the largest buffer of a rank.
int64_t shown_bytes(const CollectiveInfo& info, int64_t count, int ranks, c10::ScalarType dtype);

}  // namespace lockstep::bench::internal
