#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <lockstep/collectives/host_compression.h>
#include <lockstep/device/streams.h>
#include <lockstep/parallel/ddp/grad_bucket.h>
#include <lockstep/parallel/ddp/reducer/bucket_memory.h>
#include <lockstep/parallel/ddp/reducer/reducer_settings.h>

namespace lockstep {

/// Gradients that are reduced together: of dense parameters of one dtype and device in a flat memory there,
/// or the sparse gradient of one parameter. What the reducer keeps of a bucket; no thread-safety of its own.
struct Bucket {
  std::vector<size_t> parameters;  // in the order of their slots
  std::string purpose;             // "DDP bucket 3 of 5", of its operations
  bool sparse = false;

  // Dense buckets:
  std::shared_ptr<BucketMemory> memory;
  std::vector<at::Tensor> views;  // the slots, by position; sizes and strides as the gradients'
  size_t bytes = 0;               // of gradients, without the gaps between slots
  std::shared_ptr<ErrorFeedback> feedback = std::make_shared<ErrorFeedback>();

  // In this round:
  size_t pending = 0;             // parameters that are not ready
  WritingStreams streams;         // that gradients came on
  at::Tensor sparse_gradient;     // sparse buckets
  std::vector<size_t> copy_back;  // positions whose gradient stays that tensor and gets the values
  c10::intrusive_ptr<c10d::Work> work;
  HookFuture future;  // instead of work, with a hook
};

/// Memory, zeroed, and slots for a dense bucket's gradients, in shared memory where the group has it. Slots
/// begin on cache lines; with a communication hook gradients lie one right after the other, as it expects.
void give_memory(Bucket& bucket, const ReducerSettings& settings);

/// Gives up a dense bucket's memory; see BucketMemory::abandon().
void abandon_memory(Bucket& bucket);

/// A tensor of its own in the position's slot, which must be free; like what autograd puts there.
at::Tensor slot_tensor(Bucket& bucket, size_t position);

/// The gradient of a sparse parameter that was not used.
at::Tensor empty_sparse_gradient(const at::Tensor& parameter);

/// Whether the gradient lies in the position's slot, element for element.
bool lies_in_slot(const Bucket& bucket, size_t position, const at::Tensor& gradient);

/// Whether others than its parameter hold this gradient, or a tensor that shares its storage. `incoming`, in
/// a hook of autograd: what autograd has made the gradient of, which does not count. Gradients of parameters
/// that forward concatenates are views of one storage, so they hold each other.
bool held_by_others(const at::Tensor& gradient, const at::Tensor& incoming = {});

/// Starts the reduction of a full bucket, by the communication hook or the group. `index`: its place in the
/// order of reduction, where it may be the `last`.
void launch_reduction(Bucket& bucket, size_t index, bool last, const ReducerSettings& settings);

/// Waits for it; averages are in the bucket then. Does nothing for a bucket that was not launched.
void await_reduction(Bucket& bucket, const ReducerSettings& settings);

/// The operation's own duration; zero for groups that do not measure it.
std::chrono::nanoseconds duration_of(const c10::intrusive_ptr<c10d::Work>& work);

}  // namespace lockstep
