#include <algorithm>
#include <atomic>
#include <bit>
#include <vector>

#include <lockstep/collectives/algorithms/hosts/encoded_exchange.h>
#include <lockstep/collectives/algorithms/hosts/owners_exchange.h>
#include <lockstep/collectives/algorithms/hosts/slice_exchange.h>

namespace lockstep::collectives::internal::algorithms::hosts {
namespace {

using transport::GroupChannel;

class DirectExchange final : public OwnersExchange {
 public:
  using OwnersExchange::OwnersExchange;

  int steps() const override { return 1; }
  size_t landing_bytes(size_t bytes) const override { return bytes * (hosts_ - 1); }
  void post(int, Crossing& crossing) override {
    if (wants_result(host_)) {
      for_others([&](int host) { receive(host, crossing, landed(host, crossing), bytes(crossing)); });
    }
    for_others([&](int host) {
      if (wants_result(host)) send(host, crossing, crossing.partial, bytes(crossing));
    });
  }
  void complete(int, Crossing& crossing) override {
    if (!wants_result(host_)) return;
    std::vector<const void*> partials;
    for (int host = 0; host < hosts_; ++host) {
      partials.push_back(host == host_ ? crossing.partial : landed(host, crossing));
    }
    arithmetic_.finish(crossing.partial, partials.data(), partials.size(), crossing.count);
  }

 private:
  std::byte* landed(int host, const Crossing& crossing) const {
    return crossing.landing + (host < host_ ? host : host - 1) * bytes(crossing);
  }
};

/// The algorithms that cut a slice into a part for each host.
class PartsExchange : public OwnersExchange {
 public:
  using OwnersExchange::OwnersExchange;

 protected:
  /// Parts [first, last): where they lie in the slice, in bytes.
  Range byte_parts(const Crossing& crossing, int first, int last) const {
    const Range range = parts(crossing.count, first, last);
    return {range.begin * arithmetic_.element_size(), range.count * arithmetic_.element_size()};
  }
  Range byte_part(const Crossing& crossing, int host) const { return byte_parts(crossing, host, host + 1); }
  /// Folds what has landed into the own partial of the same parts; `received_first`: in this order.
  void fold(Crossing& crossing, const Range& range, bool received_first, bool last) {
    std::byte* own = crossing.partial + range.begin;
    const void* const inputs[] = {received_first ? crossing.landing : own,
                                  received_first ? own : crossing.landing};
    const size_t count = range.count / arithmetic_.element_size();
    last ? arithmetic_.finish(own, inputs, 2, count) : arithmetic_.combine(own, inputs[0], inputs[1], count);
  }
};

class PairwiseExchange final : public PartsExchange {
 public:
  using PartsExchange::PartsExchange;

  int steps() const override { return 2; }
  size_t landing_bytes(size_t bytes) const override {
    const size_t element = arithmetic_.element_size();
    return (hosts_ - 1) * largest_part(bytes / element) * element;
  }
  void post(int step, Crossing& crossing) override {
    const Range own = byte_part(crossing, host_);
    for_others([&](int host) {
      const Range theirs = byte_part(crossing, host);
      if (step == 0) {
        receive(host, crossing, landed(host, crossing), own.count);
      } else if (wants_result(host_)) {
        receive(host, crossing, crossing.partial + theirs.begin, theirs.count);
      }
    });
    for_others([&](int host) {
      const Range out = step == 0 ? byte_part(crossing, host) : own;
      if (step == 0 || wants_result(host)) send(host, crossing, crossing.partial + out.begin, out.count);
    });
  }
  void complete(int step, Crossing& crossing) override {
    if (step == 1) return;
    const Range own = byte_part(crossing, host_);
    std::vector<const void*> partials;
    for (int host = 0; host < hosts_; ++host) {
      partials.push_back(host == host_ ? crossing.partial + own.begin : landed(host, crossing));
    }
    arithmetic_.finish(crossing.partial + own.begin, partials.data(), partials.size(),
                       own.count / arithmetic_.element_size());
  }

 private:
  std::byte* landed(int host, const Crossing& crossing) const {
    const size_t room = largest_part(crossing.count) * arithmetic_.element_size();
    return crossing.landing + (host < host_ ? host : host - 1) * room;
  }
};

class RingExchange final : public PartsExchange {
 public:
  using PartsExchange::PartsExchange;

  int steps() const override { return 2 * (hosts_ - 1); }
  void post(int step, Crossing& crossing) override {
    const Range in = incoming(step, crossing);
    const Range out = part_at(crossing, reducing(step) ? host_ - step : host_ + 1 - round(step));
    // Before the second round the parts are sums of this host's own; then results, which replace them.
    std::byte* to = reducing(step) ? crossing.landing : crossing.partial + in.begin;
    receive((host_ + hosts_ - 1) % hosts_, crossing, to, in.count);
    send((host_ + 1) % hosts_, crossing, crossing.partial + out.begin, out.count);
  }
  void complete(int step, Crossing& crossing) override {
    if (reducing(step)) fold(crossing, incoming(step, crossing), true, step == hosts_ - 2);
  }

 private:
  bool reducing(int step) const { return step < hosts_ - 1; }
  int round(int step) const { return step - (hosts_ - 1); }
  /// Counted round and round.
  Range part_at(const Crossing& crossing, int index) const {
    return byte_part(crossing, (index + 2 * hosts_) % hosts_);
  }
  Range incoming(int step, const Crossing& crossing) const {
    return part_at(crossing, reducing(step) ? host_ - step - 1 : host_ - round(step));
  }
};

class HalvingExchange final : public PartsExchange {
 public:
  using PartsExchange::PartsExchange;

  int steps() const override { return 2 * levels(); }
  void post(int step, Crossing& crossing) override {
    const int distance = distance_of(step);
    const int partner = host_ ^ distance;
    const Range own = kept(host_, distance, crossing);
    const Range theirs = kept(partner, distance, crossing);
    if (step < levels()) {
      receive(partner, crossing, crossing.landing, own.count);
      send(partner, crossing, crossing.partial + theirs.begin, theirs.count);
    } else {
      receive(partner, crossing, crossing.partial + theirs.begin, theirs.count);
      send(partner, crossing, crossing.partial + own.begin, own.count);
    }
  }
  void complete(int step, Crossing& crossing) override {
    if (step >= levels()) return;
    const int distance = distance_of(step);
    fold(crossing, kept(host_, distance, crossing), (host_ & distance) != 0, distance == 1);
  }

 private:
  int levels() const { return std::bit_width(static_cast<unsigned>(hosts_)) - 1; }
  /// H/2, H/4, … 1; 1, … H/4, H/2.
  int distance_of(int step) const { return step < levels() ? hosts_ >> (step + 1) : 1 << (step - levels()); }
  /// What `host` keeps after the exchange at this distance: `distance` parts around its own.
  Range kept(int host, int distance, const Crossing& crossing) const {
    const int first = host / distance * distance;
    return byte_parts(crossing, first, first + distance);
  }
};

class TreeExchange final : public OwnersExchange {
 public:
  TreeExchange(GroupChannel& channel, const Arithmetic& arithmetic, int slice, int root_host)
      : OwnersExchange(channel, arithmetic, slice, root_host),
        top_(std::max(root_host, 0)),
        place_((host_ - top_ + hosts_) % hosts_) {}

  int steps() const override { return root_host_ < 0 ? 2 * levels() : levels(); }
  void post(int step, Crossing& crossing) override {
    const int distance = distance_of(step);
    const bool up = step < levels();
    if (place_ % distance != 0) return;
    const bool lower = place_ % (2 * distance) == 0;
    const int partner = lower ? place_ + distance : place_ - distance;
    if (partner >= hosts_) return;
    const int host = (partner + top_) % hosts_;
    if (lower == up) {
      receive(host, crossing, up ? crossing.landing : crossing.partial, bytes(crossing));
    } else {
      send(host, crossing, crossing.partial, bytes(crossing));
    }
  }
  void complete(int step, Crossing& crossing) override {
    const int distance = distance_of(step);
    if (step >= levels() || place_ % (2 * distance) != 0 || place_ + distance >= hosts_) return;
    if (step == levels() - 1) {
      const void* const inputs[] = {crossing.partial, crossing.landing};
      arithmetic_.finish(crossing.partial, inputs, 2, crossing.count);
    } else {
      arithmetic_.combine(crossing.partial, crossing.partial, crossing.landing, crossing.count);
    }
  }

 private:
  int levels() const { return std::bit_width(static_cast<unsigned>(hosts_ - 1)); }
  /// 1, 2, 4 …; … 4, 2, 1.
  int distance_of(int step) const { return 1 << (step < levels() ? step : 2 * levels() - 1 - step); }

  const int top_;    // the root's host, or 0
  const int place_;  // counted from there
};

class ChainExchange final : public OwnersExchange {
 public:
  ChainExchange(GroupChannel& channel, const Arithmetic& arithmetic, int slice, int root_host)
      : OwnersExchange(channel, arithmetic, slice, root_host),
        place_((host_ - root_host - 1 + hosts_) % hosts_) {}

  int steps() const override { return hosts_ - 1; }
  void post(int step, Crossing& crossing) override {
    if (step == place_) send((host_ + 1) % hosts_, crossing, crossing.partial, bytes(crossing));
    if (step == place_ - 1) {
      receive((host_ + hosts_ - 1) % hosts_, crossing, crossing.landing, bytes(crossing));
    }
  }
  void complete(int step, Crossing& crossing) override {
    if (step != place_ - 1) return;
    if (place_ == hosts_ - 1) {
      const void* const inputs[] = {crossing.landing, crossing.partial};
      arithmetic_.finish(crossing.partial, inputs, 2, crossing.count);
    } else {
      arithmetic_.combine(crossing.partial, crossing.landing, crossing.partial, crossing.count);
    }
  }

 private:
  const int place_;  // the last one is the root's
};

constexpr int kNotForced = -1;
std::atomic<int> forced_algorithm{kNotForced};

}  // namespace

HostAlgorithm algorithm_for(const HostReduction& reduction, const CostModel& model) {
  const int forced = forced_algorithm.load(std::memory_order_relaxed);
  if (forced == kNotForced) return lockstep::hosts::choose(reduction, model);
  for (const auto algorithm :
       {static_cast<HostAlgorithm>(forced), HostAlgorithm::kChain, HostAlgorithm::kRing}) {
    if (lockstep::hosts::can_run(algorithm, reduction)) return algorithm;
  }
  return HostAlgorithm::kPairwise;
}

void force_host_algorithm_for_testing(std::optional<HostAlgorithm> algorithm) {
  forced_algorithm.store(algorithm ? static_cast<int>(*algorithm) : kNotForced, std::memory_order_relaxed);
}

std::unique_ptr<SliceExchange> make_slice_exchange(HostAlgorithm algorithm, GroupChannel& channel,
                                                   const Arithmetic& arithmetic, int slice, int root_host,
                                                   HostCompression compression) {
  if (compression != HostCompression::kNone) {
    return make_encoded_exchange(algorithm, channel, arithmetic, slice, root_host, compression);
  }
  switch (algorithm) {
    case HostAlgorithm::kPairwise:
      return std::make_unique<PairwiseExchange>(channel, arithmetic, slice, root_host);
    case HostAlgorithm::kHalving:
      return std::make_unique<HalvingExchange>(channel, arithmetic, slice, root_host);
    case HostAlgorithm::kTree:
      return std::make_unique<TreeExchange>(channel, arithmetic, slice, root_host);
    case HostAlgorithm::kRing:
      return std::make_unique<RingExchange>(channel, arithmetic, slice, root_host);
    case HostAlgorithm::kChain:
      return std::make_unique<ChainExchange>(channel, arithmetic, slice, root_host);
    case HostAlgorithm::kDirect:
      break;
  }
  return std::make_unique<DirectExchange>(channel, arithmetic, slice, root_host);
}

}  // namespace lockstep::collectives::internal::algorithms::hosts
