#include <c10/util/Exception.h>

#include <lockstep/collectives/algorithms/hosts/encoded_exchange.h>
#include <lockstep/collectives/algorithms/hosts/owners_exchange.h>
#include <lockstep/collectives/kernels/wire_codec.h>

namespace lockstep::collectives::internal::algorithms::hosts {
namespace {

class EncodedExchange : public OwnersExchange {
 public:
  EncodedExchange(transport::GroupChannel& channel, const Arithmetic& arithmetic, int slice, int root_host,
                  HostCompression compression)
      : OwnersExchange(channel, arithmetic, slice, root_host),
        codec_(wire_codec(compression)),
        compression_(compression) {}

 protected:
  static float* values(const Crossing& crossing) { return reinterpret_cast<float*>(crossing.partial); }
  size_t encoded(size_t count) const { return encoded_bytes(compression_, count); }
  /// Room for so many encoded elements.
  size_t slot_bytes(size_t count) const { return whole_lines(encoded(count)); }

  const WireCodec& codec_;

 private:
  const HostCompression compression_;
};

class EncodedDirectExchange final : public EncodedExchange {
 public:
  using EncodedExchange::EncodedExchange;

  int steps() const override { return 1; }
  size_t landing_bytes(size_t bytes) const override { return hosts_ * slot_bytes(bytes / sizeof(float)); }
  void post(int, Crossing& crossing) override {
    const size_t bytes = encoded(crossing.count);
    if (wants_result(host_)) {
      for_others([&](int host) { receive(host, crossing, slot(host, crossing), bytes); });
    }
    std::byte* own = slot(host_, crossing);
    codec_.encode(own, values(crossing), crossing.partial_errors, crossing.count);
    for_others([&](int host) {
      if (wants_result(host)) send(host, crossing, own, bytes);
    });
  }
  void complete(int, Crossing& crossing) override {
    if (!wants_result(host_)) return;
    codec_.decode_into(values(crossing), slot(0, crossing), crossing.count);
    for (int host = 1; host < hosts_; ++host) {
      codec_.decode_add(values(crossing), slot(host, crossing), crossing.count);
    }
    arithmetic_.divide(values(crossing), crossing.count);
  }

 private:
  std::byte* slot(int host, const Crossing& crossing) const {
    return crossing.landing + host * slot_bytes(crossing.count);
  }
};

class EncodedPairwiseExchange final : public EncodedExchange {
 public:
  using EncodedExchange::EncodedExchange;

  int steps() const override { return 2; }
  size_t landing_bytes(size_t bytes) const override {
    return 2 * hosts_ * slot_bytes(largest_part(bytes / sizeof(float)));
  }
  size_t encoded_results(size_t count) const override { return part(count, host_).count; }

  void post(int step, Crossing& crossing) override {
    const size_t own = encoded(part(crossing.count, host_).count);
    if (step == 0) {
      for_others([&](int host) { receive(host, crossing, incoming(host, crossing), own); });
      for_others([&](int host) {
        const Range range = part(crossing.count, host);
        float* errors = crossing.partial_errors == nullptr ? nullptr : crossing.partial_errors + range.begin;
        codec_.encode(outgoing(host, crossing), values(crossing) + range.begin, errors, range.count);
        send(host, crossing, outgoing(host, crossing), encoded(range.count));
      });
      return;
    }
    for_others([&](int host) {
      if (!wants_result(host_)) return;
      receive(host, crossing, incoming(host, crossing), encoded(part(crossing.count, host).count));
    });
    for_others([&](int host) {
      if (wants_result(host)) send(host, crossing, outgoing(host_, crossing), own);
    });
  }

  void complete(int step, Crossing& crossing) override {
    if (step == 0) return fold(crossing);
    if (!wants_result(host_)) return;
    for_others([&](int host) {
      const Range range = part(crossing.count, host);
      codec_.decode_into(values(crossing) + range.begin, incoming(host, crossing), range.count);
    });
  }

 private:
  /// Makes the result of the own part.
  void fold(Crossing& crossing) {
    const Range own = part(crossing.count, host_);
    float* result = values(crossing) + own.begin;
    for (int host = 0; host < hosts_; ++host) {
      if (host != host_) codec_.decode_add(result, incoming(host, crossing), own.count);
    }
    arithmetic_.divide(result, own.count);
    codec_.encode(outgoing(host_, crossing), result, crossing.result_errors, own.count);
    codec_.decode_into(result, outgoing(host_, crossing), own.count);
  }
  std::byte* outgoing(int host, const Crossing& crossing) const {
    return crossing.landing + host * slot_bytes(largest_part(crossing.count));
  }
  std::byte* incoming(int host, const Crossing& crossing) const { return outgoing(hosts_ + host, crossing); }
};

}  // namespace

std::unique_ptr<SliceExchange> make_encoded_exchange(HostAlgorithm algorithm,
                                                     transport::GroupChannel& channel,
                                                     const Arithmetic& arithmetic, int slice, int root_host,
                                                     HostCompression compression) {
  if (algorithm == HostAlgorithm::kDirect) {
    return std::make_unique<EncodedDirectExchange>(channel, arithmetic, slice, root_host, compression);
  }
  TORCH_INTERNAL_ASSERT(algorithm == HostAlgorithm::kPairwise);
  return std::make_unique<EncodedPairwiseExchange>(channel, arithmetic, slice, root_host, compression);
}

}  // namespace lockstep::collectives::internal::algorithms::hosts
