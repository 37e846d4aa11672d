#include <vector>

#include <c10/core/ScalarType.h>

#include <lockstep/collectives/algorithms/exposed_memory.h>
#include <lockstep/collectives/algorithms/hosts/agreement.h>
#include <lockstep/collectives/algorithms/hosts/arithmetic.h>
#include <lockstep/collectives/algorithms/hosts/hosts.h>
#include <lockstep/collectives/algorithms/hosts/segmented_reduction.h>

namespace lockstep::collectives::internal::algorithms::hosts {
namespace {

using transport::GroupChannel;
using transport::HostChannel;

/// The kernels that fold partial results of this type and operation to one.
const ReduceKernels& kernels_of_partials(at::ScalarType type, ReduceOperation operation) {
  if (type == at::kHalf || type == at::kBFloat16) type = at::kFloat;
  return reduce_kernels(type, operation == ReduceOperation::kAverage ? ReduceOperation::kSum : operation);
}

/// A tensor that fits into an announcement.
class SmallReduction final : public AgreementPayload, public transport::PayloadCombiner {
 public:
  SmallReduction(const Signature& signature, int ranks)
      : kernels_(reduce_kernels(signature.real_dtype(), static_cast<ReduceOperation>(signature.operation))),
        accumulators_(
            kernels_of_partials(signature.real_dtype(), static_cast<ReduceOperation>(signature.operation))),
        ranks_(ranks),
        count_(signature.real_numel()) {}

  // Beyond eight members; combine() runs on the leaders of eight, finish() on the host's.
  const transport::PayloadCombiner* combiner() const override { return this; }
  void combine(void* partial, const std::vector<const void*>& inputs) const override {
    kernels_.partial(partial, inputs.data(), inputs.size(), ranks_, count_);
  }
  void finish(void*, const std::vector<const void*>& partials) const override { in_tree_ = partials; }

  size_t combine_host(void* partial, HostChannel& host) const override {
    if (host.size() > HostChannel::kFlatRanks) {
      accumulators_.partial(partial, in_tree_.data(), in_tree_.size(), ranks_, count_);
    } else {
      std::vector<const void*> inputs;
      for (int place = 0; place < host.size(); ++place) inputs.push_back(host.payload(place));
      kernels_.partial(partial, inputs.data(), inputs.size(), ranks_, count_);
    }
    return count_ * kernels_.accumulator_size;
  }
  void finish_hosts(void* result, const std::vector<const void*>& partials) const override {
    kernels_.finish(&result, 1, partials.data(), partials.size(), ranks_, count_);
  }

 private:
  const ReduceKernels& kernels_;
  const ReduceKernels& accumulators_;
  int ranks_;
  size_t count_;
  mutable std::vector<const void*> in_tree_;  // the partials below the leader, in shared memory
};

}  // namespace

void reduce(GroupChannel& channel, const Terms& terms, const Signature& signature, void* data,
            BufferOwner owner) {
  HostChannel& host = channel.host();
  const size_t bytes = signature.real_numel() * c10::elementSize(signature.real_dtype());
  const bool wants_result = signature.root < 0 || signature.root == channel.rank();
  auto announcement = announcement_of(signature);
  host.begin(terms.deadline, terms.background);
  Agreement agreement(channel);
  if (bytes <= HostChannel::kPayloadBytes) {
    const SmallReduction small(signature, channel.size());
    announcement.payload = data;
    announcement.payload_bytes = bytes;
    host.announce(announcement);
    agreement.reach(signature, 0, &small);
    // The result stays until the next operation is announced: success can be made final first.
    host.commit();
    if (wants_result) copy_bytes(data, agreement.result(), bytes);
    return;
  }
  const Arithmetic arithmetic(signature, channel.size());
  SegmentedReduction reduction(channel, terms, signature, arithmetic, agreement,
                               static_cast<std::byte*>(data));
  const transport::Arena& arena = host.transport().arena();
  const bool exposing = owner == BufferOwner::kUser && wants_result;
  announcement.memory = exposing ? arena.find_writable(data, bytes) : arena.find(data, bytes);
  ExposedMemory exposed(host, exposing && announcement.memory ? data : nullptr, bytes);
  host.announce(announcement);
  agreement.reach(signature, reduction.scratch_bytes());
  reduction.run();
  algorithms::finish(host);
  exposed.succeeded();
}

void barrier(GroupChannel& channel, const Terms& terms) {
  HostChannel& host = channel.host();
  host.begin(terms.deadline, terms.background);
  Agreement agreement(channel);
  host.announce(announcement_of(Signature::barrier()));
  agreement.reach(Signature::barrier(), 0);
  host.commit();
}

}  // namespace lockstep::collectives::internal::algorithms::hosts
