#pragma once

#include <cstdint>
#include <vector>

#include <c10/core/Device.h>

namespace lockstep {

/// Which micro-batches' activations Pipe computes again in backward in place of keeping them; torch's
/// "never", "except_last" and "always".
enum class PipeCheckpoint { kNever, kExceptLast, kAlways };

struct PipeOptions {
  /// One for each partition, all of one kind; more are not used. The same one may stand there several times:
  /// {kCPU, kCPU} are two threads. Empty: the accelerator's devices where this process has one, else as many
  /// times the CPU as there are partitions.
  std::vector<at::Device> devices = {};
  /// Into how many micro-batches a batch is split; fewer where torch::chunk makes fewer.
  int64_t chunks = 1;
  /// In training and evaluation alike, where gradients are on. torch's default is kExceptLast.
  PipeCheckpoint checkpoint = PipeCheckpoint::kNever;
};

}  // namespace lockstep
