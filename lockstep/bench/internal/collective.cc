#include <c10/util/Exception.h>

#include <lockstep/bench/bench.h>
#include <lockstep/bench/internal/collective.h>

namespace lockstep::bench::internal {

const std::vector<CollectiveInfo>& all_collectives() {
  using enum Collective;
  // name, function, out of place, in place, reduces, rooted, split, ranks
  static const std::vector<CollectiveInfo> all = {
      {kAllReduce, "all_reduce", "all_reduce", false, true, true, false, false, 1},
      {kReduce, "reduce", "reduce", false, true, true, true, false, 1},
      {kBroadcast, "broadcast", "broadcast", false, true, false, true, false, 1},
      {kAllGather, "all_gather", "all_gather_into_tensor", true, true, false, false, true, 1},
      {kReduceScatter, "reduce_scatter", "reduce_scatter_tensor", true, true, true, false, true, 1},
      {kAllToAll, "all_to_all", "all_to_all_single", true, false, false, false, true, 1},
      {kGather, "gather", "gather", true, true, false, true, true, 1},
      {kScatter, "scatter", "scatter", true, true, false, true, true, 1},
      {kSendRecv, "sendrecv", "batch_isend_irecv", true, false, false, false, false, 2},
      {kPingPong, "pingpong", "send", true, false, false, false, false, 2},
      {kBarrier, "barrier", "barrier", true, false, false, false, false, 1},
  };
  return all;
}

const CollectiveInfo& find_collective(const std::string& name) {
  for (const CollectiveInfo& info : all_collectives()) {
    if (name == info.name || name == info.function) return info;
  }
  TORCH_CHECK_VALUE(false, "there is no collective '", name, "'; known are ", known_collectives(),
                    " and all");
}

std::optional<double> bus_factor(Collective collective, int ranks) {
  const double n = ranks;
  switch (collective) {
    case Collective::kAllReduce:
      return 2 * (n - 1) / n;
    case Collective::kAllGather:
    case Collective::kReduceScatter:
    case Collective::kAllToAll:
    case Collective::kGather:
    case Collective::kScatter:
      return (n - 1) / n;
    case Collective::kReduce:
    case Collective::kBroadcast:
    case Collective::kSendRecv:
    case Collective::kPingPong:
      return 1;
    case Collective::kBarrier:
      break;
  }
  return std::nullopt;
}

BufferElements buffer_elements(const CollectiveInfo& info, Placement placement, int64_t count, int ranks) {
  const int64_t whole = info.split ? count * ranks : count;
  if (info.collective == Collective::kBarrier) return {};
  if (placement == Placement::kInPlace) return {whole, 0};
  switch (info.collective) {
    case Collective::kAllGather:
    case Collective::kGather:
      return {count, whole};
    case Collective::kReduceScatter:
    case Collective::kScatter:
      return {whole, count};
    default:
      return {whole, whole};
  }
}

}  // namespace lockstep::bench::internal

namespace lockstep::bench {

std::string known_collectives() {
  std::string names;
  for (const internal::CollectiveInfo& info : internal::all_collectives())
    names += (names.empty() ? "" : ", ") + std::string(info.name);
  return names;
}

}  // namespace lockstep::bench
