#pragma once

#include <cstdint>

#include <lockstep/collectives/process_group.h>
#include <lockstep/parallel/ddp/grad_bucket.h>

/// Communication hooks that send a byte for each gradient element.
///
/// Each rank quantises its bucket to 0…255, with a scale and a zero point chosen from the smallest and the
/// largest element; all ranks gather each other's bytes, and add them up in float32. So each rank receives
/// (group size − 1) bytes for an element, where an all-reduce of float32 moves about 8 whatever the size: a
/// saving for up to some 8 ranks. The error is at most half a scale a rank, in each step anew: there is no
/// error feedback. A NaN or an infinite element makes all elements that share its scale NaN.
///
/// float32, float64, float16, bfloat16; throws c10::ValueError for other dtypes, and what all_gather throws.
/// torch/distributed/algorithms/ddp_comm_hooks/quantization_hooks.py, with the same numbers. PyTorch gathers
/// the scales first and the bytes then; here they travel together, so there is one collective.
namespace lockstep {

/// One scale for the whole bucket.
HookFuture quantization_pertensor_hook(const ProcessGroup& process_group, GradBucket& bucket);

/// One scale for each `bucket_size` elements that follow each other (which PyTorch calls a channel): finer,
/// for 8 bytes more a channel.
///
///     model.register_comm_hook(nullptr, lockstep::quantization_perchannel_hook);
///     model.register_comm_hook(nullptr, lockstep::QuantizationPerChannelHook{.bucket_size = 128});
///     auto future = lockstep::quantization_perchannel_hook(group, bucket, 128);
struct QuantizationPerChannelHook {
  int64_t bucket_size = 512;

  HookFuture operator()(const ProcessGroup& process_group, GradBucket& bucket) const {
    return (*this)(process_group, bucket, bucket_size);
  }
  HookFuture operator()(const ProcessGroup& process_group, GradBucket& bucket, int64_t channel_size) const;
};
inline constexpr QuantizationPerChannelHook quantization_perchannel_hook{};

}  // namespace lockstep
