#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <lockstep/collectives/host_compression.h>

/// What a reduction over several hosts costs, by the algorithm between the hosts: each one's time is a sum of messages
/// and bytes at two levels, the wire between hosts and the memory within one. docs/internals/cost_model.md derives the
/// formulas and shows what they forecast. Pure functions, but for the reading of files.
namespace lockstep::hosts {

/// How the hosts' partials of a slice become one result, for H hosts and a slice of n bytes, and the order in which
/// each algorithm folds them. A reduction to a root brings the result to the root's host alone.
enum class HostAlgorithm : uint8_t {
  /// Each sends its partial to all that want the result, and each of these folds all, in host order. One step;
  /// (H−1)·n bytes in and out.
  kDirect,
  /// The slice in H parts, one for each host. Each sends each part to its host, which folds all, in host order, and
  /// then sends the result to all that want it. Two steps; 2n(H−1)/H bytes.
  kPairwise,
  /// Recursive halving, then doubling; H a power of two. Each part is folded in a tree: first pairs of hosts at
  /// distance H/2, then of those at H/4 …, the lower host's first. 2·log2(H) steps; 2n(H−1)/H bytes. Not to a root.
  kHalving,
  /// Binomial tree to host 0 (or the root's), and back to all: pairs of neighbours, then of pairs …, the lower
  /// host's first (counted from the root's on). 2·log2(H) steps, or half as many to a root, of n bytes.
  kTree,
  /// The slice in H parts: each goes round once and is folded on its way, then goes round again. Part p is folded in
  /// the order of hosts p, p+1, …, H−1, 0, …, p−1. 2(H−1) steps; 2n(H−1)/H bytes. Not to a root.
  kRing,
  /// To a root only: from host to host, from the one after the root's to the root's, folded in this order. H−1
  /// steps; n bytes in and out.
  kChain,
};
inline constexpr std::array<HostAlgorithm, 6> kHostAlgorithms = {
    HostAlgorithm::kDirect, HostAlgorithm::kPairwise, HostAlgorithm::kHalving,
    HostAlgorithm::kTree,   HostAlgorithm::kRing,     HostAlgorithm::kChain};

/// "direct", "pairwise", "halving", "tree", "ring", "chain". Static storage.
const char* to_string(HostAlgorithm algorithm);
/// Throws c10::ValueError for another name.
HostAlgorithm host_algorithm(const std::string& name);

/// Segments on their way between hosts at a time: some for the wire while one is folded.
inline constexpr size_t kSegmentsInFlight = 4;

/// How much a reduction moves, and how it is cut: into segments that follow each other, and each segment into as many
/// slices as the smallest host has members, whose messages travel beside each other.
struct HostReduction {
  int hosts = 1;
  uint64_t bytes = 0;  ///< of the tensor
  int slices = 1;
  HostCompression compression = HostCompression::kNone;
  bool to_root = false;

  /// What so many bytes of the tensor are on the wire.
  uint64_t on_wire(uint64_t part) const;
  /// Bytes of the tensor in a slice of a full segment: whole cache lines.
  uint64_t slice_bytes() const;
  uint64_t segments() const;
};

/// Whether the algorithm does it at all: with this number of hosts, to a root or for all, and encoded.
bool can_run(HostAlgorithm algorithm, const HostReduction& reduction);

/// A level's two constants.
struct LevelCost {
  double alpha = 0;  ///< seconds from the send of a short message to its receipt
  double beta = 0;   ///< seconds for each further byte
};

/// The defaults are those of a TCP wire of 10 Gbit/s and two ranks a host: alpha of the wire from a 4 KiB ping-pong of
/// UCX 1.13 on TCP between two network namespaces (17 to 19 µs one way), beta from what iperf3 got of 1 Gbit/s
/// (956 Mbit/s) times ten; within the host from our own all-reduce of two ranks (4 KiB: 1.4 µs; 100 MiB: 8.4 ms).
struct CostModel {
  LevelCost wire = {18e-6, 1 / (0.956 * 10e9 / 8)};
  LevelCost host = {0.7e-6, 8.4e-3 / (100 << 20)};

  /// The defaults with a wire of another speed.
  static CostModel of_wire(double gigabits_per_second);
};

/// Seconds of a reduction, from the call to the result; infinite if the algorithm can't run. On one host, and for
/// tensors that travel with the call, the algorithm does not matter.
double forecast(HostAlgorithm algorithm, const HostReduction& reduction, const CostModel& model);

/// The cheapest algorithm; of equals the first of kHostAlgorithms. Two rules go before the costs: encoded reductions
/// over more than two hosts are pairwise, so that no partial is rounded twice; and others are pairwise with 16 hosts at
/// most, for in a larger job so many messages to one host at a time overflow a switch. All ranks must choose alike:
/// they do with one rank's model for all.
HostAlgorithm choose(const HostReduction& reduction, const CostModel& model);

// ---- Measurements

/// One measured reduction.
struct HostMeasurement {
  HostAlgorithm algorithm = HostAlgorithm::kDirect;  // of no meaning with one host
  HostReduction reduction;
  double seconds = 0;
};

/// The model whose forecasts have the smallest relative errors, by least squares; no constant is negative. A level
/// without measurements keeps the default's: the host level takes those of one host, the wire those of several. Throws
/// c10::ValueError for a level of one size only, for which alpha and beta can't be told apart, for numbers that make no
/// sense, for an algorithm that can't have run, and without measurements.
CostModel fit(const std::vector<HostMeasurement>& measurements);

// ---- As text

/// A JSON object: {"wire": {"alpha": 1.8e-05, "beta": 8.4e-10}, "host": {…}}
std::string to_json(const CostModel& model);
/// `source` is named in errors. What is left out keeps its default. Throws c10::ValueError for anything else.
CostModel parse_cost_model(const std::string& json, const std::string& source);
/// The model in the file that the environment variable LOCKSTEP_WIRE_MODEL names, else the default. Throws
/// c10::ValueError that names the variable when the file can't be read or is malformed.
CostModel read_cost_model();

/// Of all-reduces that were not encoded: [{"algorithm": "ring", "hosts": 4, "ranks": 2, "bytes": 1048576, "seconds":
/// 0.02}, …], with the number of ranks on the smallest host (1 if left out). Throws as parse_cost_model().
std::vector<HostMeasurement> parse_measurements(const std::string& json, const std::string& source);
/// Those of a file. Also throws c10::ValueError when it can't be read or is empty.
std::vector<HostMeasurement> read_measurements(const std::string& path);

/// For docs and terminals, a Markdown table: the algorithm chosen for an all-reduce with two ranks a host, and its
/// time, by hosts and bytes. "with the call": of tensors that travel with the call.
std::string forecast_table(const CostModel& model);

}  // namespace lockstep::hosts
