#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>
#include <iomanip>
#include <iterator>
#include <limits>
#include <sstream>

#include <c10/util/Exception.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/environment.h>
#include <lockstep/base/text/json_value.h>
#include <lockstep/collectives/algorithms/hosts/leaders_gather.h>
#include <lockstep/collectives/algorithms/staging.h>
#include <lockstep/collectives/hosts/cost_model.h>
#include <lockstep/collectives/kernels/wire_codec.h>

namespace lockstep::hosts {
namespace {

namespace algorithms = collectives::internal::algorithms;

constexpr const char* kWireModelVariable = "LOCKSTEP_WIRE_MODEL";
constexpr std::array<const char*, kHostAlgorithms.size()> kAlgorithmNames = {"direct", "pairwise", "halving",
                                                                             "tree",   "ring",     "chain"};

/// A tensor has so many segments at least, so that the phases overlap, unless its slices would be smaller than this on
/// the wire.
constexpr uint64_t kSegmentsWanted = 8;
constexpr uint64_t kSmallestSlice = uint64_t{64} << 10;
/// Within a host; a rank's scratch has a few of them.
constexpr uint64_t kLargestSegment = uint64_t{8} << 20;
/// Algorithms of many steps send a slice in parts: it may be so many chunks.
constexpr int kChunksInSlice = 4;
/// Beyond this each host would have messages from too many others at a time.
constexpr int kPairwiseHosts = 16;

/// Of alpha that sends of one round can't overlap: what sending and receiving a message costs the processor.
constexpr double kSerialPart = 0.5;

/// A level's time is messages · alpha + bytes · beta.
struct Traffic {
  double messages = 0;
  double bytes = 0;

  void add(const Traffic& other, double times) {
    messages += other.messages * times;
    bytes += other.bytes * times;
  }
  double seconds(const LevelCost& level) const { return messages * level.alpha + bytes * level.beta; }
};

/// The reduce-scatter and the all-gather of a host's ranks; their number is part of the constants.
Traffic on_host(uint64_t bytes) {
  return {2, static_cast<double>(bytes)};
}

/// The first step, which tells who called what, with a tensor that fits into it.
Traffic agreement(int hosts, uint64_t bytes) {
  const double others = hosts - 1;
  const bool direct = hosts <= algorithms::hosts::LeadersGather::kDirectLeaders;
  return {direct ? 1 + (others - 1) * kSerialPart : std::bit_width(static_cast<unsigned>(hosts - 1)),
          others * static_cast<double>(bytes)};
}

/// Until the first segment, of `size` bytes, is through.
Traffic first_segment(HostAlgorithm algorithm, const HostReduction& reduction, double size) {
  const double others = reduction.hosts - 1;
  const double rounds = std::bit_width(static_cast<unsigned>(reduction.hosts - 1));
  const double in_parts = 2 * size * others / reduction.hosts;
  switch (algorithm) {
    case HostAlgorithm::kDirect:
      return {1 + (others - 1) * kSerialPart, others * size};
    case HostAlgorithm::kPairwise:
      return {2 * (1 + (others - 1) * kSerialPart), in_parts};
    case HostAlgorithm::kHalving:
      return {2 * rounds, in_parts};
    case HostAlgorithm::kTree: {
      const double steps = reduction.to_root ? rounds : 2 * rounds;
      return {steps, steps * size};
    }
    case HostAlgorithm::kRing:
      return {2 * others, in_parts};
    case HostAlgorithm::kChain:
      return {others, others * size};
  }
  return {};
}

/// What each further one adds: the messages and bytes of the host that has most. Only in a long chain hosts wait for
/// segments, for few are on their way.
Traffic further_segment(HostAlgorithm algorithm, const HostReduction& reduction, double size) {
  const double others = reduction.hosts - 1;
  const double rounds = std::bit_width(static_cast<unsigned>(reduction.hosts - 1));
  const double in_parts = 2 * size * others / reduction.hosts;
  switch (algorithm) {
    case HostAlgorithm::kDirect:
      return {others * kSerialPart, others * size};
    case HostAlgorithm::kPairwise:
    case HostAlgorithm::kRing:
      return {2 * others * kSerialPart, in_parts};
    case HostAlgorithm::kHalving:
      return {2 * rounds * kSerialPart, in_parts};
    case HostAlgorithm::kTree:
      return {(reduction.to_root ? rounds : 2 * rounds) * kSerialPart, rounds * size};
    case HostAlgorithm::kChain: {
      const double turns = others / kSegmentsInFlight;
      return turns > 1 ? Traffic{turns, turns * size} : Traffic{kSerialPart, size};
    }
  }
  return {};
}

bool travels_with_the_call(const HostReduction& reduction) {
  return reduction.bytes <= transport::layout::kPayloadBytes;
}

Traffic between_hosts(HostAlgorithm algorithm, const HostReduction& reduction) {
  if (reduction.hosts == 1) return {};
  if (travels_with_the_call(reduction)) return agreement(reduction.hosts, reduction.bytes);
  const auto segments = static_cast<double>(reduction.segments());
  const double size = static_cast<double>(reduction.on_wire(reduction.bytes)) / segments;
  Traffic all = agreement(reduction.hosts, 0);
  all.add(first_segment(algorithm, reduction, size), 1);
  all.add(further_segment(algorithm, reduction, size), segments - 1);
  return all;
}

/// The sums of least squares for messages · alpha + bytes · beta = seconds, each row divided by its seconds so that the
/// errors are relative.
class LevelFit {
 public:
  void add(const Traffic& traffic, double seconds, double scale) {
    const double messages = traffic.messages / scale, bytes = traffic.bytes / scale, time = seconds / scale;
    mm_ += messages * messages;
    mb_ += messages * bytes;
    bb_ += bytes * bytes;
    mt_ += messages * time;
    bt_ += bytes * time;
    const double size = traffic.bytes / traffic.messages;
    smallest_ = std::min(smallest_, size);
    largest_ = std::max(largest_, size);
  }
  bool empty() const { return mm_ == 0; }

  LevelCost solve(const char* level) const {
    TORCH_CHECK_VALUE(largest_ > smallest_, "the measurements of the ", level,
                      " are of one size: its alpha and beta need two sizes at least");
    const double determinant = mm_ * bb_ - mb_ * mb_;
    const LevelCost both{(mt_ * bb_ - bt_ * mb_) / determinant, (mm_ * bt_ - mb_ * mt_) / determinant};
    if (both.alpha >= 0 && both.beta >= 0) return both;
    // The best point within the quadrant is then on one of its edges.
    const LevelCost latency{std::max(0.0, mt_ / mm_), 0}, bandwidth{0, std::max(0.0, bt_ / bb_)};
    return gain(latency) > gain(bandwidth) ? latency : bandwidth;
  }

 private:
  /// By how much the squares sum to less than without any cost.
  double gain(const LevelCost& cost) const {
    return 2 * (cost.alpha * mt_ + cost.beta * bt_) - cost.alpha * cost.alpha * mm_ -
           2 * cost.alpha * cost.beta * mb_ - cost.beta * cost.beta * bb_;
  }

  double mm_ = 0, mb_ = 0, bb_ = 0, mt_ = 0, bt_ = 0;
  double smallest_ = std::numeric_limits<double>::infinity();
  double largest_ = 0;
};

/// What nlohmann::json throws, as an error about `source`.
template <class Action>
auto with_source(const std::string& source, Action&& action) {
  try {
    return action();
  } catch (const nlohmann::json::exception& error) {
    TORCH_CHECK_VALUE(false, source, ": ", error.what());
  }
}

/// Empty where the file can't be read.
std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

LevelCost parse_level(const nlohmann::json& json, const char* name, LevelCost level,
                      const std::string& source) {
  const auto found = json.find(name);
  if (found == json.end()) return level;
  for (const auto& [key, value] : found->items()) {
    TORCH_CHECK_VALUE(key == "alpha" || key == "beta", source, ": \"", name, "\" has a \"", key,
                      "\"; it may have alpha and beta");
    const auto number = value.get<double>();
    TORCH_CHECK_VALUE(number >= 0 && std::isfinite(number), source, ": ", key, " of \"", name, "\" is ",
                      number, "; it must be 0 or more");
    (key == "alpha" ? level.alpha : level.beta) = number;
  }
  return level;
}

std::string text_of_seconds(double seconds) {
  std::ostringstream text;
  text << std::setprecision(3);
  if (seconds < 1e-3) {
    text << seconds * 1e6 << " µs";
  } else if (seconds < 1) {
    text << seconds * 1e3 << " ms";
  } else {
    text << seconds << " s";
  }
  return text.str();
}

std::string text_of_size(uint64_t bytes) {
  return bytes >= (1 << 20) ? c10::str(bytes >> 20, " MiB") : c10::str(bytes >> 10, " KiB");
}

}  // namespace

const char* to_string(HostAlgorithm algorithm) {
  return kAlgorithmNames.at(static_cast<size_t>(algorithm));
}

HostAlgorithm host_algorithm(const std::string& name) {
  const auto* found = std::find(kAlgorithmNames.begin(), kAlgorithmNames.end(), name);
  TORCH_CHECK_VALUE(found != kAlgorithmNames.end(), "there is no algorithm '", name,
                    "' between hosts; there are direct, pairwise, halving, tree, ring and chain");
  return kHostAlgorithms[static_cast<size_t>(found - kAlgorithmNames.begin())];
}

uint64_t HostReduction::on_wire(uint64_t part) const {
  return compression == HostCompression::kNone ? part : encoded_bytes(compression, part / sizeof(float));
}

uint64_t HostReduction::slice_bytes() const {
  const uint64_t whole = std::max<uint64_t>(1, on_wire(bytes));
  const uint64_t most =
      algorithms::chunk_bytes() * static_cast<uint64_t>(std::clamp(hosts - 1, 1, kChunksInSlice));
  const uint64_t sent = std::clamp(whole / (kSegmentsWanted * slices), std::min(most, kSmallestSlice), most);
  const uint64_t kept = std::min(sent * bytes / whole, kLargestSegment / slices);
  return std::max<uint64_t>(algorithms::kCacheLine, kept / algorithms::kCacheLine * algorithms::kCacheLine);
}

uint64_t HostReduction::segments() const {
  const uint64_t segment = slice_bytes() * slices;
  return std::max<uint64_t>(1, (bytes + segment - 1) / segment);
}

bool can_run(HostAlgorithm algorithm, const HostReduction& reduction) {
  const bool encoded = reduction.compression != HostCompression::kNone;
  switch (algorithm) {
    case HostAlgorithm::kDirect:
    case HostAlgorithm::kPairwise:
      return true;
    case HostAlgorithm::kHalving:
      return !encoded && !reduction.to_root && std::has_single_bit(static_cast<unsigned>(reduction.hosts));
    case HostAlgorithm::kTree:
      return !encoded;
    case HostAlgorithm::kRing:
      return !encoded && !reduction.to_root;
    case HostAlgorithm::kChain:
      return !encoded && reduction.to_root;
  }
  return false;
}

CostModel CostModel::of_wire(double gigabits_per_second) {
  CostModel model;
  model.wire.beta *= 10 / gigabits_per_second;
  return model;
}

double forecast(HostAlgorithm algorithm, const HostReduction& reduction, const CostModel& model) {
  TORCH_CHECK_VALUE(reduction.hosts >= 1 && reduction.slices >= 1, "a forecast for ", reduction.hosts,
                    " hosts and ", reduction.slices, " slices");
  if (!can_run(algorithm, reduction)) return std::numeric_limits<double>::infinity();
  return on_host(reduction.bytes).seconds(model.host) +
         between_hosts(algorithm, reduction).seconds(model.wire);
}

HostAlgorithm choose(const HostReduction& reduction, const CostModel& model) {
  if (reduction.compression != HostCompression::kNone) {
    return reduction.hosts <= 2 ? HostAlgorithm::kDirect : HostAlgorithm::kPairwise;
  }
  const auto cost = [&](HostAlgorithm algorithm) {
    if (algorithm == HostAlgorithm::kPairwise && reduction.hosts > kPairwiseHosts) {
      return std::numeric_limits<double>::infinity();
    }
    return forecast(algorithm, reduction, model);
  };
  return *std::min_element(kHostAlgorithms.begin(), kHostAlgorithms.end(),
                           [&](HostAlgorithm a, HostAlgorithm b) { return cost(a) < cost(b); });
}

CostModel fit(const std::vector<HostMeasurement>& measurements) {
  TORCH_CHECK_VALUE(!measurements.empty(), "there are no measurements to fit a cost model to");
  LevelFit host, wire;
  for (const auto& [algorithm, reduction, seconds] : measurements) {
    TORCH_CHECK_VALUE(reduction.hosts >= 1 && reduction.slices >= 1 && reduction.bytes > 0 && seconds > 0 &&
                          std::isfinite(seconds),
                      "a measurement of ", reduction.hosts, " hosts, ", reduction.slices, " ranks, ",
                      reduction.bytes, " bytes and ", seconds, " s; all must be more than 0");
    TORCH_CHECK_VALUE(reduction.hosts == 1 || can_run(algorithm, reduction), "a measurement of ",
                      to_string(algorithm), " over ", reduction.hosts, " hosts, which it can't do");
    if (reduction.hosts == 1) host.add(on_host(reduction.bytes), seconds, seconds);
  }
  CostModel model;
  if (!host.empty()) model.host = host.solve("level within a host");
  for (const auto& [algorithm, reduction, seconds] : measurements) {
    if (reduction.hosts == 1) continue;
    wire.add(between_hosts(algorithm, reduction), seconds - on_host(reduction.bytes).seconds(model.host),
             seconds);
  }
  if (!wire.empty()) model.wire = wire.solve("wire");
  return model;
}

std::string to_json(const CostModel& model) {
  const auto level = [](const LevelCost& cost) {
    return nlohmann::json{{"alpha", cost.alpha}, {"beta", cost.beta}};
  };
  return nlohmann::json{{"wire", level(model.wire)}, {"host", level(model.host)}}.dump(2) + "\n";
}

CostModel parse_cost_model(const std::string& json, const std::string& source) {
  return with_source(source, [&] {
    const auto object = nlohmann::json::parse(json);
    TORCH_CHECK_VALUE(object.is_object(), source, ": a cost model is a JSON object with wire and host");
    for (const auto& [key, value] : object.items()) {
      TORCH_CHECK_VALUE((key == "wire" || key == "host") && value.is_object(), source, ": \"", key,
                        "\" is no level of a cost model, which has the objects wire and host");
    }
    CostModel model;
    model.wire = parse_level(object, "wire", model.wire, source);
    model.host = parse_level(object, "host", model.host, source);
    return model;
  });
}

CostModel read_cost_model() {
  const auto path = environment::text(kWireModelVariable);
  if (!path) return {};
  const std::string text = content_of(*path);
  TORCH_CHECK_VALUE(!text.empty(), kWireModelVariable, ": the file ", *path,
                    " can't be read, or is empty; `lockstep bench --fit` writes such a file");
  return parse_cost_model(text, c10::str(kWireModelVariable, ", ", *path));
}

std::vector<HostMeasurement> parse_measurements(const std::string& json, const std::string& source) {
  return with_source(source, [&] {
    const auto list = nlohmann::json::parse(json);
    TORCH_CHECK_VALUE(list.is_array(), source, ": measurements are a JSON array");
    std::vector<HostMeasurement> measurements;
    for (const auto& one : list) {
      measurements.push_back(
          {.algorithm = host_algorithm(one.value("algorithm", "direct")),
           .reduction = {.hosts = json_value<int>(one.at("hosts")),
                         .bytes = json_value<uint64_t>(one.at("bytes")),
                         .slices = one.contains("ranks") ? json_value<int>(one["ranks"]) : 1},
           .seconds = one.at("seconds").get<double>()});
    }
    return measurements;
  });
}

std::vector<HostMeasurement> read_measurements(const std::string& path) {
  const std::string text = content_of(path);
  TORCH_CHECK_VALUE(!text.empty(), "the file ", path,
                    " can't be read, or is empty; it must hold measurements, a JSON array");
  return parse_measurements(text, path);
}

std::string forecast_table(const CostModel& model) {
  constexpr uint64_t kSizes[] = {uint64_t{4} << 10, uint64_t{256} << 10, uint64_t{25} << 20,
                                 uint64_t{400} << 20};
  std::ostringstream table;
  table << "| hosts |";
  for (const uint64_t bytes : kSizes) table << ' ' << text_of_size(bytes) << " |";
  table << "\n|---|---|---|---|---|\n";
  for (const int hosts : {2, 3, 4, 8, 16, 64, 100, 256, 1000}) {
    table << "| " << hosts << " |";
    for (const uint64_t bytes : kSizes) {
      const HostReduction reduction{.hosts = hosts, .bytes = bytes, .slices = 2};
      const HostAlgorithm algorithm = choose(reduction, model);
      table << ' ' << (travels_with_the_call(reduction) ? "with the call" : to_string(algorithm)) << ", "
            << text_of_seconds(forecast(algorithm, reduction, model)) << " |";
    }
    table << '\n';
  }
  return table.str();
}

}  // namespace lockstep::hosts
