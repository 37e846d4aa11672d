#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <lockstep/collectives/operation_queue.h>
#include <lockstep/transport/shared_memory/group_channel.h>

namespace lockstep {

struct Signature;
namespace algorithms {
struct Terms;
}

/// The c10d backend "lockstep": collectives on CPU tensors among ranks of one host, through shared memory.
///
/// Behind every c10d::ProcessGroup that init_process_group() and new_group() give. Operations run in order of
/// submission; reductions in rank order, so all ranks and all runs get the same bits. Tensors must be dense
/// (any memory order without overlap or gaps). After a failure every further operation fails with the first
/// cause. Thread-safe.
class LockstepBackend final : public c10d::Backend {
 public:
  struct Settings {
    std::string name;  // of the group, for messages
    std::chrono::milliseconds timeout{};
  };

  LockstepBackend(std::shared_ptr<transport::GroupChannel> channel, Settings settings);
  ~LockstepBackend() override;

  const std::string getBackendName() const override { return "lockstep"; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ms_ = timeout.count(); }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options = {}) override;

  /// A flat, uninitialised tensor of `size` elements in the arena, where collectives need not copy. Keeps the
  /// arena alive.
  at::Tensor allocateTensor(long size, at::TensorOptions options = {}) override;
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }

  /// Fails the group on all ranks; from any thread.
  void abort() override;
  /// Finishes the operations submitted so far (as Gloo does); further ones fail. After abort() it returns at
  /// once.
  void shutdown() override;

  const std::string& name() const { return settings_.name; }

 private:
  c10::intrusive_ptr<c10d::Work> submit(const Signature& signature, c10d::OpType type, const char* title,
                                        std::vector<at::Tensor> inputs, std::vector<at::Tensor> outputs,
                                        std::chrono::milliseconds timeout, bool asynchronous,
                                        std::function<void(const algorithms::Terms&)> body);

  std::shared_ptr<transport::GroupChannel> channel_;
  Settings settings_;
  std::atomic<std::chrono::milliseconds::rep> timeout_ms_;
  std::shared_ptr<OperationQueue> queue_;
};

}  // namespace lockstep
