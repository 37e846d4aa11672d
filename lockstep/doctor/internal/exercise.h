#pragma once

#include <cstdint>
#include <vector>

#include <lockstep/collectives/process_group.h>

/// The operations that every test of the doctor runs, with known values, in a group of which this rank is a
/// member. Each throws c10::Error: what the operation threw, or that it gave wrong values.
namespace lockstep::doctor::internal {

/// Where a tensor lies: in ordinary memory, from which it is staged, or in memory that all ranks see.
enum class TensorMemory { kStaged, kArena };

/// Sizes on both sides of what fits into an announcement (8 KiB): 64 B, 12 KB, 1 MiB.
constexpr int64_t kExerciseSizes[] = {16, 3000, 262144};

/// An uninitialised float32 tensor.
at::Tensor make_tensor(int64_t numel, TensorMemory memory, const ProcessGroup& group);

/// all_reduce of the sum, and a broadcast from each of `roots`. `members`: the group's global ranks; `rank`:
/// this one's.
void exercise_collectives(int64_t numel, TensorMemory memory, const std::vector<int>& members, int rank,
                          const std::vector<int>& roots, const ProcessGroup& group);

/// A message each way between two ranks.
void exercise_messages(int64_t numel, int rank, int peer, const ProcessGroup& group);

}  // namespace lockstep::doctor::internal
