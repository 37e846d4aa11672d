#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::bench::internal {

enum class Collective {
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kGather,
  kScatter,
  kSendRecv,
  kPingPong,
  kBarrier,
};

/// Whether the result lands in the memory of the input. A barrier, which has neither, counts as kOutOfPlace.
enum class Placement { kOutOfPlace, kInPlace };

/// What the benchmark has to know about a collective.
struct CollectiveInfo {
  Collective collective;
  const char* name;
  const char* function;  // of functional.h; accepted as a name, too
  bool out_of_place;
  bool in_place;
  bool reduces;   // takes a reduce operation
  bool rooted;    // takes a root
  bool split;     // the larger buffer holds one part of `count` elements for each rank
  int min_ranks;  // needed to run at all
};

/// All of them, in the order of the tables.
const std::vector<CollectiveInfo>& all_collectives();

/// The one of that name. Throws c10::ValueError that lists the known ones.
const CollectiveInfo& find_collective(const std::string& name);

/// What the algorithm bandwidth is multiplied with to compare with the hardware's, whatever the number of
/// ranks. nccl-tests, doc/PERFORMANCE.md. Nothing for a barrier, which moves no data.
std::optional<double> bus_factor(Collective collective, int ranks);

/// Elements that a rank needs in its two buffers for `count` elements; the same on all ranks, a root's being
/// the most.
struct BufferElements {
  int64_t first = 0;
  int64_t second = 0;
};
BufferElements buffer_elements(const CollectiveInfo& info, Placement placement, int64_t count, int ranks);

}  // namespace lockstep::bench::internal
