#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <lockstep/collectives/process_group.h>

namespace lockstep {
class LockstepBackend;
}

namespace lockstep::pipeline::internal {

/// Lists of tensors between the ranks of a group, whose number, shapes, dtypes and orders in memory the receiver need not
/// know: a message in front tells them, and brings small tensors itself. Undefined tensors arrive undefined, and whether
/// one requires a gradient is told. Tensors of devices pass through the host's memory.
///
/// Sends never wait. Within a host a tensor is copied once into shared memory, from where the receiver takes it without the
/// sender; between hosts the group's background thread moves it. Lists of one sender with one tag arrive in order. Used by
/// one thread. Errors are those of the group's messages.
class TensorMessages {
 public:
  using Tensors = std::vector<at::Tensor>;

  /// Throws c10::ValueError when the group has no Lockstep backend for CPU tensors.
  explicit TensorMessages(const ProcessGroup& group);
  ~TensorMessages();

  /// `to`: a group rank. Throws c10::ValueError for tensors that are sparse or quantized.
  void send(const Tensors& tensors, int to, int tag);
  /// Waits until all that was sent has arrived.
  void finish_sends();
  /// Waits until what was sent with this tag has arrived.
  void finish_sends(int tag);
  /// Forgets sends that have arrived; without waiting.
  void collect_sends();
  /// Fails the group on all ranks, whose errors tell the reason.
  void abort(const std::string& reason);
  /// Of sends that have not arrived yet, as of the last collect_sends().
  int64_t bytes_in_flight() const { return bytes_in_flight_; }
  /// Whether the rank is on another host.
  bool is_far(int rank) const;

  /// A list that is asked for.
  class Receipt {
   public:
    /// Asks for the rest as soon as the message in front is there; does not wait.
    void advance() { advance(/*waits=*/false); }
    /// Waits for the tensors; each on `device`. Once.
    Tensors take(const c10::Device& device);

   private:
    friend class TensorMessages;
    enum class State { kFront, kDescription, kTensors, kDone };

    Receipt(TensorMessages& messages, int from, int tag);
    void advance(bool waits);
    bool arrived(bool waits);
    void describe(const int64_t* words, int64_t count);
    void unpack(const std::byte* payload);

    TensorMessages& messages_;
    int from_;
    int tag_;
    State state_ = State::kFront;
    at::Tensor front_;
    at::Tensor description_;  // where it does not fit into the message in front
    Tensors tensors_;
    std::vector<bool> requires_grad_;
    std::vector<c10::intrusive_ptr<c10d::Work>> works_;  // of the state
  };
  std::shared_ptr<Receipt> receive(int from, int tag);

 private:
  struct Sending {
    c10::intrusive_ptr<c10d::Work> work;
    int tag;
    int64_t bytes;
  };

  void start_send(const at::Tensor& memory, int to, int tag, int64_t bytes);
  c10::intrusive_ptr<c10d::Work> start_receive(const at::Tensor& memory, int from, int tag);

  ProcessGroup group_;
  c10::intrusive_ptr<LockstepBackend> backend_;
  std::vector<Sending> sending_;
  int64_t bytes_in_flight_ = 0;
};

}  // namespace lockstep::pipeline::internal
